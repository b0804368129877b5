// Jobs between the least and the most ranks they asked for.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "nlohmann/json.hpp"
#include "runtime/core/head_test_world.h"

namespace gtrain::core {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class GrowthTest : public HeadTestWorld {
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

TEST_F(GrowthTest, ItGrowsBehindACheckpointOnceThereIsRoom) {
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

TEST_F(GrowthTest, RoomThatHasJustComeIsNotTrustedYet) {
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

TEST_F(GrowthTest, WhoWaitsComesFirst) {
  const JobId job = Train();
  Submit("large 3 3 one-per-node");
  HasRoomFor(absl::Seconds(60));
  Commit(job, 10);
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
}

TEST_F(GrowthTest, WhatHasAllItAskedForStays) {
  const JobId job = Train("train 1 1 one-per-node");
  HasRoomFor(absl::Seconds(60));
  Commit(job, 10);
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
}

TEST_F(GrowthTest, ACheckpointOfAnEarlierGenerationIsNone) {
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

}  // namespace
}  // namespace gtrain::core
