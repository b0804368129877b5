#include "runtime/core/head/gang.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "runtime/core/values/job_state.h"

namespace gtrain::core {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Demand, RanksMeshAndResources) {
  spec::JobSpec spec;
  spec.ranks = spec::Range{2, 8};
  spec.mesh = {{"dp", std::nullopt}, {"tp", 2}};
  spec.resources.cpus = 3;
  spec.resources.memory = 1 << 20;
  spec.where_exclude = {"bad"};
  const plan::Demand demand = DemandOf(spec, false);
  EXPECT_FALSE(demand.count_nodes);
  EXPECT_EQ(demand.min, 2);
  EXPECT_EQ(demand.max, 8);
  EXPECT_EQ(demand.unit, 2) << "the starred axis grows in whole units of the others";
  EXPECT_EQ(demand.cpus, 3);
  EXPECT_EQ(demand.memory_bytes, 1u << 20);
  EXPECT_THAT(demand.exclude, ElementsAre("bad"));
}

TEST(Demand, HostsAreNamesAndEachRankHasItsOwn) {
  spec::JobSpec spec;
  spec.ranks = spec::Range{3, 3};
  spec.where_hosts = {"tux[0-1]", "b"};
  spec.where_ranks = {{{2, 0}, "a", {5, 6}}, {{1}, "b", {}}};
  spec.resources.gpu_share = 250;
  const plan::Demand demand = DemandOf(spec, false);
  EXPECT_THAT(demand.hosts, ElementsAre("b", "tux0", "tux1"));
  EXPECT_THAT(demand.host_names, ElementsAre("a", "b"));
  ASSERT_EQ(demand.rank_hosts.size(), 3u);
  EXPECT_EQ(demand.rank_hosts[0].slot, 6);
  EXPECT_EQ(demand.rank_hosts[1].host, 1);
  EXPECT_EQ(demand.rank_hosts[1].slot, -1);
  EXPECT_EQ(demand.rank_hosts[2].slot, 5);
  EXPECT_EQ(demand.gpu_share, 250);
}

TEST(Demand, PerNodeIsOneProcessWithAllGpus) {
  spec::JobSpec spec;
  spec.nodes = spec::Range{2, 2};
  spec.per = spec::Per::kNode;
  const plan::Demand demand = DemandOf(spec, false);
  EXPECT_TRUE(demand.count_nodes);
  EXPECT_EQ(demand.ranks_per_node, 1);
  EXPECT_TRUE(demand.all_gpus);
}

TEST(Demand, OversubscribeAutoFollowsTheClusterAndAnExplicitWordWins) {
  spec::JobSpec spec;
  EXPECT_TRUE(DemandOf(spec, true).oversubscribe_cpus);
  EXPECT_FALSE(DemandOf(spec, false).oversubscribe_cpus);
  spec.resources.oversubscribe = false;
  EXPECT_FALSE(DemandOf(spec, true).oversubscribe_cpus);
}

class OccupyTest : public ::testing::Test {
 protected:
  OccupyTest() {
    node_.id = NodeId("a");
    node_.hostname = std::string("host");
    node_.inventory.cpus = 8;
    node_.inventory.memory_bytes = 1000;
    node_.inventory.gpus.resize(2);
    grant_.ranks = {{0, 0, NodeId("a"), {0, 1}, {1}}};
    demand_.cpus = 2;
    demand_.memory_bytes = 600;
  }
  NodeRecord node_;
  GenerationGrant grant_;
  plan::Demand demand_;
};

TEST_F(OccupyTest, TakesWhatTheRanksOfThisNodeHold) {
  plan::NodeView view = ViewOf(node_);
  Occupy(view, grant_.ranks[0], demand_);
  EXPECT_EQ(view.cpus_free, 6);
  EXPECT_EQ(view.memory_free_bytes, 400u);
  EXPECT_THAT(view.gpus_free, ElementsAre(0));
  EXPECT_THAT(view.cpus_bound, ElementsAre(0, 1));
  EXPECT_EQ(plan::Emptied({view})[0].gpus_free.size(), 2u);
}

TEST_F(OccupyTest, APartOfAGpuLeavesTheRest) {
  plan::NodeView view = ViewOf(node_);
  demand_.gpu_share = 300;
  Occupy(view, grant_.ranks[0], demand_);
  Occupy(view, grant_.ranks[0], demand_);
  EXPECT_THAT(view.gpus_free, ElementsAre(0));
  EXPECT_THAT(view.gpu_shares, ElementsAre(std::pair(1, 600)));
}

TEST_F(OccupyTest, ExplainSaysWhoHoldsWhatAndWhatWouldHelp) {
  plan::NodeView view = ViewOf(node_);
  Occupy(view, grant_.ranks[0], demand_);
  plan::Demand wanting;
  wanting.min = wanting.max = 7;
  wanting.gpus = 0;
  const auto blockers = Explain(plan::Place({view}, wanting), plan::Place(plan::Emptied({view}), wanting),
                                {{NodeId("a"), {"train-1"}}});
  ASSERT_EQ(blockers.size(), 1u);
  EXPECT_EQ(blockers[0].constraint, "cpus: 6 of 8 free");
  EXPECT_THAT(blockers[0].held_by, ElementsAre("train-1"));
  EXPECT_EQ(blockers[0].unblocked_by, "when train-1 ends it takes 7");
  wanting.min = wanting.max = 9;
  const auto never = Explain(plan::Place({view}, wanting), plan::Place(plan::Emptied({view}), wanting), {});
  EXPECT_THAT(never.back().constraint, HasSubstr("needs 9 ranks; there is room for 8"));
}

// What other nodes have does not matter to who waits for one of them.
TEST(Explain, OfAJobThatWaitsForRank0sHostOnlyThatIsSaid) {
  std::vector<plan::NodeView> views(50);
  for (size_t i = 0; i < views.size(); ++i) {
    views[i].id = NodeId(absl::StrCat("n", 100 + i));
    views[i].hostname = absl::StrCat("tux", i);
    views[i].cpus = views[i].cpus_free = 4;
  }
  views[40].cpus_free = 0;
  plan::Demand wanting;
  wanting.rank0 = {"tux40"};
  const plan::Placement now = plan::Place(views, wanting), empty = plan::Place(plan::Emptied(views), wanting);
  const auto held = Explain(now, empty, {{NodeId("n140"), {"train-1"}}});
  ASSERT_EQ(held.size(), 1u);
  EXPECT_EQ(held[0], (Blocker{"tux40", "cpus: 0 of 4 free", 0, {"train-1"}, "when train-1 ends it takes 1"}));
  wanting.rank0 = {"tux99"};
  const plan::Placement gone = plan::Place(views, wanting);
  const auto absent = Explain(gone, gone, {});
  ASSERT_EQ(absent.size(), 1u);
  EXPECT_EQ(absent[0].constraint, "rank 0 goes on tux99 by where.rank0, and no node that is up is called so");
  EXPECT_EQ(absent[0].unblocked_by, "a node of that name joins, or another where.rank0");
}

TEST(Explain, ManyNodesAreCounted) {
  std::vector<plan::NodeView> views(1000);
  for (size_t i = 0; i < views.size(); ++i) views[i].id = NodeId(absl::StrCat("n", 1000 + i));
  plan::Demand wanting;
  const plan::Placement placement = plan::Place(views, wanting);
  const auto blockers = Explain(placement, placement, {});
  ASSERT_EQ(blockers.size(), kBlockersMax + 2);
  EXPECT_EQ(blockers[kBlockersMax].constraint, "likewise on 968 more nodes");
  EXPECT_THAT(blockers.back().constraint, HasSubstr("needs 1 rank;"));
}

TEST(JobStates, FinalOnesAreFinalAndTheCycleIsOpen) {
  for (const JobState state : {JobState::kSucceeded, JobState::kFailed, JobState::kCancelled}) {
    EXPECT_TRUE(IsFinal(state));
    for (int to = 0; to <= static_cast<int>(JobState::kCancelled); ++to) {
      EXPECT_FALSE(CanMove(state, static_cast<JobState>(to)));
    }
  }
  EXPECT_TRUE(CanMove(JobState::kRunning, JobState::kReconfiguring));
  EXPECT_TRUE(CanMove(JobState::kReconfiguring, JobState::kRunning));
  EXPECT_TRUE(CanMove(JobState::kReconfiguring, JobState::kWaiting));
  EXPECT_FALSE(CanMove(JobState::kQueued, JobState::kRunning)) << "nothing runs that was not granted";
  EXPECT_FALSE(CanMove(JobState::kRunning, JobState::kQueued));
}

}  // namespace
}  // namespace gtrain::core
