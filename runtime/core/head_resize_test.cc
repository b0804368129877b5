// Jobs between the least and the most ranks they asked for, and what a person asks for with `gtrain scale`.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "nlohmann/json.hpp"
#include "runtime/core/head_test_world.h"

namespace gtrain::core {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class ResizeTest : public HeadTestWorld {
 protected:
  // Of one rank a node, on node 1, stepping.
  JobId Train(const std::string& spec = "train 1 3 one-per-node budget0") {
    Hello("1");
    const JobId job = Submit(spec);
    StartRanks(job);
    return job;
  }
  void Commit(const JobId& job, int64_t step, uint64_t generation = 1) {
    CheckpointReport report;
    report.job = job;
    report.generation = {generation};
    report.timeline = Stored(job).timeline;
    report.step = step;
    report.manifest = "/ckpt/step";
    FromNode("1", report);
  }
  void HasRoomFor(absl::Duration time) {
    Hello("2");
    Pass(time, {"1", "2"});
  }
};

TEST_F(ResizeTest, ItGrowsBehindACheckpointOnceThereIsRoom) {
  const JobId job = Train();
  Commit(job, 10);
  HasRoomFor(absl::Seconds(31));
  EXPECT_THAT(Sent<Revoke>(), IsEmpty()) << "nothing of the training is lost";
  Commit(job, 20);
  const auto revokes = Sent<Revoke>();
  ASSERT_THAT(revokes, SizeIs(1));
  EXPECT_EQ(revokes[0].second.reason, "it grows from 1 to 2 ranks, from the checkpoint of step 20");
  FromNode("1", GenerationGone{job, {1}});
  Pass(absl::Seconds(1), {"1", "2"});
  EXPECT_EQ(Stored(job).grant->ranks.size(), 2u);
  EXPECT_EQ(Status(job).at("restarts"), 0) << "and nobody is charged: it has no budget";
  EXPECT_THAT(Status(job).at("last_fault").dump(), HasSubstr("it grows from 1 to 2"));
}

TEST_F(ResizeTest, RoomThatHasJustComeIsNotTrustedYet) {
  const JobId job = Train();
  HasRoomFor(absl::Seconds(25));
  Commit(job, 10);
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  FromNode("2",
           NoticeSeen{1, {.kind = NoticeKind::kLeave, .left = absl::Seconds(1), .source = "x", .id = "x"}});
  Pass(absl::Seconds(10), {"1", "2"});
  FromNode("2", NoticeSeen{2, {}});
  Pass(absl::Seconds(10), {"1", "2"});
  Commit(job, 20);
  EXPECT_THAT(Sent<Revoke>(), IsEmpty()) << "the time begins anew when the room was gone";
  Pass(absl::Seconds(21), {"1", "2"});
  Commit(job, 30);
  EXPECT_THAT(Sent<Revoke>(), SizeIs(1));
}

TEST_F(ResizeTest, WhoWaitsComesFirst) {
  const JobId job = Train();
  Submit("large 3 3 one-per-node");
  HasRoomFor(absl::Seconds(60));
  Commit(job, 10);
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
}

TEST_F(ResizeTest, WhatHasAllItAskedForStays) {
  const JobId job = Train("train 1 1 one-per-node");
  HasRoomFor(absl::Seconds(60));
  Commit(job, 10);
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
}

TEST_F(ResizeTest, ACheckpointOfAnEarlierGenerationIsNone) {
  const JobId job = Train("train 1 3 one-per-node");
  HasRoomFor(absl::Seconds(60));
  FromNode("1", RankExited{Exit(job, 1, 0, 1)});
  FromNode("1", GenerationGone{job, {1}});
  Pass(absl::Seconds(2), {"1", "2"});
  StartRanks(job);
  Hello("3");
  Pass(absl::Seconds(60), {"1", "2", "3"});
  const size_t before = Sent<Revoke>().size();
  Commit(job, 10, 1);
  EXPECT_EQ(Sent<Revoke>().size(), before);
}

TEST_F(ResizeTest, WhoAsksForMoreGetsThemBehindTheNextCheckpointAndWaitsForNothingElse) {
  const JobId job = Train("train 1 3 one-per-node budget0");
  Hello("2");
  Hello("3");
  ASSERT_TRUE(FromClient(ClientScale{job, 1}).ok);
  Pass(absl::Seconds(60), {"1", "2", "3"});
  Commit(job, 10);
  EXPECT_THAT(Sent<Revoke>(), IsEmpty()) << "it has the one it should have";
  const ClientReply reply = FromClient(ClientScale{job, 2});
  EXPECT_EQ(nlohmann::json::parse(reply.json).at("when"), "behind its next checkpoint");
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  Commit(job, 20);
  const auto revokes = Sent<Revoke>();
  ASSERT_THAT(revokes, SizeIs(1));
  EXPECT_EQ(revokes[0].second.reason, "it grows from 1 to 2 ranks, from the checkpoint of step 20");
  FromNode("1", GenerationGone{job, {1}});
  Pass(absl::Seconds(1), {"1", "2", "3"});
  EXPECT_EQ(Stored(job).grant->ranks.size(), 2u) << "and not the three that its job file allows";
}

TEST_F(ResizeTest, ItShrinksBehindACheckpointAndAtOnceWhenTold) {
  Hello("1");
  Hello("2");
  Hello("3");
  const JobId job = Submit("train 1 3 one-per-node budget0");
  StartRanks(job);
  ASSERT_EQ(Stored(job).grant->ranks.size(), 3u);
  ASSERT_TRUE(FromClient(ClientScale{job, 2}).ok);
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  Commit(job, 10);
  auto revokes = Sent<Revoke>();
  ASSERT_THAT(revokes, SizeIs(3));
  EXPECT_EQ(revokes[0].second.reason, "it shrinks from 3 to 2 ranks, from the checkpoint of step 10");
  for (const char* node : {"1", "2", "3"}) FromNode(node, GenerationGone{job, {1}});
  Pass(absl::Seconds(1), {"1", "2", "3"});
  ASSERT_EQ(Stored(job).grant->ranks.size(), 2u);
  StartRanks(job);
  ASSERT_TRUE(FromClient(ClientScale{job, 1, true}).ok);
  revokes = Sent<Revoke>();
  ASSERT_THAT(revokes, SizeIs(5)) << "--now waits for no checkpoint";
  EXPECT_EQ(Status(job).at("restarts"), 0);
}

TEST_F(ResizeTest, WhatWasAskedForOutlivesTheHead) {
  const JobId job = Train("train 1 3 one-per-node budget0");
  Hello("2");
  Hello("3");
  ASSERT_TRUE(FromClient(ClientScale{job, 2}).ok);
  Boot();
  EXPECT_EQ(Stored(job).size_wanted, 2);
}

TEST_F(ResizeTest, WhatTheMeshDoesNotTakeIsRefusedAndNotWaitedForForEver) {
  const JobId job = Train("train 1 4 in-twos");
  ASSERT_EQ(Stored(job).grant->ranks.size(), 4u);
  EXPECT_THAT(FromClient(ClientScale{job, 3}).error, HasSubstr("takes ranks in units of 2; 3 ranks are no"));
  ASSERT_TRUE(FromClient(ClientScale{job, 2}).ok);
  Commit(job, 10);
  FromNode("1", GenerationGone{job, {1}});
  Pass(absl::Seconds(1), {"1"});
  EXPECT_EQ(Stored(job).grant->ranks.size(), 2u);
}

TEST_F(ResizeTest, WhatTheJobFileDoesNotAllowIsRefusedByName) {
  const JobId job = Train("train 2 3");
  for (const int size : {1, 4}) {
    const ClientReply reply = FromClient(ClientScale{job, size});
    EXPECT_FALSE(reply.ok);
    EXPECT_THAT(reply.error, HasSubstr("allows 2 to 3 ranks, not"));
  }
  const JobId fixed = Submit("fixed 1 1 one-per-node");
  EXPECT_THAT(FromClient(ClientScale{fixed, 2}).error, HasSubstr("says `ranks: 1`: only"));
  EXPECT_THAT(FromClient(ClientScale{job, 2}, "", Role::kUser, "eve").error, HasSubstr("belongs to"));
}

}  // namespace
}  // namespace gtrain::core
