// Tests jobs that stand still: the report about them, the ranks that it names, and that it is taken back.
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "runtime/core/head/head_test_world.h"

namespace gtrain::core {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

class HeadStallsTest : public HeadTestWorld {
 protected:
  // A heartbeat in which these ranks rest, each in a function of the kernel; empty: it works.
  void Rest(const JobId& job, std::vector<std::pair<int, std::string>> ranks,
            std::optional<int64_t> step = std::nullopt) {
    AgentHeartbeat beat{++beats_, {}, {}};
    for (auto& [rank, function] : ranks) {
      RankStatus status = Step(job, 1, rank, 0);
      status.step = rank == 0 ? step : std::nullopt;
      status.idle = function.empty() ? absl::ZeroDuration() : absl::Minutes(8);
      status.blocked_in = function;
      beat.changed.push_back(status);
    }
    FromNode("1", beat);
  }
  void Say(const RankStatus& status) {
    AgentHeartbeat beat{++beats_, {}, {}};
    beat.changed.push_back(status);
    FromNode("1", beat);
  }
  std::string Stuck(const JobId& job) { return Status(job).at("stuck").get<std::string>(); }

  uint64_t beats_ = 100;
};

TEST_F(HeadStallsTest, AJobWithoutOutputAndProcessorTimeIsStuckAndNeverKilled) {
  Hello("1");
  const JobId job = Submit("train 4 4");
  StartRanks(job);
  Rest(job, {{0, "hrtimer_nanosleep"}, {1, "do_poll"}, {2, "do_poll"}});
  Pass(absl::Minutes(16), {"1"});
  EXPECT_EQ(Stuck(job), "") << "rank 3 works";
  Rest(job, {{3, "do_poll"}});
  Pass(absl::Minutes(6), {"1"});
  EXPECT_EQ(Stuck(job), "") << "not for long enough";
  Pass(absl::Minutes(2), {"1"});
  EXPECT_THAT(Stuck(job), HasSubstr("seems stuck: no output and no CPU for 1"));
  EXPECT_THAT(
      Stuck(job),
      HasSubstr("rank 0 on host-1 is blocked in hrtimer_nanosleep, ranks 1-3 are blocked in do_poll"));
  EXPECT_THAT(Stuck(job), HasSubstr("--rank 0`"));
  EXPECT_THAT(Events(job, "stall"), SizeIs(1));
  Pass(absl::Hours(1), {"1"});
  EXPECT_EQ(State(job), "RUNNING");
  EXPECT_THAT(Events(job, "stall"), SizeIs(1)) << "said once";
  Rest(job, {{3, ""}});
  EXPECT_EQ(Stuck(job), "");
  ASSERT_THAT(Events(job, "stall"), SizeIs(2));
  EXPECT_THAT(Events(job, "stall")[1], HasSubstr("goes on"));
}

// A pattern may find the number of the batch in its epoch.
TEST_F(HeadStallsTest, AStepNumberThatBeginsAnewIsAStep) {
  Hello("1");
  const JobId job = Submit("train 2 2");
  StartRanks(job);
  const auto say = [&](int rank, int64_t step) { Say(Step(job, 1, rank, step)); };
  for (int epoch = 0; epoch < 4; ++epoch) {
    for (const int64_t step : {5, 12, 19}) {
      say(0, step);
      say(1, step);
      Pass(absl::Minutes(4), {"1"});
    }
  }
  EXPECT_EQ(Status(job).at("step"), 19);
  EXPECT_THAT(Events(job, "stall"), SizeIs(0));
  for (int epoch = 0; epoch < 4; ++epoch) {  // rank 1 stays where it is
    for (const int64_t step : {5, 12, 19}) {
      say(0, step);
      Pass(absl::Minutes(2), {"1"});
    }
  }
  ASSERT_THAT(Events(job, "stall"), Not(SizeIs(0)));
  EXPECT_THAT(Events(job, "stall")[0], HasSubstr("no step for 15m"));
}

TEST_F(HeadStallsTest, WithoutStepsThereIsNoSpeed) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  for (int64_t step = 1; step <= 10; ++step) {
    Say(Step(job, 1, 0, step));
    Pass(absl::Seconds(2), {"1"});
  }
  EXPECT_NEAR(Status(job).at("steps_per_second").get<double>(), 0.5, 0.1);
  Pass(absl::Seconds(9), {"1"});
  EXPECT_TRUE(Status(job).at("steps_per_second").is_null());
  Say(Step(job, 1, 0, 11));
  EXPECT_FALSE(Status(job).at("steps_per_second").is_null());
}

TEST_F(HeadStallsTest, RanksThatWaitAlikeAccuseNobody) {
  Hello("1");
  const JobId job = Submit("train 2 2");
  StartRanks(job);
  Rest(job, {{0, "futex_do_wait"}, {1, "futex_do_wait"}});
  Pass(absl::Minutes(16), {"1"});
  EXPECT_THAT(Stuck(job), HasSubstr("all 2 ranks are blocked in futex_do_wait"));
}

// One rank speaks for all, as programs with a pattern in `progress.step` do: it sleeps, and the others wait.
TEST_F(HeadStallsTest, ARankThatNeverSaysAStepIsNotBehind) {
  Hello("1");
  const JobId job = Submit("train 2 2 stall-kill");
  StartRanks(job);
  Rest(job, {{0, ""}, {1, ""}}, 7);
  Pass(absl::Minutes(9), {"1"});
  Rest(job, {{0, "hrtimer_nanosleep"}, {1, "do_poll"}}, 7);
  Pass(absl::Minutes(7), {"1"});
  ASSERT_THAT(Sent<AgentQuery>(), SizeIs(2));
  EXPECT_TRUE(Sent<AgentQuery>()[0].second.full) << "debuggers look at the culprit";
  EXPECT_FALSE(Sent<AgentQuery>()[1].second.full);
  ASSERT_THAT(Sent<Revoke>(), SizeIs(1));
  EXPECT_THAT(Sent<Revoke>()[0].second.reason, HasSubstr("rank 0 on host-1 is blocked in hrtimer_nanosleep"));
}

TEST_F(HeadStallsTest, WithoutAnySignOfWhoWaitsTheSilentRankIsNotAccused) {
  Hello("1");
  const JobId job = Submit("train 2 2 stall-kill");
  StartRanks(job);
  Rest(job, {{0, ""}, {1, ""}}, 7);
  Pass(absl::Minutes(16), {"1"});
  ASSERT_THAT(Sent<Revoke>(), SizeIs(1));
  EXPECT_THAT(Sent<Revoke>()[0].second.reason, HasSubstr("rank 0 on host-1 made the last known step, 7"));
  EXPECT_THAT(Sent<Revoke>()[0].second.reason, Not(HasSubstr("rank 1")));
}

TEST_F(HeadStallsTest, ALimitThatMeasuresNothingIsSaid) {
  Hello("1");
  const JobId job = Submit("train 1 1 stall20s");
  StartRanks(job);
  Pass(absl::Seconds(15), {"1"});
  EXPECT_EQ(Status(job).at("progress"), "");
  Pass(absl::Seconds(10), {"1"});
  EXPECT_THAT(Status(job).at("progress").get<std::string>(),
              HasSubstr("progress.stall: 20s measures no steps"));
  EXPECT_THAT(Events(job, "warning"), SizeIs(1));
  FromNode("1", AgentHeartbeat{200, {Step(job, 1, 0, 1)}, {}});
  EXPECT_EQ(Status(job).at("progress"), "") << "there is a source now";
}

}  // namespace
}  // namespace gtrain::core
