// Tests how the head leads processes from one generation to the next (`elastic.mode: in-place`).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

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
    for (const RankPlace& place : Sent<StartGeneration>().back().second.grant.ranks)
      processes.push_back(place.process);
    return processes;
  }
  void Kill(const std::string& node, const JobId& job, uint64_t generation, int rank) {
    RankExit exit = Exit(job, generation, rank, 0);
    exit.cause = ExitCause::kSignal;
    exit.signal = 9;
    FromNode(node, RankExited{exit});
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
