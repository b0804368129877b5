#include "job/plan/place.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "absl/strings/str_format.h"
#include "base/rng.h"

namespace gtrain::plan {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

NodeView Node(const std::string& name, int cpus, int gpus = 0) {
  NodeView node;
  node.id = NodeId(name);
  node.hostname = "host-" + name;
  node.cpus = node.cpus_free = cpus;
  node.memory_bytes = node.memory_free_bytes = uint64_t{16} << 30;
  for (int i = 0; i < gpus; ++i) {
    node.gpu_models.push_back("NVIDIA H100 80GB");
    node.gpus_free.push_back(i);
  }
  return node;
}

Demand Ranks(int min, int max) {
  Demand demand;
  demand.min = min;
  demand.max = max;
  return demand;
}

std::vector<std::string> NodesByRank(const Placement& placement) {
  std::vector<std::string> names;
  for (const RankSlot& slot : placement.ranks) names.push_back(slot.node.value);
  return names;
}

TEST(Place, PacksOnTheTightestSingleNode) {
  const Placement p = Place({Node("a", 8), Node("b", 4), Node("c", 2)}, Ranks(4, 4));
  ASSERT_TRUE(p.placed) << p.reason;
  EXPECT_THAT(NodesByRank(p), ElementsAre("b", "b", "b", "b"));
  EXPECT_EQ(p.ranks[3].local_rank, 3);
}

TEST(Place, InputOrderDoesNotMatter) {
  const Placement p = Place({Node("b", 2), Node("a", 2)}, Ranks(4, 4));
  EXPECT_THAT(NodesByRank(p), ElementsAre("a", "a", "b", "b"));
  EXPECT_THAT(p.nodes, ElementsAre(NodeId("a"), NodeId("b")));
}

TEST(Place, AllOrNothingAndTheReasonHasTheNumbers) {
  const Placement p = Place({Node("a", 2), Node("b", 2)}, Ranks(8, 8));
  EXPECT_FALSE(p.placed);
  EXPECT_TRUE(p.ranks.empty());
  EXPECT_EQ(p.reason,
            "needs 8 ranks; there is room for 4: host-a takes 2 (cpus: 2 of 2 free); host-b takes 2 (cpus: 2 "
            "of 2 free)");
}

TEST(Place, CpusAreSharedForTheLeastThatWasAskedForAndNotForMore) {
  Demand demand = Ranks(1, 8);
  demand.oversubscribe_cpus = true;
  EXPECT_EQ(Place({Node("a", 2)}, demand).ranks.size(), 2u) << "as many as fit";
  demand.min = 5;
  demand.unit = 2;
  EXPECT_EQ(Place({Node("a", 2)}, demand).ranks.size(), 6u) << "the least that is possible";
  demand.min = demand.max = 8;
  EXPECT_EQ(Place({Node("a", 2)}, demand).ranks.size(), 8u);
}

TEST(Place, TakesBetweenMinAndMaxInWholeUnits) {
  Demand demand = Ranks(2, 8);
  demand.unit = 2;
  const Placement p = Place({Node("a", 3), Node("b", 2)}, demand);
  ASSERT_TRUE(p.placed) << p.reason;
  EXPECT_EQ(p.ranks.size(), 4u);
}

TEST(Place, ExactRanksANode) {
  Demand demand = Ranks(2, 4);
  demand.ranks_per_node = 1;
  const Placement p = Place({Node("a", 8), Node("b", 8), Node("c", 8)}, demand);
  EXPECT_THAT(NodesByRank(p), ElementsAre("a", "b", "c"));
  demand = Ranks(3, 3);
  demand.ranks_per_node = 2;
  EXPECT_FALSE(Place({Node("a", 8), Node("b", 8)}, demand).placed);
}

TEST(Place, SurvivorsKeepTheirRanks) {
  Demand demand = Ranks(2, 4);
  demand.ranks_per_node = 1;
  demand.previous = {NodeId("d"), NodeId("lost"), NodeId("b"), NodeId("a")};
  const Placement p = Place({Node("a", 8), Node("b", 8), Node("d", 8)}, demand);
  EXPECT_THAT(NodesByRank(p), ElementsAre("d", "a", "b"))
      << "0 and 2 stay, the survivor of rank 3 moves into 1";
}

// P1: on one node all would be closer together, and two would lose what they have in memory.
TEST(Place, WhoWaitsGoesOnWhereItIs_P1) {
  Demand demand = Ranks(3, 4);
  demand.previous = {NodeId("a"), NodeId("a"), NodeId("b"), NodeId("b")};
  const std::vector<NodeView> nodes = {Node("a", 4), Node("b", 4)};
  EXPECT_THAT(NodesByRank(Place(nodes, demand)), ElementsAre("a", "a", "a", "a"));
  demand.waiting = {{NodeId("a"), {1, 0, {}}}, {NodeId("b"), {2, 0, {}}}};
  EXPECT_THAT(NodesByRank(Place(nodes, demand)), ElementsAre("a", "a", "b", "b"));
  demand.max = 3;
  EXPECT_THAT(NodesByRank(Place(nodes, demand)), ElementsAre("a", "b", "b"));
  demand.waiting[NodeId("a")] = {0, 2, {}};
  EXPECT_THAT(NodesByRank(Place(nodes, demand)), ElementsAre("a", "b", "b")) << "members first";
  demand.min = demand.max = 2;
  EXPECT_THAT(NodesByRank(Place(nodes, demand)), ElementsAre("b", "b"));
  demand.waiting[NodeId("b")] = {9, 0, {}};
  demand.min = demand.max = 6;
  EXPECT_THAT(NodesByRank(Place(nodes, demand)), ElementsAre("a", "a", "b", "b", "b", "b"))
      << "as far as there is room";
}

// As many members go on as there is room for where they wait, whatever else there is.
TEST(Place, NoMemberThatHasRoomLosesItsPlace_P1) {
  Rng rng(20261128);
  int cases = 0;
  while (cases < 2000) {
    std::vector<NodeView> nodes;
    Demand demand = Ranks(1, 1 + static_cast<int>(rng.Below(12)));
    int could = 0;
    for (int i = 0; i < 1 + static_cast<int>(rng.Below(6)); ++i) {
      const std::string name(1, static_cast<char>('a' + i));
      const int room = static_cast<int>(rng.Below(6));
      nodes.push_back(Node(name, room));
      if (rng.Below(3) == 0) continue;
      const Waiting waiting{static_cast<int>(rng.Below(4)), static_cast<int>(rng.Below(3)), {}};
      demand.waiting[NodeId(name)] = waiting;
      could += std::min(room, waiting.members);
      for (int rank = 0; rank < waiting.members; ++rank) demand.previous.push_back(NodeId(name));
    }
    const Placement placement = Place(nodes, demand);
    if (!placement.placed) continue;
    ++cases;
    std::map<NodeId, int> given;
    for (const RankSlot& slot : placement.ranks) ++given[slot.node];
    int go_on = 0;
    for (const auto& [node, waiting] : demand.waiting) go_on += std::min(given[node], waiting.members);
    ASSERT_EQ(go_on, std::min(could, demand.max)) << Print(placement);
  }
}

TEST(Place, WhoWaitsKeepsItsGpu_P1) {
  Demand demand = Ranks(1, 4);
  demand.gpus = 1;
  demand.waiting[NodeId("a")] = {2, 0, {3, 1}};
  const std::vector<NodeView> nodes = {Node("a", 4, 4)};
  const auto gpus = [&] {
    std::vector<int> gpus;
    for (const RankSlot& slot : Place(nodes, demand).ranks) gpus.push_back(slot.gpus.at(0));
    return gpus;
  };
  EXPECT_THAT(gpus(), ElementsAre(0, 1, 2, 3)) << "each rank with the number that it had";
  demand.max = 3;
  EXPECT_THAT(gpus(), ElementsAre(0, 1, 3));
  demand.max = 2;
  EXPECT_THAT(gpus(), ElementsAre(1, 3));
  demand.waiting[NodeId("a")].gpus = {3, 7};
  EXPECT_THAT(gpus(), ElementsAre(0, 3)) << "a GPU that is gone";
}

TEST(Place, WhoWaitsKeepsItsNodeWhereNodesAreGivenWhole) {
  Demand demand = Ranks(2, 2);
  demand.ranks_per_node = 2;
  demand.previous = {NodeId("a"), NodeId("a"), NodeId("b"), NodeId("b")};
  demand.waiting = {{NodeId("b"), {1, 0, {}}}};
  EXPECT_THAT(NodesByRank(Place({Node("a", 4), Node("b", 4)}, demand)), ElementsAre("b", "b"));
}

TEST(Place, ReplacementTakesTheLostRanks) {
  Demand demand = Ranks(4, 4);
  demand.previous = {NodeId("a"), NodeId("a"), NodeId("lost"), NodeId("lost")};
  const Placement p = Place({Node("a", 2), Node("0new", 2)}, demand);
  EXPECT_THAT(NodesByRank(p), ElementsAre("a", "a", "0new", "0new"));
}

TEST(Place, LabelsExcludesAndUnusableNodesAreNamed) {
  Demand demand = Ranks(1, 1);
  demand.labels = {{"pool", "spot"}};
  demand.exclude = {"host-b"};
  NodeView a = Node("a", 2), b = Node("b", 2), c = Node("c", 2);
  a.labels = {{"pool", "reserved"}};
  c.labels = {{"pool", "spot"}};
  c.unusable = "suspect: silent for 4s";
  const Placement p = Place({a, b, c}, demand);
  EXPECT_FALSE(p.placed);
  EXPECT_THAT(p.reason, HasSubstr("label pool is reserved, wanted spot"));
  EXPECT_THAT(p.reason, HasSubstr("excluded by where.exclude"));
  EXPECT_THAT(p.reason, HasSubstr("suspect: silent for 4s"));
}

TEST(Place, OversubscribesOnlyWhereAllowedAndSaysSo) {
  Demand demand = Ranks(4, 4);
  EXPECT_FALSE(Place({Node("a", 2)}, demand).placed);
  demand.oversubscribe_cpus = true;
  const Placement p = Place({Node("a", 2)}, demand);
  ASSERT_TRUE(p.placed);
  ASSERT_EQ(p.warnings.size(), 1u);
  EXPECT_THAT(p.warnings[0], HasSubstr("4 ranks need 4 cpus, 2 of 2 are free"));
}

TEST(Place, SharesCpusForWhatAPersonAskedForAndNotForTheMost) {
  Demand demand = Ranks(1, 8);
  demand.oversubscribe_cpus = true;
  EXPECT_EQ(Place({Node("a", 2)}, demand).ranks.size(), 2u);
  demand.asked = demand.max = 3;
  EXPECT_EQ(Place({Node("a", 2)}, demand).ranks.size(), 3u);
  EXPECT_EQ(Place({Node("a", 4)}, demand).warnings.size(), 0u);
  demand.oversubscribe_cpus = false;
  EXPECT_EQ(Place({Node("a", 2)}, demand).ranks.size(), 2u);
}

TEST(Place, GpusAreOneARankWhereThereAreSome) {
  const Placement p = Place({Node("a", 16, 4)}, Ranks(2, 2));
  ASSERT_TRUE(p.placed);
  EXPECT_THAT(p.ranks[1].gpus, ElementsAre(1));
  EXPECT_FALSE(Place({Node("a", 16, 4)}, Ranks(5, 5)).placed);
  Demand demand = Ranks(1, 1);
  demand.gpu_types = {"a100"};
  EXPECT_THAT(Place({Node("a", 16, 4)}, demand).reason, HasSubstr("no GPU of type a100"));
}

TEST(Place, RanksShareAsFewGpusAsTheyCan) {
  Demand demand = Ranks(4, 4);
  demand.gpu_share = 400;
  const Placement p = Place({Node("a", 16, 3)}, demand);
  ASSERT_TRUE(p.placed) << p.reason;
  const auto gpus = [](const Placement& placement) {
    std::vector<int> of_ranks;
    for (const RankSlot& slot : placement.ranks) of_ranks.push_back(slot.gpus.at(0));
    return of_ranks;
  };
  EXPECT_THAT(gpus(p), ElementsAre(0, 0, 1, 1)) << "two of 0.4 on each, and 0.2 is left";
  NodeView node = Node("a", 16, 3);
  node.gpus_free = {0};
  node.gpu_shares = {{1, 500}, {2, 700}, {9, 1}};
  EXPECT_THAT(
      Place({node}, demand).reason,
      HasSubstr(
          "0.4 of a GPU each; there is room for 3: host-a takes 3 (gpus: 3 have room for 3 times 0.4)"));
  demand = Ranks(3, 3);
  demand.gpu_share = 400;
  EXPECT_THAT(gpus(Place({node}, demand)), ElementsAre(0, 0, 1));
  demand = Ranks(1, 1);
  demand.gpu_share = 250;
  EXPECT_THAT(gpus(Place({node}, demand)), ElementsAre(2)) << "the fullest that has room";
  demand.previous = {NodeId("a")};
  demand.previous_gpus = {{1}};
  EXPECT_THAT(gpus(Place({node}, demand)), ElementsAre(1)) << "the one it had";
  EXPECT_TRUE(Emptied({node})[0].gpu_shares.empty());
}

TEST(Place, InstancesOfAGpuAreGpusOfTheirOwn) {
  NodeView node = Node("a", 16, 4);
  node.gpu_models[1] = node.gpu_models[2] = "NVIDIA H100 80GB HBM3 MIG 1g.10gb";
  Demand demand = Ranks(2, 2);
  demand.gpu_types = {"1g.10gb"};
  const Placement p = Place({node}, demand);
  ASSERT_TRUE(p.placed) << p.reason;
  EXPECT_THAT(p.ranks[0].gpus, ElementsAre(1));
  EXPECT_THAT(p.ranks[1].gpus, ElementsAre(2));
  demand = Ranks(1, 1);
  demand.gpus = 2;
  EXPECT_THAT(Place({node}, demand).ranks.at(0).gpus, ElementsAre(0, 3)) << "a process can use one instance";
}

TEST(Place, NodesDemandTakesItsGpusOrOneRankEach) {
  Demand demand = Ranks(2, 2);
  demand.count_nodes = true;
  EXPECT_EQ(Place({Node("a", 16, 4), Node("b", 16, 4)}, demand).ranks.size(), 8u);
  EXPECT_EQ(Place({Node("a", 16), Node("b", 16)}, demand).ranks.size(), 2u);
  demand.all_gpus = true;
  const Placement p = Place({Node("a", 16, 4), Node("b", 16, 4)}, demand);
  ASSERT_EQ(p.ranks.size(), 2u);
  EXPECT_EQ(p.ranks[0].gpus.size(), 4u);
}

TEST(Place, ExplicitCpusAreBoundToFreeThreads) {
  Demand demand = Ranks(2, 2);
  demand.cpus = 2;
  NodeView node = Node("a", 8);
  node.cpus_bound = {0, 1};
  node.cpus_free = 6;
  const Placement p = Place({node}, demand);
  EXPECT_THAT(p.ranks[0].cpus, ElementsAre(2, 3));
  EXPECT_THAT(p.ranks[1].cpus, ElementsAre(4, 5));
}

TEST(Place, ProcessesThatGoOnKeepTheirGpus) {
  Demand demand = Ranks(3, 3);
  demand.gpus = 2;
  const NodeView node = Node("a", 16, 8);
  demand.previous = {NodeId("a"), NodeId("a"), NodeId("a")};
  demand.previous_gpus = {{0, 2}, {1, 3}, {5, 4}};
  demand.waiting[NodeId("a")] = {2, 0, {1, 3, 5, 4}};  // rank 0 is lost
  const Placement p = Place({node}, demand);
  EXPECT_THAT(p.ranks[0].gpus, ElementsAre(0, 2));
  EXPECT_THAT(p.ranks[1].gpus, ElementsAre(1, 3));
  EXPECT_THAT(p.ranks[2].gpus, ElementsAre(5, 4));
  demand.min = demand.max = 2;  // fewer ranks: those that wait go on, with what they have
  const Placement fewer = Place({node}, demand);
  EXPECT_THAT(fewer.ranks[1].gpus, ElementsAre(1, 3));
  EXPECT_THAT(fewer.ranks[0].gpus, ElementsAre(5, 4));
}

TEST(Place, CpusAreOfTheNumaNodeOfTheGpu) {
  Demand demand = Ranks(4, 4);
  demand.cpus = 2;
  NodeView node = Node("a", 8, 4);
  node.cpu_numa = {0, 0, 0, 0, 1, 1, 1, 1};
  node.gpu_numa = {1, 0, 1, 0};
  const Placement p = Place({node}, demand);
  ASSERT_EQ(p.ranks.size(), 4u);
  EXPECT_THAT(p.ranks[0].cpus, ElementsAre(4, 5));
  EXPECT_THAT(p.ranks[1].cpus, ElementsAre(0, 1));
  EXPECT_THAT(p.ranks[2].cpus, ElementsAre(6, 7));
  EXPECT_THAT(p.ranks[3].cpus, ElementsAre(2, 3));
  node.gpu_numa = {1, 1, 1, 1};  // the third finds no more there
  EXPECT_THAT(Place({node}, demand).ranks[2].cpus, ElementsAre(0, 1));
}

TEST(Place, CpusOfARankAreOfOneNumaNodeWhereOneHasThem) {
  Demand demand = Ranks(2, 2);
  demand.cpus = 3;
  NodeView node = Node("a", 8);
  node.cpu_numa = {0, 0, 0, 0, 1, 1, 1, 1};
  const Placement p = Place({node}, demand);
  EXPECT_THAT(p.ranks[0].cpus, ElementsAre(0, 1, 2));
  EXPECT_THAT(p.ranks[1].cpus, ElementsAre(4, 5, 6)) << "and not 3, 4, 5";
  demand = Ranks(3, 3);
  demand.cpus = 2;
  node.cpus_bound = {0};
  node.cpus_free = 7;
  EXPECT_THAT(Place({node}, demand).ranks[0].cpus, ElementsAre(1, 2))
      << "the node with the fewest that are enough";
}

TEST(Place, PrintsForPeople) {
  EXPECT_EQ(Print(Place({Node("a", 2)}, Ranks(2, 2))),
            "placed: 2 ranks packed: 2 on host-a\n  host-a (a)\n    rank 0\n    rank 1\n");
}

// It goes into every document of the job.
TEST(Place, TheReasonOfAThousandNodesIsShort) {
  std::vector<NodeView> nodes;
  for (int i = 0; i < 1000; ++i) nodes.push_back(Node(absl::StrFormat("n%03d", i), 2));
  const Placement placed = Place(nodes, Ranks(2000, 2000));
  ASSERT_TRUE(placed.placed);
  EXPECT_THAT(placed.reason, ::testing::StartsWith("2000 ranks packed: 2 on host-n000, "));
  EXPECT_THAT(placed.reason, ::testing::EndsWith(", 2 on host-n007, 992 more nodes"));
  const Placement refused = Place(nodes, Ranks(2001, 2001));
  ASSERT_FALSE(refused.placed);
  EXPECT_THAT(refused.reason, ::testing::EndsWith("; 992 more nodes"));
  const std::string text = Print(placed);
  EXPECT_THAT(text, HasSubstr("  host-n999 (n999)\n    rank 1998\n    rank 1999\n"));
}

TEST(Place, EmptyClusterSaysSo) {
  EXPECT_EQ(Place({}, Ranks(2, 2)).reason, "needs 2 ranks; no node has joined");
}

TEST(Place, Rank0HasItsHostOrTheJobWaits) {
  const std::vector<NodeView> nodes = {Node("a", 4), Node("b", 2), Node("c", 0)};
  Demand demand = Ranks(3, 3);
  demand.rank0 = {"b"};
  const Placement placed = Place(nodes, demand);
  ASSERT_TRUE(placed.placed) << placed.reason;
  EXPECT_EQ(placed.ranks[0].node.value, "b");
  demand.rank0 = {"c"};
  EXPECT_THAT(Place(nodes, demand).reason,
              HasSubstr("rank 0 goes on c by where.rank0, and that takes none: cpus: 0 of 0"));
  // Two agents of one host, and the one that had rank 1 is left.
  std::vector<NodeView> two = {Node("y", 1), Node("z", 4)};
  two[0].hostname = "h";
  Demand again = Ranks(3, 3);
  again.rank0 = {"h"};
  again.previous = {NodeId("x"), NodeId("y"), NodeId("z")};
  EXPECT_EQ(Place(two, again).ranks.at(0).node.value, "y");
  std::vector<NodeView> thief = {Node("0123456789abcdef", 1), Node("b", 1)};
  thief[1].hostname = "0123456789abcdef";
  Demand by_id = Ranks(1, 1);
  by_id.rank0 = {"0123456789abcdef"};
  EXPECT_EQ(Place(thief, by_id).ranks.at(0).node.value, "0123456789abcdef");
  demand.rank0 = {"elsewhere"};
  EXPECT_THAT(Place(nodes, demand).reason, HasSubstr("no node that is up is called so"));
}

TEST(Place, Rank0MayHaveOneOfSeveralHosts) {
  std::vector<NodeView> nodes = {Node("a", 4), Node("b", 2), Node("c", 1)};
  Demand demand = Ranks(5, 5);
  demand.rank0 = {"b", "c"};
  const Placement placed = Place(nodes, demand);
  ASSERT_TRUE(placed.placed) << placed.reason;
  EXPECT_THAT(NodesByRank(placed), ElementsAre("b", "b", "a", "a", "a")) << "the larger of the two";
  demand.previous = {NodeId("c"), NodeId("a")};
  EXPECT_EQ(Place(nodes, demand).ranks.at(0).node.value, "c") << "where it was";
  nodes[1].unusable = nodes[2].unusable = "drained";
  demand = Ranks(1, 1);
  demand.rank0 = {"b", "c"};
  const Placement waits = Place(nodes, demand);
  EXPECT_EQ(waits.reason,
            "rank 0 goes on b,c by where.rank0, and host-b takes none: drained; host-c takes none: drained");
  EXPECT_THAT(waits.named, ElementsAre(NodeId("b"), NodeId("c")));
  EXPECT_EQ(waits.remedy, "room on b,c, or another where.rank0");
}

TEST(Place, AHostWithoutItsDomainIsMeantWhereOnlyOneIsCalledSo) {
  std::vector<NodeView> nodes = {Node("a", 1), Node("b", 1), Node("c", 1)};
  nodes[0].hostname = "tux0.lab.example";
  nodes[1].hostname = "tux1.lab.example";
  nodes[2].hostname = "tux1.far.example";
  Demand demand = Ranks(1, 1);
  demand.rank0 = {"tux0"};
  EXPECT_THAT(NodesByRank(Place(nodes, demand)), ElementsAre("a"));
  demand.rank0 = {"tux1"};
  const Placement waits = Place(nodes, demand);
  EXPECT_THAT(waits.reason,
              HasSubstr("2 hosts are called so without their domain: tux1.far.example, tux1.lab.example"));
  EXPECT_EQ(waits.remedy, "the whole name of one of them, or another where.rank0");
  demand.rank0 = {"tux1.lab.example"};
  EXPECT_THAT(NodesByRank(Place(nodes, demand)), ElementsAre("b"));
  nodes[1].hostname = "tux1";
  demand.rank0 = {"tux1"};
  EXPECT_THAT(NodesByRank(Place(nodes, demand)), ElementsAre("b")) << "an exact name wins";
  // What looks like an id is one, also without a domain.
  nodes[2].hostname = "0123456789abcdef.far.example";
  demand.rank0 = {"0123456789abcdef"};
  EXPECT_FALSE(Place(nodes, demand).placed);
  nodes[0].id = NodeId("0123456789abcdef");
  EXPECT_THAT(NodesByRank(Place(nodes, demand)), ElementsAre("0123456789abcdef"));
}

TEST(Place, OnlyOnTheHostsThatAreListedAndOnNoneThatIsExcluded) {
  std::vector<NodeView> nodes = {Node("a", 1), Node("b", 1), Node("c", 1), Node("d", 8)};
  nodes[2].hostname = "tux2.lab.example";
  Demand demand = Ranks(2, 3);
  demand.hosts = {"host-a", "b", "tux2"};  // a hostname, an id, and one without its domain
  EXPECT_THAT(NodesByRank(Place(nodes, demand)), ElementsAre("a", "b", "c"));
  demand.exclude = {"tux2"};
  EXPECT_THAT(NodesByRank(Place(nodes, demand)), ElementsAre("a", "b"));
  demand.exclude = {"tux2", "host-b"};
  const Placement waits = Place(nodes, demand);
  EXPECT_FALSE(waits.placed);
  EXPECT_EQ(waits.verdicts[1].limit, "excluded by where.exclude");
  EXPECT_EQ(waits.verdicts[3].limit, "not in where.hosts");
  EXPECT_THAT(waits.verdicts[3].remedy, HasSubstr("where.hosts with it"));
}

Demand OnHosts(const std::vector<std::pair<std::string, int>>& hosts) {
  Demand demand = Ranks(static_cast<int>(hosts.size()), static_cast<int>(hosts.size()));
  for (const auto& [host, slot] : hosts) {
    demand.rank_hosts.push_back({static_cast<int>(demand.host_names.size()), slot});
    demand.host_names.push_back(host);
  }
  return demand;
}

TEST(PlaceByRank, EachRankHasItsHostAndItsGpus) {
  std::vector<NodeView> nodes = {Node("a", 8, 4), Node("b", 8, 4), Node("c", 8, 4)};
  nodes[2].hostname = "tux.lab.example";
  Demand demand = OnHosts({{"host-b", 3}, {"a", -1}, {"tux", 0}, {"host-b", 1}, {"host-b", -1}});
  const Placement p = Place(nodes, demand);
  ASSERT_TRUE(p.placed) << p.reason;
  EXPECT_THAT(NodesByRank(p), ElementsAre("b", "a", "c", "b", "b"));
  EXPECT_THAT(p.nodes, ElementsAre(NodeId("b"), NodeId("a"), NodeId("c")));
  EXPECT_THAT(p.ranks[0].gpus, ElementsAre(3));
  EXPECT_THAT(p.ranks[3].gpus, ElementsAre(1));
  EXPECT_THAT(p.ranks[4].gpus, ElementsAre(0)) << "the first that is left";
  EXPECT_EQ(p.ranks[3].local_rank, 1);
  EXPECT_EQ(p.reason, "5 ranks by where.ranks: 1 on host-a, 3 on host-b, 1 on tux.lab.example");
  demand.gpus = 2;
  demand.rank_hosts[0].slot = 1;
  demand.rank_hosts.resize(3);
  demand.min = demand.max = 3;
  EXPECT_THAT(Place(nodes, demand).ranks.at(0).gpus, ElementsAre(2, 3)) << "a slot is of two GPUs";
}

TEST(PlaceByRank, WhatIsNotThereIsWaitedForAndNamed) {
  std::vector<NodeView> nodes = {Node("a", 2, 4), Node("b", 8, 2), Node("c", 8, 2)};
  nodes[2].gpus_free = {1};
  const auto why = [&](const Demand& demand) { return Place(nodes, demand).reason; };
  EXPECT_EQ(why(OnHosts({{"host-b", -1}, {"gone", -1}})),
            "rank 1 goes on gone by where.ranks, and no node that is up is called so");
  Demand many = OnHosts({{"host-a", -1}, {"host-b", -1}});
  many.rank_hosts = {{0, -1}, {0, -1}, {0, -1}, {1, -1}};
  many.min = many.max = 4;
  const Placement waits = Place(nodes, many);
  EXPECT_EQ(waits.reason, "ranks 0-2 go on host-a by where.ranks, and that takes 2 (cpus: 2 of 2 free)");
  EXPECT_THAT(waits.named, ElementsAre(NodeId("a")));
  EXPECT_EQ(waits.remedy, "room on host-a, or another where.ranks");
  EXPECT_EQ(why(OnHosts({{"host-b", 2}})), "rank 0 goes on host-b slot 2 by where.ranks, and it has 2 GPUs");
  EXPECT_EQ(
      why(OnHosts({{"host-c", 0}})),
      "rank 0 goes on host-c slot 0 by where.ranks, and GPU 0 there is taken, or of another type than the "
      "job wants");
  Demand excluded = OnHosts({{"host-a", -1}, {"gone", -1}});
  excluded.exclude = {"host-a"};
  EXPECT_EQ(
      why(excluded),
      "rank 0 goes on host-a by where.ranks, and that takes 0 (excluded by where.exclude); 1 other host does "
      "not take its ranks either");
}

TEST(PlaceByRank, AfterARestartARankHasItsGpusAgain) {
  Demand demand = OnHosts({{"host-a", -1}, {"host-a", -1}});
  demand.previous = {NodeId("a"), NodeId("a")};
  demand.previous_gpus = {{3}, {0}};
  const Placement p = Place({Node("a", 8, 4)}, demand);
  EXPECT_THAT(p.ranks.at(0).gpus, ElementsAre(3));
  EXPECT_THAT(p.ranks.at(1).gpus, ElementsAre(0));
}

// Two agents of one machine have the same hostname.
TEST(PlaceByRank, AHostnameOfTwoNodesIsEither) {
  std::vector<NodeView> nodes = {Node("a", 1), Node("b", 2)};
  nodes[0].hostname = nodes[1].hostname = "h";
  Demand demand = OnHosts({{"h", -1}, {"h", -1}, {"h", -1}});
  EXPECT_THAT(NodesByRank(Place(nodes, demand)), ElementsAre("a", "b", "b"));
  demand.previous = {NodeId("b"), NodeId("a"), NodeId("b")};
  EXPECT_THAT(NodesByRank(Place(nodes, demand)), ElementsAre("b", "a", "b"));
}

}  // namespace
}  // namespace gtrain::plan
