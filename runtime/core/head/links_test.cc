// Nodes that cannot reach each other (fault W5).
#include "runtime/core/head/head_test_world.h"

namespace gtrain::core {
namespace {

using ::testing::HasSubstr;

class HeadLinksTest : public HeadTestWorld {
 protected:
  // One rank a node, in the order of the names; all run.
  JobId Running(const std::string& spec, const std::vector<std::string>& nodes) {
    nodes_ = nodes;
    for (const std::string& node : nodes) Hello(node);
    const JobId job = Submit(spec + " one-per-node");
    StartRanks(job);
    EXPECT_EQ(State(job), "RUNNING");
    return job;
  }

  int RankOn(const JobId& job, const std::string& node) {
    const auto status = Status(job);
    for (const auto& rank : status.at("ranks")) {
      if (rank.at("node") == node) return rank.at("rank");
    }
    return -1;
  }

  void Report(const JobId& job, const std::string& from, const std::string& to, uint64_t generation = 1) {
    FromNode(from, LinkDown{job, {generation}, RankOn(job, from), RankOn(job, to), "no answer within 5s"});
  }

  // Time passes, every node says that nothing is left of what was revoked, all ranks of the next start.
  void Settle(const JobId& job, absl::Duration time = absl::Seconds(6)) {
    Pass(time, nodes_);
    const uint64_t generation = Status(job).at("generation");
    for (const std::string& node : nodes_) FromNode(node, GenerationGone{job, {generation}});
    Pass(absl::Seconds(2), nodes_);
    StartRanks(job);
  }

  std::set<std::string> Hosts(const JobId& job) {
    std::set<std::string> hosts;
    const auto status = Status(job);
    for (const auto& rank : status.at("ranks")) hosts.insert(rank.at("node"));
    return hosts;
  }

  std::vector<std::string> nodes_;
};

TEST_F(HeadLinksTest, OneOfThePairIsLeftOutWhoeverReports_W5) {
  for (const bool both : {false, true}) {
    SCOPED_TRACE(both);
    disk_.clear();
    Boot();
    const JobId job = Running("train 2 3", {"1", "2", "3"});
    Report(job, "1", "2");
    if (both) {
      Pass(absl::Seconds(2), nodes_);
      Report(job, "2", "1");
      Report(job, "1", "2");
    }
    EXPECT_EQ(Status(job).at("generation"), 1);
    Settle(job);
    EXPECT_EQ(State(job), "RUNNING");
    EXPECT_EQ(Hosts(job), (std::set<std::string>{"1", "3"}));
    const auto status = Status(job);
    EXPECT_EQ(status.at("generation"), 2);
    ASSERT_EQ(status.at("avoided").size(), 1u);
    EXPECT_EQ(status.at("avoided").at(0).at("hostname"), "host-2");
    const std::string fault = status.at("last_fault").at("message");
    EXPECT_THAT(fault, HasSubstr("the link between host-1 and host-2 is broken"));
    EXPECT_THAT(fault, HasSubstr("the job goes on without host-2"));
    EXPECT_EQ(status.at("last_fault").at("kind"), "infrastructure");
  }
}

TEST_F(HeadLinksTest, TheNodeThatMostFailToReachIsLeftOut_W5) {
  const JobId job = Running("train 2 4", {"1", "2", "3", "4"});
  Report(job, "1", "2");
  Report(job, "4", "1");
  Report(job, "3", "1");
  Settle(job);
  EXPECT_EQ(Hosts(job), (std::set<std::string>{"2", "3", "4"}));
  EXPECT_EQ(Status(job).at("generation"), 2);
}

TEST_F(HeadLinksTest, TwoPairsCostTwoNodes_W5) {
  const JobId job = Running("train 2 5", {"1", "2", "3", "4", "5"});
  Report(job, "1", "2");
  Report(job, "3", "4");
  Settle(job);
  EXPECT_EQ(Hosts(job), (std::set<std::string>{"1", "3", "5"}));
  EXPECT_EQ(Status(job).at("generation"), 2);
}

// No ping-pong: neither late words of the old generation nor a second broken link bring the node back.
TEST_F(HeadLinksTest, TheExcludedStaysOut_W5) {
  const JobId job = Running("train 1 3", {"1", "2", "3"});
  Report(job, "1", "2");
  Settle(job);
  ASSERT_EQ(Hosts(job), (std::set<std::string>{"1", "3"}));
  FromNode("2", LinkDown{job, {1}, 1, 0, "late"});
  FromNode("1", LinkDown{job, {1}, 0, 1, "late"});
  Pass(absl::Seconds(8), nodes_);
  EXPECT_EQ(Status(job).at("generation"), 2);
  EXPECT_EQ(State(job), "RUNNING");
  EXPECT_EQ(Status(job).at("avoided").size(), 1u);
  Report(job, "3", "1", 2);
  Settle(job);
  EXPECT_EQ(Hosts(job), (std::set<std::string>{"1"}));
  Report(job, "1", "1", 3);  // nonsense
  FromNode("1", LinkDown{job, {3}, 0, 7, "nonsense"});
  FromNode("2", LinkDown{job, {3}, 0, 0, "of another node's rank"});
  Pass(absl::Seconds(20), nodes_);
  EXPECT_EQ(Status(job).at("generation"), 3);
  EXPECT_EQ(State(job), "RUNNING");
}

TEST_F(HeadLinksTest, WaitsWithTheReasonAndTriesAgain_W5) {
  const JobId job = Running("train 2 2", {"1", "2"});
  Report(job, "2", "1");
  Settle(job);
  EXPECT_EQ(State(job), "WAITING");
  const auto why = nlohmann::json::parse(FromClient(ClientWhy{job}).json);
  EXPECT_THAT(why.dump(),
              HasSubstr("avoided by this job for 10m: rank 1 on host-2 cannot reach rank 0 on host-1: "
                        "no answer within 5s"));
  EXPECT_THAT(why.at("blocked_by").dump(), HasSubstr("gtrain node undrain host-2"));
  Boot();  // a new head remembers
  for (const std::string& node : nodes_) Hello(node);
  Pass(absl::Minutes(9), nodes_);
  EXPECT_EQ(State(job), "WAITING");
  Pass(absl::Seconds(61), nodes_);
  StartRanks(job);
  EXPECT_EQ(State(job), "RUNNING");
  EXPECT_EQ(Status(job).at("generation"), 2);
  EXPECT_TRUE(Status(job).at("avoided").empty());
}

TEST_F(HeadLinksTest, APersonOrARebootBringsItBack_W5) {
  for (const bool reboot : {false, true}) {
    SCOPED_TRACE(reboot);
    disk_.clear();
    Boot();
    const JobId job = Running("train 2 2", {"1", "2"});
    Report(job, "2", "1");
    Settle(job);
    ASSERT_EQ(State(job), "WAITING");
    if (reboot) {
      Pass(absl::Seconds(30), {"1"});
      Hello("2", 4, {}, "2");
    } else {
      EXPECT_TRUE(FromClient(ClientDrainNode{"host-2", {}, "", true}, "", Role::kAdmin).ok);
    }
    StartRanks(job);
    EXPECT_EQ(State(job), "RUNNING");
  }
}

// Silence towards the head is the failure detector's: no node is left out for what was said meanwhile.
TEST_F(HeadLinksTest, LinksOfASilentNodeAreNotJudged_W5) {
  // Heard again before the decision, and after it.
  for (const absl::Duration silent : {absl::Seconds(4), absl::Seconds(6)}) {
    SCOPED_TRACE(silent);
    disk_.clear();
    Boot();
    const JobId job = Running("train 2 3", {"1", "2", "3"});
    Pass(absl::Seconds(2), {"1", "3"});
    Report(job, "3", "2");
    Pass(silent, {"1", "3"});
    Pass(absl::Seconds(10), nodes_);
    EXPECT_EQ(Status(job).at("generation"), 1);
    EXPECT_EQ(State(job), "RUNNING");
    EXPECT_TRUE(Status(job).at("avoided").empty());
    Report(job, "3", "2");
    Settle(job);
    EXPECT_EQ(Hosts(job), (std::set<std::string>{"1", "2"}));
  }
}

TEST_F(HeadLinksTest, ARankThatHasEndedNeedNotAnswer_W5) {
  const JobId job = Running("train 2 2", {"1", "2"});
  FromNode("1", RankExited{Exit(job, 1, 0, 0)});
  FromNode("2", LinkDown{job, {1}, 1, 0, "refused"});
  Pass(absl::Seconds(20), nodes_);
  EXPECT_EQ(Status(job).at("generation"), 1);
  EXPECT_TRUE(Status(job).at("avoided").empty());
}

}  // namespace
}  // namespace gtrain::core
