// Nodes for which the others wait (fault N6).
#include <limits>

#include "runtime/core/head/head_test_world.h"

namespace gtrain::core {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class HeadPaceTest : public HeadTestWorld {
 protected:
  // Two ranks a node.
  void Start() {
    for (const char* node : {"1", "2", "3"}) Hello(node, 2);
    job_ = Submit("train 6 6");
    StartRanks(job_);
    ASSERT_EQ(State(job_), "RUNNING");
  }

  // `seconds` in which the ranks of each node spend this share of their time on their own part of the steps.
  void Train(int seconds, const std::map<std::string, double>& busy, uint64_t collectives_a_second = 10) {
    for (int i = 0; i < seconds; ++i) {
      clock_.Advance(absl::Seconds(1));
      joined_ += 1;
      collectives_ += collectives_a_second;
      const auto status = Status(job_);
      for (const auto& rank : status.at("ranks")) {
        const std::string node = rank.at("node");
        double& waited = waited_[rank.at("rank")];
        waited += 1 - busy.at(node);
        RankStatus now = Step(job_, 1, rank.at("rank"), static_cast<int64_t>(collectives_));
        now.collective_sequence = collectives_;
        now.waited_seconds = waited;
        now.joined_seconds = joined_;
        FromNode(node, AgentHeartbeat{++heartbeats_, {now}, {}});
      }
    }
  }

  nlohmann::json Slow() {
    const auto status = Status(job_);
    return status.at("slow");
  }
  std::string Events() { return FromClient(ClientWhy{job_}).json; }

  JobId job_;
  double joined_ = 0;
  uint64_t collectives_ = 0;
  std::map<int, double> waited_;
};

TEST_F(HeadPaceTest, TheNodeOthersWaitForIsReportedAndKept_N6) {
  Start();
  Train(25, {{"1", 0.1}, {"2", 0.98}, {"3", 0.1}});
  EXPECT_TRUE(Slow().empty()) << "two comparisons may be chance";
  Train(20, {{"1", 0.1}, {"2", 0.98}, {"3", 0.1}});
  ASSERT_EQ(Slow().size(), 1u);
  EXPECT_EQ(Slow().at(0).at("hostname"), "host-2");
  EXPECT_NEAR(Slow().at(0).at("score").get<double>(), 9.8, 0.1);
  EXPECT_THAT(Events(), HasSubstr("host-2 is slow: its ranks take 9.8 times as long as the others"));
  const auto nodes = nlohmann::json::parse(FromClient(ClientNodes{}).json);
  EXPECT_TRUE(nodes.at("nodes").at(0).at("slow").empty());
  EXPECT_EQ(nodes.at("nodes").at(1).at("slow").at(0).at("job"), job_.value);
  const auto status = Status(job_);
  EXPECT_NEAR(status.at("ranks").at(0).at("busy").get<double>(), 0.1, 0.01);
  EXPECT_EQ(status.at("generation"), 1) << "nobody is evicted";
  EXPECT_EQ(status.at("state"), "RUNNING");

  Train(45, {{"1", 0.9}, {"2", 0.98}, {"3", 0.9}});
  EXPECT_TRUE(Slow().empty());
  EXPECT_THAT(Events(), HasSubstr("host-2 keeps up with the others again"));
}

TEST_F(HeadPaceTest, EvenAndIdleJobsHaveNoSlowNode_N6) {
  Start();
  Train(60, {{"1", 0.9}, {"2", 0.8}, {"3", 0.7}});
  Train(60, {{"1", 0.01}, {"2", 0.3}, {"3", 0.01}});  // all wait, for the network perhaps
  Train(60, {{"1", 0.1}, {"2", 1}, {"3", 0.1}}, 0);   // in one long collective: nothing is known
  EXPECT_TRUE(Slow().empty());
  EXPECT_THAT(Events(), Not(HasSubstr("slow")));
}

TEST_F(HeadPaceTest, OneBadStretchIsNotSlow_N6) {
  Start();
  for (int i = 0; i < 5; ++i) {
    Train(20, {{"1", 0.1}, {"2", 1}, {"3", 0.1}});
    Train(20, {{"1", 0.9}, {"2", 0.9}, {"3", 0.9}});
  }
  EXPECT_THAT(Events(), Not(HasSubstr("is slow")));
}

TEST_F(HeadPaceTest, NumbersThatMakeNoSenseAreHarmless_N6) {
  Start();
  for (int i = 0; i < 100; ++i) {
    RankStatus status = Step(job_, 1, 0, i);
    status.collective_sequence = static_cast<uint64_t>(i) * 100;
    constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
    constexpr double kWaited[] = {-1e300, 1e300, kNone}, kJoined[] = {1e308, -5, kNone, 1e307};
    status.waited_seconds = kWaited[i % 3];
    status.joined_seconds = kJoined[i % 4];
    FromNode("1", AgentHeartbeat{++heartbeats_, {status}, {}});
  }
  EXPECT_TRUE(Slow().empty());
}

}  // namespace
}  // namespace gtrain::core
