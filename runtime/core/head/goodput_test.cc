// Where the rank-seconds of a job go: the ledger alone, and as the head keeps it.
#include "runtime/core/head/goodput.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <string>

#include "base/rng.h"
#include "nlohmann/json.hpp"
#include "runtime/core/head/head_test_world.h"

namespace gtrain::core {
namespace {

constexpr double kNear = 1e-6;

double Of(const GoodputTotals& totals, TimeLabel label) {
  return totals.seconds[static_cast<size_t>(label)].value_or(-1);
}

class LedgerTest : public ::testing::Test {
 protected:
  void Pass(double seconds) {
    clock_.Advance(absl::Seconds(seconds));
    ledger_.Advance(clock_.Now());
  }
  void Run(int ranks) { ledger_.SetPlaces({.wanted = ranks, .running = ranks}); }
  // The time of `ranks` that run goes into a step that ends then.
  void Step(double seconds, int64_t step, uint64_t generation = 1, bool anew = false) {
    Pass(seconds);
    ledger_.Step(step, {generation}, anew);
  }
  void Reform(double seconds, int ranks) {
    ledger_.EndGeneration(clock_.Now());
    JobPlaces places;
    places[TimeLabel::kReforming] = ranks;
    ledger_.SetPlaces(places);
    Pass(seconds);
  }
  // All ranks of a generation are there, and nobody has reported a step.
  void BeforeStep(double seconds, int going_on, int joining) {
    JobPlaces places{.wanted = going_on + joining, .going_on = going_on, .joining = joining};
    places[TimeLabel::kReforming] = going_on;
    places[TimeLabel::kStarting] = joining;
    ledger_.SetPlaces(places);
    Pass(seconds);
  }
  // Four ranks that make a step in 2 s lose what came behind step 5 and form the next generation for 1 s.
  void LoseOneOfFour() {
    Step(0, 1);
    Run(4);
    Step(8, 5);
    Pass(1);
    Reform(1, 4);
  }
  double Seconds(TimeLabel label) { return Of(ledger_.Totals(clock_.Now()), label); }

  ManualClock clock_;
  GoodputLedger ledger_ = GoodputLedger({}, clock_.Now());
};

TEST_F(LedgerTest, StepsThatAnEarlierGenerationReportedAreRecomputed) {
  Step(0, 1);
  Run(2);
  Step(10, 11);
  Pass(3);  // the next report never comes
  Reform(1, 2);
  Step(0, 5, 2);  // from a checkpoint of step 4
  Run(2);
  Step(4, 9, 2);
  Step(4, 13, 2);  // the half of it is new
  const GoodputTotals totals = ledger_.Totals(clock_.Now());
  EXPECT_NEAR(Of(totals, TimeLabel::kStep), 20 + 4, kNear);
  EXPECT_NEAR(Of(totals, TimeLabel::kRecomputed), 8 + 4, kNear);
  EXPECT_NEAR(Of(totals, TimeLabel::kLost), 6, kNear);
  EXPECT_NEAR(Of(totals, TimeLabel::kReforming), 2, kNear);
  EXPECT_NEAR(totals.all, 44, kNear);
  EXPECT_NEAR(*totals.goodput, 24.0 / 44, kNear);
  EXPECT_EQ(totals.applied, 13);
  EXPECT_EQ(totals.redone, 7) << "5 to 11";
  Pass(1);
  EXPECT_NEAR(Seconds(TimeLabel::kStep), 26, kNear) << "until the next report it is of the step that is made";
}

// Survivors of `elastic.mode: in-place` roll forward.
TEST_F(LedgerTest, WhatSurvivorsMadeBehindTheLastReportIsNotLost) {
  Step(0, 1);
  Run(2);
  Step(10, 11);
  Pass(3);
  Reform(1, 2);
  EXPECT_NEAR(Seconds(TimeLabel::kLost), 6, kNear) << "nobody knows better yet";
  Step(0, 14, 2);
  EXPECT_NEAR(Seconds(TimeLabel::kLost), 0, kNear);
  EXPECT_NEAR(Seconds(TimeLabel::kStep), 26, kNear);
  EXPECT_EQ(ledger_.Totals(clock_.Now()).redone, 0);
}

// A report of the generation that ended may come late.
TEST_F(LedgerTest, ALateReportSaysWhatTheTimeBeforeTheEndWentInto) {
  Step(0, 1);
  Run(2);
  Step(10, 11);
  Pass(3);
  Reform(0, 2);
  ledger_.Step(14, {1}, false);
  EXPECT_NEAR(Seconds(TimeLabel::kLost), 0, kNear);
  EXPECT_NEAR(Seconds(TimeLabel::kStep), 26, kNear);
}

// One ended with code 0 in the middle of training: the others wait for it until somebody gives up.
TEST_F(LedgerTest, WaitingForARankThatHasEndedIsNoTraining) {
  Step(0, 1);
  Run(3);
  Step(10, 11);
  Pass(1);
  JobPlaces places{.running = 2};
  places[TimeLabel::kEnding] = 1;
  ledger_.SetPlaces(places);
  Step(2, 12);  // a report of what they made before
  Pass(60);
  ledger_.Measured(20, {});
  EXPECT_NEAR(Seconds(TimeLabel::kReforming), 0, kNear) << "perhaps they go on without it";
  Reform(1, 3);
  EXPECT_NEAR(Seconds(TimeLabel::kReforming), 100 + 3, kNear) << "what they measured is not counted twice";
  EXPECT_NEAR(Seconds(TimeLabel::kIdle), 20, kNear);
  Step(0, 14, 2);
  EXPECT_NEAR(Seconds(TimeLabel::kStep), 30 + 3 + 4, kNear);
  EXPECT_NEAR(Seconds(TimeLabel::kEnding), 62, kNear);
}

TEST_F(LedgerTest, TheFirstStepOfRanksThatGoOnIsNoReforming) {
  LoseOneOfFour();
  BeforeStep(2.5, 3, 1);
  EXPECT_NEAR(Seconds(TimeLabel::kReforming), 4 + 7.5, kNear) << "nobody knows whether there will be one";
  ledger_.Step(6, {2}, false);
  Run(4);
  EXPECT_NEAR(Seconds(TimeLabel::kStep), 32 + 8, kNear) << "by the pace of the generation before";
  EXPECT_NEAR(Seconds(TimeLabel::kReforming), 4 + 1.5, kNear);
  EXPECT_NEAR(Seconds(TimeLabel::kStarting), 0.5, kNear);
  Pass(3);
  ledger_.Measured(8, {});  // seconds in which nobody computed
  ledger_.Step(7, {2}, false);
  EXPECT_NEAR(Seconds(TimeLabel::kStep), 32 + 4 + 4, kNear) << "by its own";
  EXPECT_NEAR(Seconds(TimeLabel::kReforming), 4 + 4.5, kNear);
  EXPECT_NEAR(Seconds(TimeLabel::kStarting), 1.5, kNear);
  Step(3, 8, 2);
  EXPECT_NEAR(Seconds(TimeLabel::kReforming), 4 + 4.5, kNear) << "once";
  EXPECT_NEAR(ledger_.Totals(clock_.Now()).all, 32 + 4 + 4 + 10 + 12 + 12, kNear);
}

// Reports come with heartbeats, a second late perhaps.
TEST_F(LedgerTest, AStepIsAsLongAsTheRankSays) {
  LoseOneOfFour();
  BeforeStep(3, 3, 0);
  ledger_.Step(6, {2}, false);
  Run(3);
  ledger_.Paced(1.5);
  Step(2.5, 7, 2);
  EXPECT_NEAR(Seconds(TimeLabel::kReforming), 4 + 4.5, kNear);
  EXPECT_NEAR(Seconds(TimeLabel::kStep), 32 + 4.5 + 7.5, kNear);
  Reform(0, 3);
  BeforeStep(3, 3, 0);
  ledger_.Paced(0.1);  // of a rank whose first steps the others have yet to report
  ledger_.Step(8, {3}, false);
  Run(3);
  Step(2, 9, 3);
  EXPECT_NEAR(Seconds(TimeLabel::kReforming), 4 + 4.5 + 3, kNear) << "by the head's clock";
}

// A process that is in the middle of a step when another is lost finishes its own part first.
TEST_F(LedgerTest, NobodyComputesTheFirstStepBeforeAllHaveJoined) {
  LoseOneOfFour();
  BeforeStep(2, 3, 0);
  ledger_.AllJoined(clock_.Now());
  Pass(1.5);
  ledger_.Step(6, {2}, false);
  EXPECT_NEAR(Seconds(TimeLabel::kStep), 32 + 4.5 + 1.5, kNear) << "they had half a second of it";
  EXPECT_NEAR(Seconds(TimeLabel::kReforming), 4 + 6, kNear);
  ledger_.AllJoined(clock_.Now());  // one says it again
  EXPECT_NEAR(Seconds(TimeLabel::kStep), 32 + 4.5 + 1.5, kNear);
}

TEST_F(LedgerTest, TheFirstStepHadNoMoreTimeThanThereWas) {
  LoseOneOfFour();
  BeforeStep(0.5, 3, 0);
  ledger_.Step(6, {2}, false);
  Run(3);
  ledger_.EndGeneration(clock_.Now());
  EXPECT_NEAR(Seconds(TimeLabel::kStep), 32 + 1.5 + 3, kNear) << "by the pace before, since it made no other";
  EXPECT_NEAR(Seconds(TimeLabel::kReforming), 4, kNear);
}

TEST_F(LedgerTest, TheFirstStepOfProcessesThatAreAllNewIsNoStart) {
  JobPlaces places{.wanted = 4, .joining = 4};
  places[TimeLabel::kUnreported] = 4;
  ledger_.SetPlaces(places);
  Pass(3);
  ledger_.Step(1, {1}, false);
  Run(4);
  EXPECT_NEAR(Seconds(TimeLabel::kStarting), 12, kNear) << "nobody knows yet how long a step takes";
  Step(2, 2);
  EXPECT_NEAR(Seconds(TimeLabel::kStarting), 4, kNear);
  EXPECT_NEAR(Seconds(TimeLabel::kStep), 16, kNear);
  Reform(0, 4);
  BeforeStep(5, 0, 4);
  Reform(0, 4);
  EXPECT_NEAR(Seconds(TimeLabel::kStarting), 4 + 20, kNear) << "perhaps none of them came to begin a step";
  EXPECT_NEAR(Seconds(TimeLabel::kLost), 0, kNear);
}

TEST_F(LedgerTest, WhatSurvivorsHadOfAStepIsLostWhereTheyComputeAllOfIt) {
  Step(0, 1);
  Run(4);
  Step(8, 5);
  Pass(3.5);  // step 6, which nobody reports, and most of step 7
  Reform(1, 4);
  BeforeStep(2, 3, 1);
  ledger_.Step(7, {2}, false);
  EXPECT_NEAR(Seconds(TimeLabel::kStep), 32 + 8 + 8, kNear);
  EXPECT_NEAR(Seconds(TimeLabel::kLost), 6, kNear);
}

TEST_F(LedgerTest, WhatSurvivorsHadOfAStepIsNotLostWhereTheyGoOnInIt) {
  Step(0, 1);
  Run(4);
  Step(8, 5);
  Pass(1.5);
  Reform(1, 4);
  EXPECT_NEAR(Seconds(TimeLabel::kLost), 6, kNear) << "nobody knows better yet";
  BeforeStep(0.5, 3, 1);
  ledger_.Step(6, {2}, false);
  EXPECT_NEAR(Seconds(TimeLabel::kStep), 32 + 4.5 + 2, kNear);
  EXPECT_NEAR(Seconds(TimeLabel::kLost), 1.5, kNear) << "of the rank that is lost";
}

TEST_F(LedgerTest, WhatComesBehindAStepIsNotOfItHoweverLateItIsTold) {
  Step(0, 1);
  Run(2);
  ledger_.Late(0.75);
  Step(2.75, 2);
  EXPECT_NEAR(Seconds(TimeLabel::kStep), 5.5, kNear);
  Pass(0.5);
  Reform(0, 2);
  EXPECT_NEAR(Seconds(TimeLabel::kStep), 4, kNear);
  EXPECT_NEAR(Seconds(TimeLabel::kLost), 2.5, kNear);
}

TEST_F(LedgerTest, AFirstStepThatWasMadeBeforeIsRecomputed) {
  LoseOneOfFour();
  BeforeStep(3, 3, 0);
  ledger_.Step(4, {2}, false);
  EXPECT_NEAR(Seconds(TimeLabel::kStep), 32, kNear);
  EXPECT_NEAR(Seconds(TimeLabel::kRecomputed), 6, kNear);
  EXPECT_NEAR(Seconds(TimeLabel::kReforming), 4 + 3, kNear);
  Run(3);
  Step(1, 1, 2, /*anew=*/true);  // it counts its steps anew, so nobody knows
  Step(2, 2, 2);
  EXPECT_NEAR(Seconds(TimeLabel::kStep), 32 + 6 + 3 + 6, kNear);
  const GoodputTotals totals = ledger_.Totals(clock_.Now());
  EXPECT_FALSE(totals.seconds[static_cast<size_t>(TimeLabel::kRecomputed)]);
}

TEST_F(LedgerTest, AStepThatAnotherLossCutShortIsLost) {
  LoseOneOfFour();
  EXPECT_NEAR(Seconds(TimeLabel::kLost), 4, kNear);
  BeforeStep(3, 3, 0);
  Reform(1, 3);
  EXPECT_NEAR(Seconds(TimeLabel::kLost), 4 + 6, kNear) << "no more than a step takes";
  EXPECT_NEAR(Seconds(TimeLabel::kReforming), 4 + 3 + 3, kNear);
  BeforeStep(2, 2, 0);
  ledger_.Step(6, {3}, false);
  EXPECT_NEAR(Seconds(TimeLabel::kLost), 4 + 6, kNear);
  EXPECT_NEAR(Seconds(TimeLabel::kStep), 32 + 4, kNear);
}

// Where no pace is known yet, and behind another head.
TEST_F(LedgerTest, AFirstStepOfUnknownLengthStaysReforming) {
  Step(0, 1);
  Run(2);
  Reform(0, 2);
  BeforeStep(3, 2, 0);
  ledger_.Step(2, {2}, false);
  Run(2);
  EXPECT_NEAR(Seconds(TimeLabel::kReforming), 6, kNear);
  GoodputLedger next(ledger_.record(), clock_.Now());
  Step(2, 3, 2);
  EXPECT_NEAR(Seconds(TimeLabel::kReforming), 2, kNear);
  next.SetPlaces({.wanted = 2, .running = 2});
  next.Advance(clock_.Now());
  next.Step(3, {2}, false);
  EXPECT_NEAR(Of(next.Totals(clock_.Now()), TimeLabel::kReforming), 6, kNear);
}

// What people were told of a job that is over is what the next head tells.
TEST_F(LedgerTest, TheFirstStepOfTheLastGenerationIsStored) {
  LoseOneOfFour();
  BeforeStep(3, 3, 0);
  ledger_.Step(6, {2}, false);
  Run(3);
  const GoodputTotals told = ledger_.Totals(clock_.Now());
  ledger_.SetPlaces({});
  EXPECT_EQ(GoodputLedger(ledger_.record(), clock_.Now()).Totals(clock_.Now()).seconds, told.seconds);
}

TEST_F(LedgerTest, WhatNobodyMeasuredIsAbsent) {
  GoodputTotals totals = ledger_.Totals(clock_.Now());
  for (const TimeLabel label : {TimeLabel::kStep, TimeLabel::kRecomputed, TimeLabel::kCheckpointStall,
                                TimeLabel::kIdle, TimeLabel::kLost})
    EXPECT_FALSE(totals.seconds[static_cast<size_t>(label)]) << Name(label);
  EXPECT_FALSE(totals.goodput);
  EXPECT_FALSE(totals.applied);
  Step(0, 1);
  Run(1);
  Step(1, 2);
  totals = ledger_.Totals(clock_.Now());
  EXPECT_EQ(Of(totals, TimeLabel::kRecomputed), 0);
  EXPECT_FALSE(totals.seconds[static_cast<size_t>(TimeLabel::kIdle)]);
  ledger_.Measured(0.25, std::nullopt);
  totals = ledger_.Totals(clock_.Now());
  EXPECT_EQ(Of(totals, TimeLabel::kIdle), 0.25);
  EXPECT_EQ(Of(totals, TimeLabel::kStep), 0.75) << "also of a step that was counted before";
  EXPECT_FALSE(totals.seconds[static_cast<size_t>(TimeLabel::kCheckpointStall)]);
}

// Its numbers do not tell one step from another.
TEST_F(LedgerTest, AProgramThatCountsItsStepsInEachEpochRecomputesNobodyKnowsWhat) {
  Step(0, 1);
  Run(1);
  Step(10, 11);
  Reform(0, 1);
  Step(0, 1, 2);
  Run(1);
  Step(5, 6, 2);
  EXPECT_NEAR(Seconds(TimeLabel::kRecomputed), 5, kNear);
  Step(1, 1, 2, /*anew=*/true);
  const GoodputTotals totals = ledger_.Totals(clock_.Now());
  EXPECT_FALSE(totals.seconds[static_cast<size_t>(TimeLabel::kRecomputed)]);
  EXPECT_FALSE(totals.redone);
  EXPECT_NEAR(Of(totals, TimeLabel::kStep), 16, kNear);
  EXPECT_NEAR(totals.all, 16, kNear);
}

TEST_F(LedgerTest, NumbersThatAreNoStepsAreLeftOut) {
  for (const int64_t step : {std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()})
    EXPECT_FALSE(ledger_.Step(step, {1}, false));
  GoodputRecord damaged;
  damaged.stepped = {1};
  ledger_ = GoodputLedger(damaged, clock_.Now());
  ledger_.Step(5, {1}, false);
  EXPECT_EQ(ledger_.Totals(clock_.Now()).applied, 1);
}

// What is counted must be the time of all places, whatever happens in whatever order, also over heads.
TEST(Goodput, LabelsAddUpInRandomHistories) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Rng rng(seed);
    ManualClock clock;
    GoodputLedger ledger({}, clock.Now());
    JobPlaces places;
    double all = 0, unmeasured = 0;  // of what runs, not yet said to be idle or stalled
    int64_t step = 0;
    uint64_t generation = 1;
    bool stepped = false;
    const auto chance = [&](uint64_t of) { return rng.Below(of) == 0; };
    for (int i = 0; i < 400; ++i) {
      const double seconds = static_cast<double>(rng.Below(5000)) / 1000;
      clock.Advance(absl::Seconds(seconds));
      if (!chance(3)) ledger.Advance(clock.Now());
      int count = places.running;
      for (const int of : places.of) count += of;
      all += seconds * count;
      unmeasured += seconds * places.running;
      if (places.running > 0 && !chance(3)) {
        ledger.Advance(clock.Now());
        if (chance(3)) ledger.Late(static_cast<double>(rng.Below(1100)) / 1000);
        const bool anew = step > 3 && chance(200);
        step = anew ? 1 : step + static_cast<int64_t>(rng.Below(5));
        ledger.Step(step, {generation}, anew);
      }
      if (unmeasured > 0 && chance(2)) {
        ledger.Advance(clock.Now());
        const double idle = unmeasured / static_cast<double>(2 + rng.Below(3));
        const double stall = chance(2) ? 0 : unmeasured - idle;
        ledger.Measured(idle, stall);
        unmeasured -= idle + stall;
      }
      if (chance(8)) {
        ledger.Advance(clock.Now());
        if (places.running > 0) {
          ledger.EndGeneration(clock.Now());
          unmeasured = 0;
          stepped = false;
          ++generation;
          step = std::max<int64_t>(0, step - static_cast<int64_t>(rng.Below(20)));
        } else if (!stepped) {
          ledger.Step(++step, {generation}, false);
          stepped = true;
        }
        places = {};
        places.wanted = static_cast<int>(rng.Below(4));  // 0: the job is over
        for (size_t of = static_cast<size_t>(TimeLabel::kReforming); of < kTimeLabels; ++of)
          places.of[of] = static_cast<int>(rng.Below(3));
        if (ledger.record().stepped != Generation()) places[TimeLabel::kUnreported] = 0;
        if (stepped) places.running = static_cast<int>(rng.Below(4));
        const auto some = [&](TimeLabel of) { return static_cast<int>(rng.Below(places[of] + 1)); };
        if (!stepped) places.going_on = some(TimeLabel::kReforming);
        if (places.going_on > 0) places.joining = some(TimeLabel::kStarting);
        ledger.SetPlaces(places);
      }
      if (chance(40)) {  // another head, from the record
        ledger.Advance(clock.Now());
        ledger = GoodputLedger(ledger.record(), clock.Now());
        ledger.SetPlaces(places);
      }
      const GoodputTotals totals = ledger.Totals(clock.Now());
      double sum = 0;
      for (const std::optional<double>& of : totals.seconds) {
        EXPECT_GE(of.value_or(0), -kNear) << "seed " << seed;
        sum += of.value_or(0);
      }
      ASSERT_NEAR(sum, all, kNear) << "seed " << seed << ", event " << i;
      ASSERT_NEAR(totals.all, all, kNear) << "seed " << seed << ", event " << i;
    }
  }
}

// ---------------------------------------------------------------- as the head keeps it

class HeadGoodputTest : public HeadTestWorld {
 protected:
  void Beat(const RankStatus& status) { FromNode("1", AgentHeartbeat{++heartbeats_, {status}, {}}); }
  // `rank` has made this step by then.
  void Step(double seconds, const JobId& job, uint64_t generation, int rank, int64_t step) {
    clock_.Advance(absl::Seconds(seconds));
    Beat(HeadTestWorld::Step(job, generation, rank, step));
  }
  // As an SDK rank says it, with its own clock since it joined.
  RankStatus Said(const JobId& job, int rank, int64_t step, double joined, double waited,
                  std::optional<double> stalled, uint64_t generation = 1) {
    RankStatus status = HeadTestWorld::Step(job, generation, rank, step);
    status.joined_seconds = joined;
    status.waited_seconds = waited;
    status.stalled_seconds = stalled;
    return status;
  }
  nlohmann::json Goodput(const JobId& job) { return Status(job).at("goodput"); }
  nlohmann::json Seconds(const JobId& job) {
    const nlohmann::json goodput = Goodput(job);
    double sum = 0;
    for (const auto& [label, seconds] : goodput.at("seconds").items()) sum += seconds.get<double>();
    EXPECT_NEAR(sum, goodput.at("rank_seconds").get<double>(), kNear);
    return goodput.at("seconds");
  }
  void Expect(const JobId& job, const std::map<std::string, double>& expected) {
    const nlohmann::json all = Seconds(job);
    for (const auto& [label, seconds] : all.items()) {
      const auto it = expected.find(label);
      EXPECT_NEAR(seconds.get<double>(), it == expected.end() ? 0 : it->second, kNear) << label;
    }
    for (const auto& [label, seconds] : expected) EXPECT_TRUE(all.contains(label)) << label;
  }
};

TEST_F(HeadGoodputTest, EachSecondOfEachPlaceHasALabel) {
  const JobId job = Submit("train 2 2");
  clock_.Advance(absl::Seconds(5));  // there is no node
  Hello("1");
  clock_.Advance(absl::Seconds(2));
  StartRanks(job);
  clock_.Advance(absl::Seconds(1));
  Expect(job, {{"waiting_for_capacity", 10}, {"starting", 4}, {"unreported", 2}});
  Step(0, job, 1, 0, 1);
  Step(0, job, 1, 1, 1);
  Step(10, job, 1, 0, 11);
  Step(0, job, 1, 1, 11);
  Expect(job, {{"waiting_for_capacity", 10}, {"starting", 6 - 2}, {"step", 2 + 20}});
  FromNode("1", RankExited{Exit(job, 1, 0, 1)});
  clock_.Advance(absl::Seconds(3));
  FromNode("1", GenerationGone{job, {1}});
  clock_.Advance(absl::Seconds(1));
  Pass(absl::Seconds(2), {"1"});  // backoff
  const double reforming = Seconds(job).at("reforming");
  EXPECT_GE(reforming, 6);
  StartRanks(job);
  const double starting = Seconds(job).at("starting");
  EXPECT_NEAR(starting + reforming, 6 - 2 + 12, kNear);
  Step(0, job, 2, 0, 6);
  Step(0, job, 2, 1, 6);
  Step(4, job, 2, 0, 10);
  Step(0, job, 2, 1, 10);
  for (int rank = 0; rank < 2; ++rank) {
    clock_.Advance(absl::Seconds(1));
    FromNode("1", RankExited{Exit(job, 2, rank, 0)});
  }
  ASSERT_EQ(State(job), "SUCCEEDED");
  Expect(job, {{"waiting_for_capacity", 10},
               {"starting", starting},
               {"reforming", reforming},
               {"step", 2 + 20},
               {"recomputed", 8 + 3},
               {"ending", 1}});
  const nlohmann::json goodput = Goodput(job);
  EXPECT_EQ(goodput.at("wanted"), 2);
  EXPECT_EQ(goodput.at("generations"), 2);
  EXPECT_EQ(goodput.at("losses"), 1);
  EXPECT_EQ(goodput.at("steps").at("applied"), 11);
  EXPECT_EQ(goodput.at("steps").at("recomputed"), 5);
  clock_.Advance(absl::Seconds(100));
  EXPECT_EQ(Goodput(job), goodput) << "it is over";
  Boot();
  EXPECT_EQ(Goodput(job), goodput) << "also for the next head";
}

TEST_F(HeadGoodputTest, WhatRanksMeasureIsTakenOutOfTheSteps) {
  Hello("1");
  const JobId job = Submit("train 2 2");
  StartRanks(job);
  Beat(Said(job, 0, 1, 5, 4, 0));  // it waited before the first step
  Beat(Said(job, 1, 1, 5, 0, std::nullopt));
  EXPECT_FALSE(Seconds(job).contains("idle")) << "that belongs to the start";
  clock_.Advance(absl::Seconds(10));
  Beat(Said(job, 0, 11, 15, 7, 1));
  Beat(Said(job, 1, 11, 15, 0.5, std::nullopt));
  Expect(job, {{"step", 20 - 3 - 1 - 0.5}, {"idle", 3.5}, {"checkpoint_stall", 1}});
  clock_.Advance(absl::Seconds(1));
  Beat(Said(job, 0, 12, 15, 900, 1));  // the same measurement again
  Beat(Said(job, 1, 12, 16, 900, std::nullopt));
  Expect(job, {{"step", 22 - 4.5 - 1}, {"idle", 3.5 + 1}, {"checkpoint_stall", 1}});
}

// Where ranks do not all report at the same moment.
TEST_F(HeadGoodputTest, WhatRanksWaitedForTheFirstStepIsNotTakenOutOfTheNext) {
  Hello("1");
  const JobId job = Submit("train 2 2");
  StartRanks(job);
  RankStatus joined = Said(job, 1, 0, 0.1, 0, 0);
  joined.step.reset();
  Beat(joined);
  clock_.Advance(absl::Seconds(3));
  Beat(Said(job, 0, 1, 3, 0, 0));
  clock_.Advance(absl::Seconds(1));
  Beat(Said(job, 1, 1, 3, 2.5, 0));  // it waited for rank 0
  clock_.Advance(absl::Seconds(1));
  Beat(Said(job, 0, 2, 5, 0, 0));
  Beat(Said(job, 1, 2, 5, 2.75, 0));
  EXPECT_NEAR(Seconds(job).at("idle").get<double>(), 0.25, kNear);
  EXPECT_NEAR(Goodput(job).at("rank_seconds").get<double>(), 10, kNear);
}

// A heartbeat tells of a step up to a second after it.
TEST_F(HeadGoodputTest, AStepIsTakenToHaveEndedWhenItsRankSays) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  Beat(Said(job, 0, 1, 3, 0, 0));
  clock_.Advance(absl::Seconds(2.75));
  Beat(Said(job, 0, 2, 5, 0, 0));
  clock_.Advance(absl::Seconds(0.25));
  FromNode("1", RankExited{Exit(job, 1, 0, 1)});
  EXPECT_NEAR(Seconds(job).at("step").get<double>(), 2, kNear);
  EXPECT_NEAR(Seconds(job).at("lost").get<double>(), 1, kNear);
}

// A rank says what it measured also between two steps.
TEST_F(HeadGoodputTest, AStepIsMeasuredFromStepToStep) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  clock_.Advance(absl::Seconds(3));
  Beat(Said(job, 0, 1, 3, 0, 0));
  clock_.Advance(absl::Seconds(2));
  Beat(Said(job, 0, 1, 5, 0, 0));
  clock_.Advance(absl::Seconds(1));
  Beat(Said(job, 0, 2, 5.01, 0, 0));
  Expect(job, {{"starting", 3 - 2.01}, {"step", 2.01 + 3}, {"idle", 0}, {"checkpoint_stall", 0}});
}

TEST_F(HeadGoodputTest, RanksThatWaitForOneThatHasEndedMakeNoSteps) {
  Hello("1");
  const JobId job = Submit("train 2 2");
  StartRanks(job);
  Step(0, job, 1, 0, 1);
  Step(0, job, 1, 1, 1);
  Step(10, job, 1, 0, 11);
  Step(0, job, 1, 1, 11);
  FromNode("1", RankExited{Exit(job, 1, 0, 0)});
  Pass(absl::Seconds(30), {"1"});
  FromNode("1", RankExited{Exit(job, 1, 1, 1)});
  const nlohmann::json seconds = Seconds(job);
  EXPECT_NEAR(seconds.at("step").get<double>(), 20, kNear);
  EXPECT_NEAR(seconds.at("ending").get<double>(), 30, kNear);
  EXPECT_NEAR(seconds.at("reforming").get<double>(), 30, kNear);
  EXPECT_NEAR(seconds.at("lost").get<double>(), 0, kNear);
}

TEST_F(HeadGoodputTest, PlacesThatAreNotThereWaitForCapacity) {
  Hello("1", 2);
  const JobId job = Submit("train 1 4");
  StartRanks(job);
  Step(0, job, 1, 0, 1);
  Step(10, job, 1, 0, 2);
  EXPECT_EQ(Goodput(job).at("wanted"), 4);
  Expect(job, {{"step", 20}, {"waiting_for_capacity", 20}});
}

TEST_F(HeadGoodputTest, SurvivorsReformAndNewProcessesStart) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 2 2 one-per-node in-place");
  StartRanks(job);
  Step(0, job, 1, 0, 5);
  Kill("1", job, 1, 0);
  FromNode("1", GenerationGone{job, {1}});
  FromNode("2", GenerationGone{job, {1}, true, "", {{{1}, 1}}});
  ASSERT_EQ(Goodput(job).at("generations"), 2);
  clock_.Advance(absl::Seconds(3));
  StartRanks(job);
  clock_.Advance(absl::Seconds(1));
  Expect(job, {{"starting", 4}, {"reforming", 4}});
}

TEST_F(HeadGoodputTest, SurvivorsComputeOnceAllAreThere) {
  Hello("1");
  Hello("2");
  const JobId job = Submit("train 2 2 one-per-node in-place");
  StartRanks(job);
  Step(0, job, 1, 0, 5);
  Step(4, job, 1, 0, 7);
  Kill("1", job, 1, 0);
  FromNode("1", GenerationGone{job, {1}});
  FromNode("2", GenerationGone{job, {1}, true, "", {{{1}, 1}}});
  clock_.Advance(absl::Seconds(3));
  Expect(job, {{"step", 8}, {"starting", 3}, {"reforming", 3}});
  StartRanks(job);
  clock_.Advance(absl::Seconds(5));
  Beat(Said(job, 0, 8, 4, 1, std::nullopt, 2));
  Expect(job, {{"step", 8 + 4}, {"starting", 3 + 3}, {"reforming", 3 + 3}});
  clock_.Advance(absl::Seconds(2));
  Beat(Said(job, 0, 9, 5.5, 1.5, std::nullopt, 2));  // which waited for half a second of one and a half
  Expect(job, {{"step", 8 + 2 + 4 - 0.5}, {"idle", 0.5}, {"starting", 3 + 4}, {"reforming", 3 + 4}});
}

TEST_F(HeadGoodputTest, TheEndOfAGenerationAndOfTheJobTellTheTotals) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  Step(0, job, 1, 0, 1);
  Step(4, job, 1, 0, 5);
  clock_.Advance(absl::Seconds(1));
  FromNode("1", RankExited{Exit(job, 1, 0, 1)});
  FromNode("1", GenerationGone{job, {1}});
  FromClient(ClientStop{job, false, ""});
  FromNode("1", GenerationGone{job, {2}});
  ASSERT_EQ(State(job), "CANCELLED");
  std::vector<nlohmann::json> told;
  for (const Effect& effect : sent_) {
    const auto* event = std::get_if<EmitEvent>(&effect);
    if (event == nullptr || event->goodput.empty()) continue;
    EXPECT_EQ(event->kind, told.size() < 2 ? "revoke" : "state");
    told.push_back(nlohmann::json::parse(event->goodput));
  }
  ASSERT_EQ(told.size(), 3u);
  EXPECT_NEAR(told[0].at("seconds").at("step").get<double>(), 4, kNear);
  EXPECT_NEAR(told[0].at("seconds").at("lost").get<double>(), 1, kNear);
  EXPECT_EQ(told[2], Goodput(job));
}

// The record is written when something happens, not with each report.
TEST_F(HeadGoodputTest, AHeadThatRestartsCountsTheTimeBetweenOnceAndByTheRecord) {
  Hello("1");
  const JobId job = Submit("train 2 2");
  StartRanks(job);
  Step(2, job, 1, 0, 1);
  Step(0, job, 1, 1, 1);
  Step(10, job, 1, 0, 11);
  Step(0, job, 1, 1, 11);
  EXPECT_EQ(Stored(job).goodput.top, 1) << "no commit for a report";
  clock_.Advance(absl::Seconds(5));
  Boot();
  clock_.Advance(absl::Seconds(5));
  HeldGeneration held{job, {1}, {}, {HeadTestWorld::Step(job, 1, 0, 21), HeadTestWorld::Step(job, 1, 1, 21)}};
  Hello("1", 4, {held});
  Expect(job, {{"starting", 4}, {"step", 40}});
  EXPECT_EQ(Goodput(job).at("steps").at("applied"), 21);
  FromNode("1", RankExited{Exit(job, 1, 0, 1)});
  clock_.Advance(absl::Seconds(1));
  Boot();
  clock_.Advance(absl::Seconds(1));
  Expect(job, {{"starting", 4}, {"step", 40}, {"reforming", 4}});
  EXPECT_EQ(Goodput(job).at("losses"), 1);
}

TEST_F(HeadGoodputTest, AJobOfAnOlderHeadIsCountedFromNowOn) {
  Hello("1");
  const JobId job = Submit("train 2 2");
  const JobId over = Submit("over 1 1");
  FromClient(ClientStop{over, false, ""});
  FromNode("1", GenerationGone{over, {1}});
  StartRanks(job);
  for (auto& [key, record] : disk_) {
    if (auto* status = std::get_if<JobStatusRecord>(&record)) status->status.goodput = {};
  }
  clock_.Advance(absl::Seconds(100));
  Boot();
  clock_.Advance(absl::Seconds(5));
  EXPECT_TRUE(Status(over).at("goodput").is_null());
  Expect(job, {{"unreported", 10}});
}

}  // namespace
}  // namespace gtrain::core
