// Step and loss as people see them: of ranks that have ended, of a training that has diverged, of what was
// planned.
#include <cmath>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "runtime/core/agent/rank_reports.h"
#include "runtime/core/head/head_test_world.h"

namespace gtrain::core {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

class HeadProgressTest : public HeadTestWorld {
 protected:
  void Beat(const RankStatus& status) { FromNode("1", AgentHeartbeat{++beats_, {status}, {}}); }
  RankStatus Said(const JobId& job, int rank, int64_t step, std::optional<double> loss,
                  bool diverged = false) {
    RankStatus status = Step(job, 1, rank, step);
    status.loss = loss;
    status.diverged = diverged;
    return status;
  }

  uint64_t beats_ = 100;
};

TEST_F(HeadProgressTest, ALossThatIsNoNumberIsShownInsteadOfTheOneBefore) {
  Hello("1");
  const JobId job = Submit("train 2 2");
  StartRanks(job);
  Beat(Said(job, 0, 4, 0.5));
  EXPECT_EQ(Status(job).at("loss"), 0.5);
  EXPECT_EQ(Status(job).at("diverged"), false);
  Beat(Said(job, 0, 5, std::nullopt, true));
  EXPECT_TRUE(Status(job).at("loss").is_null());
  EXPECT_EQ(Status(job).at("diverged"), true);
  Beat(Said(job, 0, 6, std::nullopt, true));
  ASSERT_THAT(Events(job, "warning"), SizeIs(1)) << "said once a generation";
  EXPECT_THAT(Events(job, "warning")[0], HasSubstr("the loss of rank 0 is not a finite number, by step 5"));
  for (int rank = 0; rank < 2; ++rank) FromNode("1", RankExited{Exit(job, 1, rank, 0)});
  ASSERT_EQ(State(job), "SUCCEEDED");
  EXPECT_EQ(Status(job).at("diverged"), true) << "also of a job that is over";
  Boot();
  EXPECT_EQ(Status(job).at("diverged"), true) << "and for the next head";
}

// A heartbeat comes once a second; a rank may end before it.
TEST_F(HeadProgressTest, WhatARankSaidLastComesWithItsExit) {
  Hello("1");
  const JobId job = Submit("train 2 2");
  StartRanks(job);
  Beat(Said(job, 0, 80, 0.5));
  Beat(Said(job, 1, 80, std::nullopt));
  for (int rank = 0; rank < 2; ++rank) {
    RankExit exit = Exit(job, 1, rank, 0);
    exit.step = 100;
    if (rank == 0) exit.loss = 0.25;
    FromNode("1", RankExited{exit});
  }
  ASSERT_EQ(State(job), "SUCCEEDED");
  EXPECT_EQ(Status(job).at("step"), 100);
  EXPECT_EQ(Status(job).at("loss"), 0.25);
}

TEST_F(HeadProgressTest, TheEndIsInSightUntilTheStepsThatWerePlannedAreDone) {
  Hello("1");
  const JobId job = Submit("train 1 1 steps10");
  StartRanks(job);
  const auto end_at = [&](int64_t step) {
    Pass(absl::Seconds(1), {"1"});
    Beat(Said(job, 0, step, std::nullopt));
    return Status(job).at("eta_seconds");
  };
  for (int64_t step = 1; step < 9; ++step) (void)end_at(step);
  EXPECT_TRUE(end_at(9).is_number());
  EXPECT_EQ(end_at(10), 0);
  EXPECT_TRUE(end_at(11).is_null()) << "nobody knows when it ends";
  EXPECT_EQ(Status(job).at("steps_total"), 10);
}

TEST_F(HeadProgressTest, AnExitThatSaysNothingOfTheStepTakesNothingBack) {  // of an older agent
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  Beat(Said(job, 0, 80, 0.5));
  FromNode("1", RankExited{Exit(job, 1, 0, 0)});
  EXPECT_EQ(Status(job).at("step"), 80);
  EXPECT_EQ(Status(job).at("loss"), 0.5);
}

TEST(RankReports, ALossMayBeNoNumber) {
  spec::Progress progress;
  progress.loss = R"(loss (\S+))";
  const ProgressPatterns patterns(progress);
  for (const char* word : {"nan", "-nan", "inf"}) {
    const RankSaid said = patterns.Match(std::string("step 3 loss ") + word);
    ASSERT_TRUE(said.loss.has_value()) << word;
    EXPECT_FALSE(std::isfinite(*said.loss)) << word;
  }
  // These are lines as Python's json.dumps writes them.
  for (const char* line :
       {R"({"step":7,"loss":NaN})", R"({"step":7,"loss":-Infinity})", R"({"step":7,"loss":"nan"})"}) {
    const RankSaid said = ReadReportLine(line);
    EXPECT_EQ(said.step, 7) << line;
    ASSERT_TRUE(said.loss.has_value()) << line;
    EXPECT_TRUE(std::isnan(*said.loss)) << line;
  }
  EXPECT_FALSE(ReadReportLine(R"({"step":7,"loss":null})").loss.has_value()) << "not known is not diverged";
  const RankSaid relayed = ReadRelay(R"({"type":"progress","step":7,"loss":"nan"})");
  ASSERT_TRUE(relayed.loss.has_value());
  EXPECT_TRUE(std::isnan(*relayed.loss));
}

}  // namespace
}  // namespace gtrain::core
