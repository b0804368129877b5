// Jobs between the least and the most ranks they asked for, and what a person asks for with `gtrain scale`.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "nlohmann/json.hpp"
#include "runtime/core/head/head_test_world.h"

namespace gtrain::core {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

class ResizeTest : public HeadTestWorld {
 protected:
  // Starts a job of one rank a node, on node 1, stepping.
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
  // Starts a job of one rank on node 1 that has grown onto node 2 as well: generation 2, of which nothing has
  // been heard.
  JobId Grown(const std::string& spec = "train 1 3 one-per-node budget0") {
    const JobId job = Train(spec);
    Commit(job, 10);
    HasRoomFor(absl::Seconds(31));
    Commit(job, 20);
    FromNode("1", GenerationGone{job, {1}});
    Pass(absl::Seconds(1), {"1", "2"});
    EXPECT_EQ(Stored(job).grant->ranks.size(), 2u);
    return job;
  }
  void EndsBadly(const JobId& job, uint64_t generation, int rank, const std::string& node, RankExit exit) {
    exit.job = job;
    exit.generation = {generation};
    exit.rank = rank;
    FromNode(node, RankExited{exit});
  }
  void Gone(const JobId& job, uint64_t generation, const std::vector<std::string>& nodes) {
    for (const std::string& node : nodes) FromNode(node, GenerationGone{job, {generation}});
    Pass(absl::Seconds(1), nodes);
  }
  std::vector<std::string> NodesOf(const JobId& job) {
    std::vector<std::string> nodes;
    const JobRecord record = Stored(job);
    for (const NodePlace& place : record.grant->nodes) nodes.push_back(place.node.value);
    return nodes;
  }
  std::string Why(const JobId& job) { return FromClient(ClientWhy{job}).json; }
};

// A thousand jobs below their max once held a head up for a second at each change, and it called healthy
// nodes dead.
TEST_F(ResizeTest, ManyJobsTakeTurnsToLookForRoom) {
  constexpr int kJobs = 30;
  Hello("1", kJobs);
  std::vector<JobId> jobs;
  for (int i = 0; i < kJobs; ++i) {
    jobs.push_back(Submit("train 1 2 one-per-node"));
    StartRanks(jobs.back());
  }
  const auto told = [&] {
    int count = 0;
    for (const JobId& job : jobs) {
      const nlohmann::json why = nlohmann::json::parse(FromClient(ClientWhy{job}).json);
      count +=
          std::ranges::any_of(why.at("events"), [](const auto& event) { return event.at("kind") == "room"; });
    }
    return count;
  };
  ASSERT_EQ(told(), 0);
  Hello("2", kJobs);
  EXPECT_GT(told(), 0);
  EXPECT_LE(told(), 8) << "a step takes a bounded time";
  ASSERT_TRUE(head_->NextDeadline().has_value());
  EXPECT_LE(*head_->NextDeadline() - clock_.Now(), absl::Milliseconds(100))
      << "it does not wait for an event";
  Pass(absl::Seconds(5), {"1", "2"});
  EXPECT_EQ(told(), kJobs) << "all of them had their turn";
}

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
  EXPECT_TRUE(Status(job).at("last_fault").is_null()) << "it is no fault";
  EXPECT_THAT(Why(job),
              HasSubstr("it grows from 1 to 2 ranks, from the checkpoint of step 20; a planned restart"));
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
  Submit("large 8 8");
  HasRoomFor(absl::Seconds(60));
  Commit(job, 10);
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
}

TEST_F(ResizeTest, WhoWouldWaitAnywayKeepsNobodyFromTheRoom) {
  const JobId job = Train();
  Submit("larger-than-the-cluster 3 3 one-per-node");
  HasRoomFor(absl::Seconds(60));
  Commit(job, 10);
  EXPECT_THAT(Sent<Revoke>(), SizeIs(1));
}

TEST_F(ResizeTest, AnotherJobBetweenTwoGenerationsWaitsForNoRoom) {
  const JobId job = Train();
  const JobId other = Submit("other 1 1");
  StartRanks(other);
  HasRoomFor(absl::Seconds(20));
  FromNode("1", RankExited{Exit(other, 1, 0, 1)});
  Gone(other, 1, {"1"});
  Pass(absl::Seconds(12), {"1", "2"});
  const size_t before = Sent<Revoke>().size();
  Commit(job, 10);
  EXPECT_EQ(Sent<Revoke>().size(), before + 1) << "the room has been there all the time";
}

TEST_F(ResizeTest, WhoAsksGetsWhatIsFreeWhoeverWaits) {
  const JobId job = Train();
  Submit("large 8 8");
  Hello("2");
  ASSERT_TRUE(FromClient(ClientScale{job, 2, true}).ok);
  const auto revokes = Sent<Revoke>();
  ASSERT_THAT(revokes, SizeIs(1));
  EXPECT_EQ(revokes[0].second.reason, "it grows from 1 to 2 ranks");
}

TEST_F(ResizeTest, WhoAsksWhileRanksStartGetsItWhenTheyRun) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 1 3 one-per-node budget0");
  const ClientReply reply = FromClient(ClientScale{job, 1, true});
  EXPECT_EQ(nlohmann::json::parse(reply.json).at("when"), "as soon as all its ranks run");
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  StartRanks(job);
  const auto revokes = Sent<Revoke>();
  ASSERT_THAT(revokes, SizeIs(2));
  EXPECT_EQ(revokes[0].second.reason, "it shrinks from 2 to 1 rank");
}

TEST_F(ResizeTest, AMachineThatCannotStartARankCostsOnlyTheGrowth) {
  const JobId job = Grown();
  EndsBadly(job, 2, 1, "2", {.cause = ExitCause::kStartFailed, .message = "cannot run mytrain"});
  Gone(job, 2, {"1", "2"});
  EXPECT_THAT(NodesOf(job), ElementsAre("1"));
  EXPECT_EQ(Status(job).at("restarts"), 0);
  EXPECT_THAT(Why(job),
              HasSubstr("it goes back to 1 rank: rank 1 on host-2: could not be started (cannot run "
                        "mytrain); not charged; for 10m it does not grow by itself"));
  ASSERT_THAT(Stored(job).avoided, SizeIs(1));
  EXPECT_EQ(Stored(job).avoided[0].node, NodeId("2"));
  StartRanks(job);
  EXPECT_THAT(Status(job).at("reason").dump(),
              HasSubstr("does not grow by itself for now: with 2 ranks it failed"));
  const size_t before = Sent<Revoke>().size();
  for (int i = 0; i < 16; ++i) {
    Pass(absl::Seconds(31), {"1", "2"});
    Commit(job, 30 + i, 3);
  }
  EXPECT_EQ(Sent<Revoke>().size(), before) << "it has gone on at the size that worked";
}

TEST_F(ResizeTest, TheSizeThatFailedIsTriedAgainOnlyOnOtherMachines) {
  const JobId job = Grown();
  StartRanks(job);
  FromNode("2", RankExited{Exit(job, 2, 1, 1, "WORLD_SIZE is 2")});
  Gone(job, 2, {"1", "2"});
  ASSERT_THAT(NodesOf(job), ElementsAre("1"));
  EXPECT_THAT(Stored(job).avoided, IsEmpty()) << "it could start them";
  StartRanks(job);
  Pass(absl::Minutes(11), {"1", "2"});
  Commit(job, 30, 3);
  Pass(absl::Seconds(31), {"1", "2"});
  const size_t before = Sent<Revoke>().size();
  Commit(job, 40, 3);
  EXPECT_EQ(Sent<Revoke>().size(), before);
  Hello("3");
  Pass(absl::Seconds(31), {"1", "2", "3"});
  Commit(job, 50, 3);
  EXPECT_EQ(Sent<Revoke>().size(), before + 1) << "three are not the two that failed";
  FromNode("1", GenerationGone{job, {3}});
  Pass(absl::Seconds(1), {"1", "2", "3"});
  EXPECT_THAT(NodesOf(job), ElementsAre("1", "2", "3"));
}

TEST_F(ResizeTest, ASizeThatAPersonAskedForAndThatFailsIsGivenUp) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 1 3 one-per-node budget0");
  StartRanks(job);
  Hello("3");
  ASSERT_TRUE(FromClient(ClientScale{job, 3, true}).ok);
  Gone(job, 1, {"1", "2"});
  ASSERT_THAT(NodesOf(job), ElementsAre("1", "2", "3"));
  StartRanks(job);
  FromNode("1", RankExited{Exit(job, 2, 0, 1)});
  Gone(job, 2, {"1", "2", "3"});
  EXPECT_THAT(NodesOf(job), ElementsAre("1", "2"));
  EXPECT_EQ(Stored(job).size_wanted, 2) << "also for the next head";
  StartRanks(job);
  ASSERT_TRUE(FromClient(ClientScale{job, 1, true}).ok);
  Gone(job, 3, {"1", "2"});
  ASSERT_EQ(Stored(job).grant->ranks.size(), 1u);
  StartRanks(job);
  FromNode("1", RankExited{Exit(job, 4, 0, 1)});
  Gone(job, 4, {"1", "2", "3"});
  EXPECT_EQ(Stored(job).grant->ranks.size(), 2u) << "less are given up likewise";
  StartRanks(job);
  FromNode("1", RankExited{Exit(job, 5, 0, 1)});
  Gone(job, 5, {"1", "2", "3"});
  EXPECT_EQ(State(job), "FAILED") << "what has run before is the program's own";
}

TEST_F(ResizeTest, AMachineThatRefusesTheNumberIsNotAvoided) {
  config_.local = true;
  Boot();
  const JobId job = Train("train 1 500 budget0");
  ASSERT_TRUE(FromClient(ClientScale{job, 400, true}).ok);
  Gone(job, 1, {"1"});
  ASSERT_EQ(Stored(job).grant->ranks.size(), 400u);
  const std::string why = "400 ranks are more than host-1 can hold";
  for (int rank = 0; rank < 400; ++rank)
    EndsBadly(job, 2, rank, "1", {.cause = ExitCause::kStartFailed, .message = why});
  Gone(job, 2, {"1"});
  EXPECT_EQ(Stored(job).grant->ranks.size(), 4u);
  EXPECT_THAT(Stored(job).avoided, IsEmpty());
  EXPECT_THAT(Why(job), HasSubstr("it goes back to 4 ranks: rank 0 on host-1: could not be started (" + why));
}

// It goes back to its places once: what has moved since stays where it is.
TEST_F(ResizeTest, WhatWentBackOnceStaysWhereItIsLater) {
  const JobId job = Grown("train 1 3 one-per-node");
  StartRanks(job);
  FromNode("2", RankExited{Exit(job, 2, 1, 1, "WORLD_SIZE is 2")});
  Gone(job, 2, {"1", "2"});
  ASSERT_THAT(NodesOf(job), ElementsAre("1"));
  StartRanks(job);
  Commit(job, 30, 3);
  Pass(absl::Seconds(15), {"2"});
  ASSERT_THAT(NodesOf(job), ElementsAre("2"));
  StartRanks(job);
  Hello("1", 4, {}, "2");
  FromNode("2", RankExited{Exit(job, 4, 0, 1, "another error")});
  Gone(job, 4, {"2"});
  Pass(absl::Seconds(10), {"1", "2"});
  ASSERT_EQ(Stored(job).generation.value, 5u);
  EXPECT_THAT(NodesOf(job), ElementsAre("2"));
}

TEST_F(ResizeTest, ARestartThatGrowsOnTheWayGoesBackToo) {
  const JobId job = Train("train 1 3 one-per-node");
  FromNode("1", AgentHeartbeat{++heartbeats_, {Step(job, 1, 0, 5)}, {}});
  Hello("2");
  FromNode("1", RankExited{Exit(job, 1, 0, 1)});
  Gone(job, 1, {"1", "2"});
  ASSERT_THAT(NodesOf(job), ElementsAre("1", "2"));
  EndsBadly(job, 2, 1, "2", {.cause = ExitCause::kStartFailed, .message = "cannot run mytrain"});
  Gone(job, 2, {"1", "2"});
  EXPECT_THAT(NodesOf(job), ElementsAre("1"));
  EXPECT_EQ(Status(job).at("restarts"), 1) << "the crash, and not the machine";
}

TEST_F(ResizeTest, WhatFailsBehindAStepIsTheProgramsOwn) {
  const JobId job = Grown();
  StartRanks(job);
  FromNode("2", AgentHeartbeat{++heartbeats_, {Step(job, 2, 1, 21)}, {}});
  FromNode("2", RankExited{Exit(job, 2, 1, 1)});
  Gone(job, 2, {"1", "2"});
  EXPECT_EQ(State(job), "FAILED") << "it has no budget";
}

TEST_F(ResizeTest, MoreThanAMachineCanHoldIsRefusedBeforeAnythingEnds) {
  config_.local = true;
  Boot();
  const JobId job = Train("train 1 6000");
  const ClientReply reply = FromClient(ClientScale{job, 5000, true});
  EXPECT_THAT(reply.error, HasSubstr("5000 ranks are more than host-1 can hold, which is 2048: it has 8"));
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  EXPECT_EQ(Stored(job).size_wanted, 0);
  EXPECT_TRUE(FromClient(ClientScale{job, 2000}).ok);
}

TEST_F(ResizeTest, WhatIsPendingIsSaid) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 1 3 one-per-node budget0");
  StartRanks(job);
  const auto reason = [&] { return Status(job).at("reason").get<std::string>(); };
  EXPECT_THAT(reason(), HasSubstr("behind a checkpoint: it has committed none so far"));
  const ClientReply reply = FromClient(ClientScale{job, 1});
  EXPECT_TRUE(nlohmann::json::parse(reply.json).at("checkpoint").is_null());
  EXPECT_THAT(reason(), HasSubstr("wants 1 rank behind its next checkpoint; it has committed none so far"));
  ASSERT_TRUE(FromClient(ClientScale{job, 2}).ok);
  EXPECT_THAT(reason(), Not(HasSubstr("wants")));
  Commit(job, 10);
  ASSERT_TRUE(FromClient(ClientScale{job, 3}).ok);
  EXPECT_THAT(reason(), HasSubstr("wants 3 ranks behind its next checkpoint, if there is room"));
}

TEST_F(ResizeTest, WhatCannotGrowDoesNotSaySo) {
  config_.expected_nodes = 1;
  Boot();
  const JobId job = Train();
  EXPECT_THAT(Status(job).at("reason").dump(), Not(HasSubstr("grows")));
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
  HeldGeneration held{job, {1}};
  held.live = {Step(job, 1, 0, 5)};
  Hello("1", 4, {held});
  Hello("2");
  Hello("3");
  Pass(absl::Minutes(2), {"1", "2", "3"});
  ASSERT_EQ(State(job), "RUNNING");
  Commit(job, 10);
  const auto revokes = Sent<Revoke>();
  ASSERT_THAT(revokes, SizeIs(1)) << Status(job).dump();
  EXPECT_THAT(revokes[0].second.reason, HasSubstr("it grows from 1 to 2 ranks"));
  FromNode("1", GenerationGone{job, {1}});
  Pass(absl::Seconds(1), {"1", "2", "3"});
  EXPECT_EQ(Stored(job).grant->ranks.size(), 2u) << "and not the three that its job file allows";
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
