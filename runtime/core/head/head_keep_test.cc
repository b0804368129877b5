// Tests how the head leads processes from one generation to the next (`elastic.mode: in-place`).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "runtime/core/head/head_test_world.h"

namespace gtrain::core {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class HeadKeepTest : public HeadTestWorld {
 protected:
  // The processes with which the newest grant goes on, by rank.
  std::vector<ProcessId> Processes() const {
    std::vector<ProcessId> processes;
    const auto grants = Sent<StartGeneration>();
    for (const RankPlace& place : grants.back().second.grant.ranks) processes.push_back(place.process);
    return processes;
  }
};

TEST_F(HeadKeepTest, SurvivorsGoOnAsTheRanksThatTheyWere) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 2 2 one-per-node in-place");
  StartRanks(job);
  EXPECT_THAT(Processes(), ElementsAre(ProcessId{}, ProcessId{}));
  FromNode("1", AgentHeartbeat{1, {Step(job, 1, 0, 5)}, {}});
  sent_.clear();
  Kill("1", job, 1, 0);
  ASSERT_THAT(Sent<Revoke>(), SizeIs(2));
  for (const auto& [node, revoke] : Sent<Revoke>()) {
    EXPECT_EQ(revoke.mode, EndMode::kReform);
    EXPECT_TRUE(revoke.keep);
  }
  FromNode("1", GenerationGone{job, {1}});
  FromNode("2", GenerationGone{job, {1}, true, "", {{{1}, 1}}});
  EXPECT_THAT(Processes(), ElementsAre(ProcessId{}, (ProcessId{{1}, 1})));
  StartRanks(job);
  // The process that was started in generation 2 is known by that, the other one by generation 1.
  FromNode("1", AgentHeartbeat{2, {Step(job, 2, 0, 7)}, {}});
  sent_.clear();
  FromNode("2", RankExited{Exit(job, 2, 1, 1, "ValueError\n")});
  FromNode("1", GenerationGone{job, {2}, true, "", {{{2}, 0}}});
  FromNode("2", GenerationGone{job, {2}});
  EXPECT_THAT(Processes(), ElementsAre((ProcessId{{2}, 0}), ProcessId{}));
  EXPECT_EQ(State(job), "RECONFIGURING");
}

// What waits is of no use to a head that never heard of it, and to a node that has something else in mind.
TEST_F(HeadKeepTest, OnlyWhatTheNodesSayThatTheyKeepGoesOn) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 2 2 one-per-node in-place");
  StartRanks(job);
  Kill("1", job, 1, 0);
  FromNode("1", GenerationGone{job, {1}, true, "", {{{1}, 1}, {{7}, 3}}});
  FromNode("2", GenerationGone{job, {1}});
  EXPECT_THAT(Processes(), ElementsAre(ProcessId{}, ProcessId{})) << "rank 1 was on the other node";
}

// A node that does not answer is left out of the next generation. What it says later that it keeps has no
// place, and what it keeps of a job that is over is of no use.
TEST_F(HeadKeepTest, WhatHasNoPlaceIsEnded) {
  Hello("1");
  Hello("2");
  Hello("3");
  const JobId job = Submit("train 2 2 one-per-node in-place");
  StartRanks(job);
  Kill("1", job, 1, 0);
  FromNode("1", GenerationGone{job, {1}});
  Pass(absl::Seconds(60), {"1", "3"});
  EXPECT_THAT(Processes(), ElementsAre(ProcessId{}, ProcessId{}));
  HelloAgain("2");
  FromNode("2", GenerationGone{job, {1}, true, "", {{{1}, 1}}});
  const auto [node, revoke] = Sent<Revoke>().back();
  EXPECT_EQ(node, "2");
  EXPECT_FALSE(revoke.keep);
  EXPECT_EQ(revoke.generation, Generation{1});
}

TEST_F(HeadKeepTest, AStopAndAJobThatRestartsKeepNobody) {
  Hello("1");
  const JobId job = Submit("train 2 2 in-place");
  const JobId other = Submit("other 2 2");
  StartRanks(job);
  StartRanks(other);
  sent_.clear();
  FromClient(ClientStop{job, false, ""});
  FromNode("1", RankExited{Exit(other, 1, 0, 1, "ValueError\n")});
  ASSERT_THAT(Sent<Revoke>(), SizeIs(2));
  for (const auto& [node, revoke] : Sent<Revoke>()) EXPECT_FALSE(revoke.keep) << revoke.job.value;
}

// The library of a hung program answers for it: who does not come is ended, and the others go on.
TEST_F(HeadKeepTest, WhoDoesNotComeBackIsNotWaitedForForEver) {
  Hello("1");
  const JobId job = Submit("train 3 3 in-place");
  StartRanks(job);
  const auto joined = [&](uint64_t generation, int rank) {
    RankStatus status = Step(job, generation, rank, 5);
    status.state = RankState::kJoined;
    return status;
  };
  FromNode("1", AgentHeartbeat{1, {joined(1, 0), joined(1, 1), joined(1, 2)}, {}});
  Kill("1", job, 1, 2);
  FromNode("1", GenerationGone{job, {1}, true, "", {{{1}, 0}, {{1}, 1}}});
  StartRanks(job);
  FromNode("1", AgentHeartbeat{2, {joined(2, 0), joined(2, 2)}, {}});
  sent_.clear();
  Pass(config_.return_timeout - absl::Seconds(5), {"1"});
  EXPECT_THAT(Sent<Revoke>(), IsEmpty());
  Pass(absl::Seconds(15), {"1"});
  ASSERT_THAT(Sent<Revoke>(), SizeIs(1));
  EXPECT_TRUE(Sent<Revoke>()[0].second.keep);
  EXPECT_THAT(Sent<Revoke>()[0].second.reason, ::testing::HasSubstr("rank 1 on host-1 went on"));
  FromNode("1", GenerationGone{job, {2}, true, "", {{{1}, 0}, {{1}, 1}, {{2}, 2}}});
  Pass(absl::Seconds(30), {"1"});
  ASSERT_FALSE(Sent<StartGeneration>().empty());
  EXPECT_THAT(Processes(), ElementsAre((ProcessId{{1}, 0}), ProcessId{}, (ProcessId{{2}, 2})));
}

// Of the next one it would be said that more hang than do.
TEST_F(HeadKeepTest, WhoHungIsForgottenWithItsGeneration) {
  Hello("1");
  const JobId job = Submit("train 3 3 in-place");
  StartRanks(job);
  const auto joined = [&](uint64_t generation, int rank) {
    RankStatus status = Step(job, generation, rank, static_cast<int64_t>(4 + generation));
    status.state = RankState::kJoined;
    return status;
  };
  FromNode("1", AgentHeartbeat{1, {joined(1, 0), joined(1, 1), joined(1, 2)}, {}});
  Kill("1", job, 1, 2);
  FromNode("1", GenerationGone{job, {1}, true, "", {{{1}, 0}, {{1}, 1}}});
  const auto hangs = [&](uint64_t generation, int rank, std::vector<ProcessId> kept) {
    StartRanks(job);
    for (int i = 0; i < 3; ++i) {
      if (i != rank) FromNode("1", AgentHeartbeat{++heartbeats_, {joined(generation, i)}, {}});
    }
    sent_.clear();
    for (int i = 0; i < 900 && Sent<Revoke>().empty(); ++i) Pass(absl::Seconds(1), {"1"});
    ASSERT_THAT(Sent<Revoke>(), SizeIs(1)) << Status(job).at("reason");
    EXPECT_THAT(Sent<Revoke>()[0].second.reason, ::testing::HasSubstr("its program hangs"));
    EXPECT_THAT(Sent<Revoke>()[0].second.reason, ::testing::Not(::testing::HasSubstr("more)")));
    FromNode("1", GenerationGone{job, {generation}, true, "", std::move(kept)});
    for (int i = 0; i < 90 && Sent<StartGeneration>().empty(); ++i) Pass(absl::Seconds(1), {"1"});
    ASSERT_FALSE(Sent<StartGeneration>().empty());
  };
  hangs(2, 1, {{{1}, 0}, {{1}, 1}, {{2}, 2}});
  hangs(3, 0, {{{1}, 0}, {{3}, 1}, {{2}, 2}});
}

// The process of a rank that stands still is to blame: nobody takes it into the next generation.
TEST_F(HeadKeepTest, AHungProcessThatIsEndedDoesNotGoOn_P16) {
  Hello("1");
  const JobId job = Submit("train 2 2 in-place stall20s stall-kill");
  StartRanks(job);
  FromNode("1", AgentHeartbeat{1, {Step(job, 1, 0, 6), Step(job, 1, 1, 5)}, {}});
  sent_.clear();
  Pass(absl::Minutes(1), {"1"});
  ASSERT_FALSE(Sent<Revoke>().empty());
  FromNode("1", GenerationGone{job, {1}, true, "", {{{1}, 0}, {{1}, 1}}});
  Pass(absl::Seconds(5), {"1"});
  ASSERT_FALSE(Sent<StartGeneration>().empty());
  EXPECT_THAT(Processes(), ElementsAre((ProcessId{{1}, 0}), ProcessId{})) << "rank 1 was behind";
}

// A crash before the first step of a generation is one of a job that has come far, if processes go on.
TEST_F(HeadKeepTest, TwoQuickCrashesAreNotThoseOfAProgramThatNeverRan) {
  Hello("1");
  const JobId job = Submit("train 2 2 in-place");
  StartRanks(job);
  FromNode("1", AgentHeartbeat{1, {Step(job, 1, 0, 50)}, {}});
  for (uint64_t generation = 1; generation <= 4; ++generation) {
    Kill("1", job, generation, 1);
    FromNode("1", GenerationGone{job, {generation}, true, "", {{{1}, 0}}});
    Pass(absl::Minutes(1), {"1"});
    ASSERT_NE(State(job), "FAILED") << Status(job).at("reason");
    StartRanks(job);
  }
}

// A machine that a job leaves (a drain, a smaller world) keeps nothing of it.
TEST_F(HeadKeepTest, WhoWaitsWhereThereIsNoPlaceIsEnded) {
  Hello("1");
  Hello("2");
  Hello("3");
  const JobId job = Submit("train 2 2 one-per-node in-place");
  StartRanks(job);
  const std::string left = Sent<StartGeneration>()[0].first;
  FromClient(ClientDrainNode{"host-" + left, absl::ZeroDuration(), "repair"}, "", Role::kAdmin);
  Pass(absl::Minutes(1), {"1", "2", "3"});
  std::vector<std::string> nodes;
  for (const auto& [node, start] : Sent<StartGeneration>()) {
    if (start.grant.generation.value == 1) nodes.push_back(node);
  }
  sent_.clear();
  for (const std::string& node : nodes) {
    const int rank = node == nodes[0] ? 0 : 1;
    FromNode(node, GenerationGone{job, {1}, true, "", {{{1}, rank}}});
  }
  Pass(absl::Seconds(5), {"1", "2", "3"});
  std::vector<std::string> told;
  for (const auto& [node, revoke] : Sent<Revoke>()) {
    if (!revoke.keep) told.push_back(node);
  }
  EXPECT_THAT(told, ElementsAre(left));
}

// H1, P4: a head that restarts hears of those that wait from the nodes, and so does one whose agent
// restarted.
TEST_F(HeadKeepTest, WhoWaitsOutlivesTheHead_H1) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 2 2 one-per-node in-place");
  StartRanks(job);
  FromNode("1", AgentHeartbeat{1, {Step(job, 1, 0, 5)}, {}});
  Kill("2", job, 1, 1);
  FromClient(ClientDrainNode{"host-2", absl::ZeroDuration(), "repair"}, "", Role::kAdmin);
  FromNode("1", GenerationGone{job, {1}, true, "", {{{1}, 0}}});
  FromNode("2", GenerationGone{job, {1}});
  Pass(absl::Seconds(5), {"1", "2"});
  ASSERT_EQ(State(job), "WAITING");
  EXPECT_THAT(Status(job).at("reason").get<std::string>(),
              ::testing::HasSubstr("1 process keeps its state for 10m"));
  Boot();
  sent_.clear();
  kept_hello_ = {{job, {{{1}, 0}}}, {JobId("gone-7"), {{{1}, 0}}}};
  Hello("1");
  kept_hello_.clear();
  ASSERT_THAT(Sent<ForgetJob>(), SizeIs(1));
  EXPECT_EQ(Sent<ForgetJob>()[0].second.job, JobId("gone-7"));
  Hello("2");
  Hello("3");
  Pass(absl::Minutes(1), {"1", "2", "3"});
  ASSERT_FALSE(Sent<StartGeneration>().empty());
  const std::vector<RankPlace> ranks = Sent<StartGeneration>().back().second.grant.ranks;
  EXPECT_EQ(std::ranges::count_if(ranks,
                                  [](const RankPlace& place) {
                                    return place.process == ProcessId{{1}, 0};
                                  }),
            1);
}

// No room for another generation: who waits is a load on its machine, and not for ever.
TEST_F(HeadKeepTest, WhoWaitsForRoomInVainIsEnded) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 2 2 one-per-node in-place");
  StartRanks(job);
  FromNode("1", GenerationGone{job, {0}});
  FromClient(ClientDrainNode{"host-2", absl::ZeroDuration(), "repair"}, "", Role::kAdmin);
  Pass(absl::Minutes(1), {"1", "2"});
  FromNode("1", GenerationGone{job, {1}, true, "", {{{1}, 0}}});
  FromNode("2", GenerationGone{job, {1}, true, "", {{{1}, 1}}});
  Pass(absl::Seconds(5), {"1", "2"});
  ASSERT_EQ(State(job), "WAITING");
  const JobId other = Submit("other 4 4");
  EXPECT_EQ(State(other), "QUEUED") << "the process that waits has its memory still";
  sent_.clear();
  Pass(config_.keep_wait + absl::Seconds(10), {"1", "2"});
  EXPECT_FALSE(Sent<Revoke>().empty());
  EXPECT_NE(State(other), "QUEUED");
}

// Steps that survivors keep in memory pay for crashes as steps in a checkpoint do: the hundredth is mended as
// fast as the first.
TEST_F(HeadKeepTest, StepsInMemoryPayForCrashes) {
  Hello("1");
  const JobId job = Submit("train 2 2 in-place");
  for (uint64_t generation = 1; generation <= 100; ++generation) {
    StartRanks(job);
    FromNode("1",
             AgentHeartbeat{generation, {Step(job, generation, 0, static_cast<int64_t>(generation))}, {}});
    sent_.clear();
    Kill("1", job, generation, 1);
    FromNode("1", GenerationGone{job, {generation}, true, "", {{{1}, 0}}});
    ASSERT_THAT(Sent<StartGeneration>(), SizeIs(1)) << "at once after crash " << generation;
    EXPECT_EQ(Processes()[0], (ProcessId{{1}, 0}));
  }
  // Without a step between them the wait grows.
  for (uint64_t generation = 101; generation <= 103; ++generation) {
    StartRanks(job);
    sent_.clear();
    Kill("1", job, generation, 1);
    FromNode("1", GenerationGone{job, {generation}, true, "", {{{1}, 0}}});
    if (Sent<StartGeneration>().empty()) return;
    StartRanks(job);
  }
  FAIL() << "a loop without a step is never slowed";
}

}  // namespace
}  // namespace gtrain::core
