// Grants that follow the topology of the cluster.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>

#include "runtime/core/head/head_test_world.h"
#include "topology/import.h"

namespace gtrain::core {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class TopologyGrantTest : public HeadTestWorld {
 protected:
  // The machines of the file are host-1 to host-6; those with odd numbers share a rack.
  void StartHead(
      const std::string& rows = "host-1 /r1\nhost-2 /r2\nhost-3 /r1\nhost-4 /r2\nhost-5 /r1\nhost-6 /r2\n") {
    config_.topology = std::make_shared<const topology::Topology>(
        topology::ImportPaths(rows, "racks", topology::ShapeOfOneSlot()).value());
    Boot();
  }
  std::vector<std::string> PlacesOf(const JobId& job) {
    std::vector<std::string> nodes;
    const JobRecord record = Stored(job);
    for (const RankPlace& place : record.grant->ranks) nodes.push_back(place.node.value);
    return nodes;
  }
  static bool OneRack(const std::string& a, const std::string& b) { return (a[0] - b[0]) % 2 == 0; }
};

TEST_F(TopologyGrantTest, ATensorParallelPairIsInOneRack) {
  StartHead();
  for (const char* node : {"1", "2", "3", "4"}) Hello(node);
  const JobId job = Submit("train 4 4 one-per-node in-twos");
  const std::vector<std::string> on = PlacesOf(job);
  ASSERT_EQ(on.size(), 4u);
  EXPECT_TRUE(OneRack(on[0], on[1])) << on[0] << " " << on[1];
  EXPECT_TRUE(OneRack(on[2], on[3])) << on[2] << " " << on[3];
  const nlohmann::json why = nlohmann::json::parse(FromClient(ClientWhy{job}).json);
  EXPECT_THAT(why.at("placement").get<std::string>(),
              HasSubstr("4 ranks of mesh {dp: 2, tp: 2} by the topology"));
}

TEST_F(TopologyGrantTest, AfterALossOnlyTheLostRankMovesToItsRack) {
  StartHead();
  for (const char* node : {"1", "2", "3", "4"}) Hello(node);
  const JobId job = Submit("train 4 4 one-per-node in-twos");
  StartRanks(job);
  std::vector<std::string> before = PlacesOf(job);
  Hello("5");
  Hello("6");
  const size_t lost = 1;
  std::vector<std::string> alive = {"1", "2", "3", "4", "5", "6"};
  std::erase(alive, before[lost]);
  Pass(absl::Seconds(11), alive);  // it is dead, and the others are told to end their ranks
  for (const std::string& node : alive) FromNode(node, GenerationGone{job, {1}});
  Pass(absl::Seconds(5), alive);
  const std::vector<std::string> after = PlacesOf(job);
  ASSERT_EQ(after.size(), 4u);
  for (size_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(after[rank] == before[rank], rank != lost) << rank;
  }
  EXPECT_TRUE(OneRack(after[lost], before[lost])) << after[lost] << " instead of " << before[lost];
}

// Processes that can go on have a part of the model for life, and it is the one that the placement meant.
TEST_F(TopologyGrantTest, InPlaceAPairIsInOneRackToo) {
  StartHead();
  for (const char* node : {"1", "2", "3", "4"}) Hello(node);
  const JobId job = Submit("train 4 4 one-per-node in-twos in-place");
  const std::vector<std::string> on = PlacesOf(job);
  ASSERT_EQ(on.size(), 4u);
  EXPECT_TRUE(OneRack(on[0], on[1])) << on[0] << " " << on[1];
  EXPECT_TRUE(OneRack(on[2], on[3])) << on[2] << " " << on[3];
}

// Plans of large jobs are made beside the loop, on what was known when they were asked for.
class PlanBesideTest : public TopologyGrantTest {
 protected:
  void SetUp() override {
    config_.plan_beside_from = 4;
    TopologyGrantTest::SetUp();
    StartHead();
    for (const char* node : {"1", "2", "3", "4"}) Hello(node);
  }
  bool Granted(const JobId& job) { return Stored(job).generation.value > 0; }
};

TEST_F(PlanBesideTest, NothingIsGrantedBeforeThePlanIsThereAndTheLoopGoesOn) {
  const JobId job = Submit("train 4 4 one-per-node in-twos");
  ASSERT_EQ(plans_.size(), 1u);
  Pass(absl::Seconds(5), {"1", "2", "3", "4"});
  EXPECT_FALSE(Granted(job));
  EXPECT_EQ(State(job), "QUEUED");
  EXPECT_EQ(plans_.size(), 1u) << "one plan a job";
  const JobId small = Submit("small 1 1");
  EXPECT_TRUE(Granted(small)) << "what a plan would take stays free";
  ASSERT_TRUE(plans_.size() == 1);
  FromClient(ClientStop{small, true});
  FromNode(PlacesOf(small)[0], GenerationGone{small, {1}});
  MakePlans();
  ASSERT_TRUE(Granted(job));
  const std::vector<std::string> on = PlacesOf(job);
  EXPECT_TRUE(OneRack(on[0], on[1])) << on[0] << " " << on[1];
  EXPECT_TRUE(OneRack(on[2], on[3])) << on[2] << " " << on[3];
}

TEST_F(PlanBesideTest, WhatChangedMeanwhileIsPlannedAgainAndTheThirdTimeAtOnce) {
  const JobId job = Submit("train 4 4 one-per-node in-twos");
  for (int tries = 0; tries < 2; ++tries) {
    ASSERT_FALSE(Granted(job)) << tries;
    ASSERT_EQ(plans_.size(), 1u) << tries;
    Submit("small 1 1");  // takes a CPU of a machine of the plan
    MakePlans();
  }
  EXPECT_TRUE(Granted(job)) << "the third plan was made in the loop";
  EXPECT_TRUE(plans_.empty());
}

// What a plan would take is free while it is made: so it is made at once where others wait behind.
TEST_F(PlanBesideTest, TheFirstInTheQueueIsNotOvertakenWhileItsPlanIsMade) {
  Pass(absl::Seconds(20), {"1"});  // one machine, so that all of the room comes at once
  const JobId holds = Submit("holds 4 4");
  MakePlans();
  ASSERT_TRUE(Granted(holds));
  const JobId big = Submit("train 4 4 in-twos");
  const std::vector<JobId> small = {Submit("small 1 1"), Submit("small 1 1"), Submit("small 1 1")};
  FromClient(ClientStop{holds, true});
  FromNode("1", GenerationGone{holds, {1}});
  Pass(absl::Seconds(1), {"1"});
  EXPECT_TRUE(Granted(big));
  for (const JobId& job : small) EXPECT_FALSE(Granted(job));
}

TEST_F(PlanBesideTest, APlanOfAMachineThatIsGoneGivesNothingAway) {
  const JobId job = Submit("train 4 4 one-per-node in-twos");
  Pass(absl::Seconds(11), {"1", "2", "3"});
  MakePlans();
  EXPECT_FALSE(Granted(job));
  EXPECT_EQ(State(job), "WAITING");
  Hello("4");
  MakePlans();
  EXPECT_TRUE(Granted(job));
}

TEST_F(PlanBesideTest, AJobThatIsStoppedMeanwhileStaysSo) {
  const JobId job = Submit("train 4 4 one-per-node in-twos");
  FromClient(ClientStop{job, true});
  MakePlans();
  EXPECT_FALSE(Granted(job));
  EXPECT_EQ(State(job), "CANCELLED");
  const JobId next = Submit("train 4 4 one-per-node in-twos");
  MakePlans();
  EXPECT_TRUE(Granted(next));
}

TEST_F(PlanBesideTest, ANextGenerationIsPlannedBesideAsWell) {
  const JobId job = Submit("train 4 4 one-per-node in-twos");
  MakePlans();
  StartRanks(job);
  const std::vector<std::string> before = PlacesOf(job);
  Kill(before[1], job, 1, 1);
  for (const std::string& node : before) FromNode(node, GenerationGone{job, {1}});
  Pass(absl::Seconds(3), before);
  ASSERT_EQ(plans_.size(), 1u);
  MakePlans();
  EXPECT_EQ(Stored(job).generation.value, 2u);
  EXPECT_EQ(PlacesOf(job), before);
}

// Four ranks on the machines of two racks, of which the first has gone to a machine of the other one.
class FabricOrderTest : public TopologyGrantTest {
 protected:
  std::map<std::string, int> Orders() {
    std::map<std::string, int> of;
    const JobRecord record = Stored(job_);
    for (const NodePlace& place : record.grant->nodes) of[place.node.value] = place.fabric_order;
    return of;
  }
  void MoveRank0() {
    StartHead();
    for (const char* node : {"1", "2", "3", "4"}) Hello(node);
    job_ = Submit("train 4 4 one-per-node in-twos");
    for (const auto& [node, order] : Orders()) EXPECT_EQ(order, 0) << node;
    StartRanks(job_);
    before_ = PlacesOf(job_);
    const std::string lost = before_[0];
    beside_ = OneRack(lost, "1") ? "6" : "5";
    old_hello_ = old_;
    Hello(beside_);
    std::vector<std::string> alive = {"1", "2", "3", "4", beside_};
    std::erase(alive, lost);
    Pass(absl::Seconds(11), alive);
    for (const std::string& node : alive) FromNode(node, GenerationGone{job_, {1}});
    Pass(absl::Seconds(5), alive);
    ASSERT_EQ(PlacesOf(job_), (std::vector<std::string>{beside_, before_[1], before_[2], before_[3]}));
  }

  bool old_ = false;  // the agent there
  JobId job_;
  std::vector<std::string> before_;
  std::string beside_;
};

// The order of the ranks would go from rack to rack and back.
TEST_F(FabricOrderTest, CollectivesGoRackByRackWhereRanksDoNot) {
  MoveRank0();
  const auto order = Orders();
  EXPECT_EQ(order.at(beside_), 0);
  EXPECT_EQ(order.at(before_[1]), 3) << "alone in its rack";
  EXPECT_EQ(order.at(before_[2]) + order.at(before_[3]), 3);
}

// Its ranks would not hear of it, and go through the machines in another order than the others.
TEST_F(FabricOrderTest, NobodyIsToldWhereAnAgentIsOlder) {
  old_ = true;
  MoveRank0();
  for (const auto& [node, order] : Orders()) EXPECT_EQ(order, 0) << node;
}

TEST_F(TopologyGrantTest, WithoutAFilePlacementIsPackedAndTheHeadSaysSo) {
  for (const char* node : {"1", "2", "3", "4"}) Hello(node);
  EXPECT_THAT(FromClient(ClientTopology{}).json, HasSubstr("\"source\":\"none\""));
  EXPECT_THAT(PlacesOf(Submit("train 4 4 one-per-node in-twos")), ElementsAre("1", "2", "3", "4"));
}

TEST_F(TopologyGrantTest, TheHeadSaysWhatItFollows) {
  StartHead();
  const nlohmann::json answer = nlohmann::json::parse(FromClient(ClientTopology{}, "", Role::kReadOnly).json);
  EXPECT_EQ(answer.at("source"), "file");
  EXPECT_THAT(answer.at("topology").dump(), HasSubstr("host-"));
}

TEST_F(TopologyGrantTest, AStrangerIsNamedInAWarning) {
  StartHead("host-1 /r1\nhost-2 /r2\n");
  for (const char* node : {"1", "2", "3"}) Hello(node);
  const JobId job = Submit("train 3 3 one-per-node");
  EXPECT_THAT(Events(job, "warning"), ElementsAre(HasSubstr("the topology does not have host-3")));
}

}  // namespace
}  // namespace gtrain::core
