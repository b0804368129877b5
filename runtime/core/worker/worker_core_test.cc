#include "runtime/core/worker/worker_core.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/core/values/rank_notes.h"

namespace gtrain::core {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

constexpr Instant AtMs(int64_t ms) { return {ms * 1'000'000}; }

// The pace of a rank that has never waited for others.
RankPace Pace(int64_t joined_ms) { return {absl::ZeroDuration(), absl::Milliseconds(joined_ms)}; }

WorkerCore Joined(int world = 2) {
  WorkerCore core(world);
  core.Step(WorkerJoin{"me"}, AtMs(0));
  core.Step(WorkerTable{0, std::vector<std::string>(static_cast<size_t>(world), "x")}, AtMs(1));
  return core;
}

TEST(WorkerCore, JoinIsExchangeZero) {
  WorkerCore core(2);
  EXPECT_THAT(core.Step(WorkerJoin{"me"}, AtMs(0)).effects,
              ElementsAre(WorkerEffect(SendJoined{}), WorkerEffect(SendExchange{0, "me"})));
  EXPECT_EQ(core.state(), WorkerCore::State::kJoining);
  EXPECT_FALSE(core.TakeTable(0));
  core.Step(WorkerTable{0, {"me", "you"}}, AtMs(1));
  EXPECT_EQ(core.state(), WorkerCore::State::kJoined);
  EXPECT_THAT(*core.TakeTable(0), ElementsAre("me", "you"));
  EXPECT_FALSE(core.TakeTable(0)) << "taken once";
}

TEST(WorkerCore, APauseIsAskedForOnceAndSaid) {
  WorkerCore core = Joined();
  EXPECT_THAT(core.Step(WorkerPauses{false}, AtMs(2)).effects, ElementsAre(WorkerEffect(SendPause{false})));
  EXPECT_FALSE(core.pause_requested());
  core.Step(WorkerPause{}, AtMs(3));
  EXPECT_TRUE(core.pause_requested());
  EXPECT_THAT(core.Step(WorkerPauses{true}, AtMs(4)).effects, ElementsAre(WorkerEffect(SendPause{true})));
  EXPECT_FALSE(core.pause_requested()) << "else they would stand still behind each step";
  core.Step(WorkerOver{"others come"}, AtMs(5));
  EXPECT_THAT(core.Step(WorkerPauses{false}, AtMs(6)).effects, IsEmpty());
  core.Step(WorkerPause{}, AtMs(7));
  EXPECT_FALSE(core.pause_requested());
}

TEST(WorkerCore, W6TablesThatAnswerNothingAreDroppedAndCounted) {
  WorkerCore core = Joined();
  core.Step(WorkerTable{0, {"a", "b"}}, AtMs(2));
  core.Step(WorkerTable{9, {"a", "b"}}, AtMs(2));
  core.Step(WorkerExchange{"blob"}, AtMs(2));
  core.Step(WorkerTable{1, {"too", "many", "ranks"}}, AtMs(2));
  EXPECT_EQ(core.tables_dropped(), 3);
  EXPECT_FALSE(core.TakeTable(1));
  core.Step(WorkerTable{1, {"a", "b"}}, AtMs(3));
  EXPECT_TRUE(core.TakeTable(1));
}

TEST(WorkerCore, AnOverdueExchangeAsksOnceForTheMissingRanks) {
  WorkerCore core(4);
  core.Step(WorkerJoin{"me"}, AtMs(0));
  core.Step(WorkerMissing{0, {9}}, AtMs(1));
  EXPECT_THAT(core.missing(), IsEmpty()) << "nobody asked";
  EXPECT_THAT(core.Step(WorkerOverdue{0}, AtMs(2)).effects, ElementsAre(WorkerEffect(SendOverdue{0})));
  core.Step(WorkerMissing{0, {1, 3}}, AtMs(3));
  EXPECT_THAT(core.missing(), ElementsAre(1, 3));
  core.Step(WorkerTable{0, {"a", "b", "c", "d"}}, AtMs(4));
  EXPECT_THAT(core.Step(WorkerOverdue{0}, AtMs(5)).effects, IsEmpty()) << "it came after all";
}

TEST(WorkerCore, OverKeepsTheFirstReasonAndSilencesTheRank) {
  WorkerCore core = Joined();
  core.Step(WorkerProgress{1, 0.5, 10}, AtMs(2));
  core.Step(WorkerProgress{2, 0.5, 10}, AtMs(3));
  core.Step(WorkerOver{"rank 3 died"}, AtMs(4));
  core.Step(WorkerOver{"keeper gone"}, AtMs(5));
  EXPECT_EQ(core.state(), WorkerCore::State::kOver);
  EXPECT_EQ(core.over_reason(), "rank 3 died");
  EXPECT_FALSE(core.NextDeadline());
  EXPECT_THAT(core.Step(WorkerTick{}, AtMs(1000)).effects, IsEmpty());
  EXPECT_THAT(core.Step(WorkerProgress{3, 0.5, 10}, AtMs(1000)).effects, IsEmpty());
  EXPECT_THAT(core.Step(WorkerExchange{"x"}, AtMs(1000)).effects, IsEmpty());
  EXPECT_THAT(core.Step(WorkerCheckpoint{3, "m"}, AtMs(1000)).effects, IsEmpty());
  EXPECT_THAT(core.Step(WorkerCollectives{3}, AtMs(1000)).effects, IsEmpty());
  EXPECT_THAT(core.Step(WorkerLinkDown{1, "no answer"}, AtMs(1000)).effects, IsEmpty());
  EXPECT_THAT(core.Step(WorkerNote{kCompressionNote, "topk"}, AtMs(1000)).effects, IsEmpty());
}

TEST(WorkerCore, WhatARankSaysOfItselfIsSent) {
  WorkerCore core = Joined();
  EXPECT_THAT(core.Step(WorkerNote{kRestoreNote, "step 2 in 0.3 s"}, AtMs(11)).effects,
              ElementsAre(WorkerEffect(SendNote{kRestoreNote, "step 2 in 0.3 s"})));
}

TEST(WorkerCore, ABrokenLinkIsSaidAtOnce_W5) {
  WorkerCore core = Joined();
  core.Step(WorkerProgress{1, 0.5, 10}, AtMs(10));
  for (int i = 0; i < 2; ++i) {
    EXPECT_THAT(core.Step(WorkerLinkDown{1, "no answer"}, AtMs(11)).effects,
                ElementsAre(WorkerEffect(SendLinkDown{1, "no answer"})));
  }
}

TEST(WorkerCore, PaceIsOfTheMomentWhenCollectivesWereCounted_N6) {
  WorkerCore core = Joined();
  core.Step(WorkerProgress{1, 0.5, 10}, AtMs(10));
  core.Step(WorkerCollectives{7, absl::Milliseconds(20)}, AtMs(40));
  core.Step(WorkerCollectives{7, absl::Milliseconds(30)}, AtMs(50));  // nothing new has begun
  SendProgress later{std::nullopt, std::nullopt, 0, 7};
  later.pace = RankPace{absl::Milliseconds(20), absl::Milliseconds(39)};
  EXPECT_THAT(core.Step(WorkerTick{}, AtMs(110)).effects, ElementsAre(WorkerEffect(later)));
}

// A report that came with the pace of the step before would have the waits of this one counted with the next.
TEST(WorkerCore, AStepComesWithTheWaitsThatLedToIt) {
  WorkerCore core = Joined();
  core.Step(WorkerCollectives{1, absl::Milliseconds(5)}, AtMs(10));
  SendProgress said{4, std::nullopt, 0, 3};
  said.pace = RankPace{absl::Milliseconds(600), absl::Milliseconds(999)};
  EXPECT_THAT(core.Step(WorkerProgress{4, {}, 0, {3, absl::Milliseconds(600)}}, AtMs(1000)).effects,
              ElementsAre(WorkerEffect(said)));
  EXPECT_THAT(core.Step(WorkerCollectives{3, absl::Milliseconds(600)}, AtMs(1001)).effects, IsEmpty());
}

TEST(WorkerCore, AStallIsSaidWithoutACollective) {
  WorkerCore core = Joined();
  SendProgress said;
  said.pace = RankPace{absl::ZeroDuration(), absl::Milliseconds(39), absl::Milliseconds(30)};
  EXPECT_THAT(core.Step(WorkerCollectives{0, {}, absl::Milliseconds(30)}, AtMs(40)).effects,
              ElementsAre(WorkerEffect(said)));
  EXPECT_THAT(core.Step(WorkerCollectives{0, {}, absl::Milliseconds(30)}, AtMs(500)).effects, IsEmpty());
}

TEST(WorkerCore, ReportsAreMergedTenASecond) {
  WorkerCore core = Joined();
  EXPECT_THAT(core.Step(WorkerProgress{1, 0.5, 10}, AtMs(10)).effects,
              ElementsAre(WorkerEffect(SendProgress{1, 0.5, 10, 0})));
  EXPECT_FALSE(core.NextDeadline());
  EXPECT_THAT(core.Step(WorkerProgress{2, 0.4, 10}, AtMs(20)).effects, IsEmpty());
  EXPECT_THAT(core.Step(WorkerProgress{3, std::nullopt, 10}, AtMs(30)).effects, IsEmpty());
  EXPECT_THAT(core.Step(WorkerCollectives{7}, AtMs(40)).effects, IsEmpty());
  EXPECT_EQ(core.NextDeadline(), AtMs(110));
  EXPECT_THAT(core.Step(WorkerTick{}, AtMs(109)).effects, IsEmpty());
  EXPECT_THAT(core.Step(WorkerTick{}, AtMs(110)).effects,
              ElementsAre(WorkerEffect(SendProgress{3, 0.4, 20, 7, Pace(39)})));
  EXPECT_THAT(core.Step(WorkerTick{}, AtMs(500)).effects, IsEmpty());
  EXPECT_THAT(core.Step(WorkerCollectives{8}, AtMs(500)).effects,
              ElementsAre(WorkerEffect(SendProgress{std::nullopt, std::nullopt, 0, 8, Pace(499)})));
}

TEST(WorkerCore, StopAndNoticeAreFlags) {
  WorkerCore core = Joined();
  EXPECT_FALSE(core.stop_reason());
  core.Step(WorkerStop{"user asked"}, AtMs(5));
  core.Step(WorkerNotice{absl::Seconds(90)}, AtMs(1000));
  core.Step(WorkerNotice{absl::Seconds(120)}, AtMs(2000));
  EXPECT_EQ(core.stop_reason(), "user asked");
  EXPECT_EQ(core.preempted_at(), AtMs(122'000))
      << "the newest word counts: the first may have been taken back";
  EXPECT_EQ(core.state(), WorkerCore::State::kJoined);
}

}  // namespace
}  // namespace gtrain::core
