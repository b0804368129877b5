#include "job/plan/by_topology.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "base/rng.h"
#include "topology/import.h"
#include "topology/place/cost.h"
#include "topology/place/fabric.h"

namespace gtrain::plan {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

NodeView Node(const std::string& name, int cpus, int gpus = 0) {
  NodeView node;
  node.id = NodeId(name);
  node.hostname = name;
  node.cpus = node.cpus_free = cpus;
  node.memory_bytes = node.memory_free_bytes = uint64_t{64} << 30;
  for (int g = 0; g < gpus; ++g) {
    node.gpu_models.push_back("H100");
    node.gpus_free.push_back(g);
  }
  return node;
}

Demand Ranks(int count) {
  Demand demand;
  demand.min = demand.max = count;
  return demand;
}

std::vector<spec::MeshAxis> MeshAxes(int dp, int tp) { return {{"dp", dp}, {"tp", tp}}; }

topology::Topology Racks(const std::string& rows) {
  return topology::ImportPaths(rows, "racks", topology::ShapeOfOneSlot()).value();
}

// Hosts whose names alternate between two racks.
topology::Topology Alternating() { return Racks("a /r1\nb /r2\nc /r1\nd /r2\n"); }

Placement Both(const std::vector<NodeView>& nodes, const Demand& demand, const topology::Topology& topology,
               const std::vector<spec::MeshAxis>& axes, const std::vector<RankSlot>& before = {}) {
  return ByTopology(nodes, demand, Place(nodes, demand), KnownTopology(topology), axes, before);
}

std::vector<NodeView> Nodes(const std::vector<std::string>& names) {
  std::vector<NodeView> nodes;
  for (const std::string& name : names) nodes.push_back(Node(name, 1));
  return nodes;
}

TEST(CollectiveOrder, DomainsFollowEachOtherAsTheirFirstNodesDo) {
  const KnownTopology known(Racks("a /z1/r1\nb /z1/r2\nc /z2/r3\nd /z1/r1\ne /z2/r4\nf /z2/r3\n"));
  EXPECT_THAT(CollectiveOrder(known, Nodes({"a", "d", "b", "c", "f", "e"})), IsEmpty());
  EXPECT_THAT(CollectiveOrder(known, Nodes({"c", "a", "e", "b", "f", "d"})), ElementsAre(0, 3, 2, 5, 1, 4));
  EXPECT_THAT(CollectiveOrder(known, Nodes({"b.example.org", "stranger", "a"})), ElementsAre(0, 2, 1));
  EXPECT_THAT(CollectiveOrder(known, {}), IsEmpty());
  EXPECT_THAT(CollectiveOrder(KnownTopology(), Nodes({"a", "b"})), IsEmpty());
}

TEST(CollectiveOrder, LabelsSayItToo) {
  std::vector<NodeView> nodes = Nodes({"a", "b", "c"});
  for (NodeView& node : nodes) node.labels["rack"] = node.hostname == "b" ? "2" : "1";
  EXPECT_THAT(CollectiveOrder(KnownTopology(TopologyOfLabels(nodes)), nodes), ElementsAre(0, 2, 1));
}

TEST(ByTopologyTest, Rank0GoesWhereTheJobSays) {
  const std::vector<NodeView> nodes = Nodes({"a", "b", "c", "d", "e", "f"});
  for (const std::string host : {"a", "b", "c", "d"}) {
    Demand demand = Ranks(4);
    demand.rank0 = {host};
    const Placement packed = Place(nodes, demand);
    ASSERT_TRUE(packed.placed) << packed.reason;
    EXPECT_EQ(packed.ranks[0].node.value, host);
    const Placement placement =
        ByTopology(nodes, demand, packed, KnownTopology(Alternating()), MeshAxes(2, 2), {});
    EXPECT_EQ(placement.ranks[0].node.value, host);
    const auto rack = [&](int rank) {
      const std::string node = placement.ranks[rank].node.value;
      return node == "a" || node == "c";
    };
    EXPECT_EQ(rack(0), rack(1)) << host << ": the pairs share a rack all the same";
    EXPECT_EQ(rack(2), rack(3)) << host;
  }
}

TEST(ByTopologyTest, ARankfileIsLeftAsItIs) {
  const std::vector<NodeView> nodes = Nodes({"a", "b", "c", "d"});
  Demand demand = Ranks(4);
  demand.host_names = {"a", "b", "c", "d"};
  demand.rank_hosts = {{0, -1}, {1, -1}, {2, -1}, {3, -1}};  // each pair in two racks
  const Placement placement =
      ByTopology(nodes, demand, Place(nodes, demand), KnownTopology(Alternating()), MeshAxes(2, 2), {});
  ASSERT_TRUE(placement.placed);
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(placement.ranks[rank].node.value, demand.host_names[rank]);
}

// With a part of a GPU a slot has none of its own, and the nodes are chosen all the same.
TEST(ByTopologyTest, RanksThatShareGpusAreNearEachOther) {
  std::vector<NodeView> nodes = Nodes({"a", "b", "c", "d"});
  for (NodeView& node : nodes) {
    node.cpus = node.cpus_free = 8;
    node.gpu_models = {"x", "x"};
    node.gpus_free = {0, 1};
  }
  Demand demand = Ranks(8);
  demand.gpu_share = 500;
  const Placement placement =
      ByTopology(nodes, demand, Place(nodes, demand), KnownTopology(Alternating()), MeshAxes(4, 2), {});
  ASSERT_TRUE(placement.placed) << placement.reason;
  std::map<std::string, std::map<int, int>> ranks;
  for (const RankSlot& slot : placement.ranks) ++ranks[slot.node.value][slot.gpus.at(0)];
  ASSERT_EQ(ranks.size(), 2u) << placement.reason;
  for (const auto& [node, gpus] : ranks) EXPECT_EQ(gpus, (std::map<int, int>{{0, 2}, {1, 2}})) << node;
  EXPECT_EQ(ranks.contains("a"), ranks.contains("c")) << "one rack";
}

// A grant looks at its own machines alone, and predicts what it would in the whole.
TEST(KnownTopology, APartCostsWhatItDoesInTheWhole) {
  Rng rng(5);
  for (int round = 0; round < 200; ++round) {
    std::string rows;
    int hosts = 0;
    for (uint64_t zone = 0; zone < 1 + rng.Below(3); ++zone) {
      for (uint64_t rack = 0; rack < 1 + rng.Below(4); ++rack) {
        for (uint64_t host = 0; host < 1 + rng.Below(5); ++host)
          absl::StrAppend(&rows, "h", hosts++, " /z", zone, "/r", rack, "\n");
      }
    }
    const KnownTopology known(Racks(rows));
    std::vector<int> machines;
    for (int m = 0; m < hosts; ++m) {
      if (rng.Chance(0.5)) machines.push_back(m);
    }
    if (machines.size() < 2) continue;
    const topology::Topology part_topology = known.Part(machines);
    const topology::Fabric whole = topology::Compile(known.topology()).value();
    const topology::Fabric part = topology::Compile(part_topology).value();
    std::vector<int32_t> in_whole, in_part;
    for (size_t i = 0; i < machines.size(); ++i) {
      EXPECT_EQ(part_topology.machines[i].name, known.topology().machines[machines[i]].name);
      in_whole.push_back(whole.slots_of_machine[machines[i]].first);
      in_part.push_back(part.slots_of_machine[i].first);
    }
    const topology::Mesh mesh = MeshOf({}, std::ssize(machines));
    EXPECT_NEAR(Evaluate(part, mesh, in_part).seconds, Evaluate(whole, mesh, in_whole).seconds,
                1e-5 + 1e-3 * Evaluate(whole, mesh, in_whole).seconds)
        << rows;
  }
}

// The nodes beside it, not those that packing finds first.
TEST(ByTopologyTest, NodesNearTheOneForRank0AreChosen) {
  const std::vector<NodeView> nodes = Nodes({"a", "b", "c", "d"});
  Demand demand = Ranks(2);
  demand.rank0 = {"d"};
  const Placement placement = Both(nodes, demand, Alternating(), MeshAxes(1, 2));
  ASSERT_EQ(placement.ranks.size(), 2u);
  EXPECT_EQ(placement.ranks[0].node.value, "d");
  EXPECT_EQ(placement.ranks[1].node.value, "b");
}

// Two uplinks of a switch are together what was assumed for it, and a machine on the core changes no level.
TEST(KnownTopology, SeveralUplinksAndAMachineOnTheCore) {
  topology::Topology topology = Racks("a /z/r1\nb /z/r1\nc /z/r2\nd /z/r2\n");
  topology.links.push_back(topology.links.back());
  for (const topology::Link& link : topology.links) {
    if (link.from.is_switch && link.to.is_switch) topology.links.back() = link;
  }
  topology.machines.push_back({"login", 0, {}, {}, ""});
  topology.links.push_back({{false, 4, -1}, {true, 0, -1}, 0, 0});
  const KnownTopology known(topology);
  const topology::Fabric file = topology::Compile(topology).value();
  const topology::Fabric whole = topology::Compile(known.topology()).value();
  const topology::Fabric part = topology::Compile(known.Part({0, 2})).value();
  const topology::Mesh mesh = MeshOf({}, 2);
  const double seconds =
      Evaluate(file, mesh, {file.slots_of_machine[0].first, file.slots_of_machine[2].first}).seconds;
  EXPECT_NEAR(
      Evaluate(whole, mesh, {whole.slots_of_machine[0].first, whole.slots_of_machine[2].first}).seconds,
      seconds, 1e-3 * seconds);
  EXPECT_NEAR(Evaluate(part, mesh, {part.slots_of_machine[0].first, part.slots_of_machine[1].first}).seconds,
              seconds, 1e-3 * seconds);
}

TEST(KnownTopology, AddressesAndNamesOfSeveralMachinesHaveNoShortForm) {
  const KnownTopology known(Racks("10.0.0.1 /r1\nn1.a /r1\nn1.c /r2\nm.x /r2\n"));
  const auto machine_of = [&](const std::string& host) { return known.MachineOf(Nodes({host})[0]); };
  EXPECT_EQ(machine_of("10.9.9.9"), -1);
  EXPECT_EQ(machine_of("n1.b"), -1);
  EXPECT_EQ(machine_of("n1.c"), 2);
  EXPECT_EQ(machine_of("m"), 3);
  EXPECT_EQ(machine_of("m.y"), 3);
}

TEST(MeshOf, WhatTheJobSaysOfTraffic) {
  const topology::Mesh mesh = MeshOf(MeshAxes(2, 2), 4, {{"tp", 3'000'000'000}});
  EXPECT_DOUBLE_EQ(mesh.axes[1].gb, 3);
  EXPECT_DOUBLE_EQ(mesh.axes[0].gb, topology::AxisNamed("dp", 2).gb);
  EXPECT_DOUBLE_EQ(MeshOf({}, 4, {{"dp", 5}}).axes[0].gb, 5e-9);
}

// Traffic decides which axis stays inside of a rack.
TEST(ByTopologyTest, TrafficOfTheJobCountsMoreThanWhatIsAssumed) {
  const std::vector<NodeView> nodes = Nodes({"a", "b", "c", "d"});
  const Placement packed = Place(nodes, Ranks(4));
  const auto racks = [&](const Traffic& traffic) {
    const Placement placement =
        ByTopology(nodes, Ranks(4), packed, KnownTopology(Alternating()), MeshAxes(2, 2), {}, traffic);
    std::string text;
    for (const RankSlot& slot : placement.ranks)
      text += slot.node.value == "a" || slot.node.value == "c" ? '1' : '2';
    return text;
  };
  const std::string assumed = racks({}), said = racks({{"dp", uint64_t{1} << 40}, {"tp", 1}});
  EXPECT_TRUE(assumed == "1122" || assumed == "2211") << assumed;
  EXPECT_TRUE(said == "1212" || said == "2121") << said;
}

std::vector<std::string> NodesOf(const Placement& placement) {
  std::vector<std::string> nodes;
  for (const RankSlot& slot : placement.ranks) nodes.push_back(slot.node.value);
  return nodes;
}

TEST(ByTopologyTest, TensorParallelRanksShareARack) {
  const std::vector<NodeView> nodes = {Node("a", 1), Node("b", 1), Node("c", 1), Node("d", 1)};
  const Placement placement = Both(nodes, Ranks(4), Alternating(), MeshAxes(2, 2));
  ASSERT_TRUE(placement.placed);
  const std::vector<std::string> on = NodesOf(placement);
  const std::set<std::string> first = {on[0], on[1]}, second = {on[2], on[3]};
  const std::set<std::string> r1 = {"a", "c"}, r2 = {"b", "d"};
  EXPECT_TRUE((first == r1 && second == r2) || (first == r2 && second == r1))
      << on[0] << on[1] << on[2] << on[3];
  EXPECT_THAT(placement.reason, HasSubstr("4 ranks of mesh {dp: 2, tp: 2} by the topology: 1 on "));
  EXPECT_THAT(placement.reason, HasSubstr(", packed "));
  EXPECT_THAT(Both({Node("a", 4), Node("b", 1)}, Ranks(2), Alternating(), MeshAxes(1, 2)).reason,
              HasSubstr("2 ranks packed: 2 on a"))
      << "no link is involved";
  EXPECT_THAT(placement.warnings, IsEmpty());
  for (const RankSlot& slot : placement.ranks) EXPECT_EQ(slot.local_rank, 0);
  EXPECT_EQ(placement.nodes.size(), 4u);
  EXPECT_EQ(placement.nodes[0], placement.ranks[0].node) << "GROUP_RANK follows the ranks";
}

TEST(ByTopologyTest, NodesOfOneRackAreChosen) {
  std::vector<NodeView> nodes = {Node("a", 1), Node("b", 1), Node("c", 1),
                                 Node("d", 1), Node("e", 1), Node("f", 1)};
  const topology::Topology topology = Racks("a /r1\nb /r2\nc /r1\nd /r2\ne /r1\nf /r2\n");
  nodes[0].cpus_free = 0;  // so the first rack has two places
  EXPECT_THAT(NodesOf(Both(nodes, Ranks(3), topology, {})), UnorderedElementsAre("b", "d", "f"));
  EXPECT_THAT(NodesOf(Both(nodes, Ranks(2), topology, {})), UnorderedElementsAre("c", "e"))
      << "the rack that has just enough";
}

TEST(ByTopologyTest, WholeNodesAreChosenByRackToo) {
  std::vector<NodeView> nodes = {Node("a", 4), Node("b", 4), Node("c", 4),
                                 Node("d", 4), Node("e", 4), Node("f", 4)};
  const topology::Topology topology = Racks("a /r1\nb /r2\nc /r2\nd /r1\ne /r2\nf /r1\n");
  Demand demand = Ranks(6);
  demand.ranks_per_node = 2;
  const Placement placement = Both(nodes, demand, topology, MeshAxes(3, 2));
  std::map<std::string, int> count;
  for (const std::string& node : NodesOf(placement)) ++count[node];
  EXPECT_EQ(count.size(), 3u);
  for (const auto& [node, ranks] : count) EXPECT_EQ(ranks, 2) << node;
  EXPECT_EQ(count.contains("a"), count.contains("d"));
  EXPECT_EQ(count.contains("a"), count.contains("f"));
  EXPECT_EQ(placement.ranks[0].node, placement.ranks[1].node) << "a tp pair is on one machine";
  Demand by_nodes = Ranks(3);
  by_nodes.count_nodes = true;
  const std::vector<std::string> on = NodesOf(Both(nodes, by_nodes, topology, {}));
  const std::set<std::string> set(on.begin(), on.end());
  EXPECT_TRUE(set == (std::set<std::string>{"a", "d", "f"}) || set == (std::set<std::string>{"b", "c", "e"}));
}

topology::Topology PairsOfNvlink() {
  topology::Topology topology;
  topology::Shape shape;
  shape.name = "pairs";
  shape.gpus.resize(4);
  shape.nvlink = {{{0, 2}, 200, 1}, {{1, 3}, 200, 1}};
  topology.shapes = {shape};
  topology.machines = {{"a", 0, {}, {}, ""}};
  return topology;
}

TEST(ByTopologyTest, RanksOfAPairShareNvlink) {
  const Placement placement = Both({Node("a", 16, 4)}, Ranks(4), PairsOfNvlink(), MeshAxes(2, 2));
  ASSERT_EQ(placement.ranks.size(), 4u);
  std::set<std::set<int>> pairs;
  for (const int first : {0, 2}) {
    pairs.insert({placement.ranks[first].gpus.at(0), placement.ranks[first + 1].gpus.at(0)});
  }
  EXPECT_EQ(pairs, (std::set<std::set<int>>{{0, 2}, {1, 3}}));
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(placement.ranks[rank].local_rank, rank);
}

TEST(ByTopologyTest, WhatAnAgentFoundCountsMoreThanTheFile) {
  NodeView node = Node("a", 16, 3);  // the file says four GPUs
  const Placement placement = Both({node}, Ranks(3), PairsOfNvlink(), {});
  std::set<int> gpus;
  for (const RankSlot& slot : placement.ranks) gpus.insert(slot.gpus.at(0));
  EXPECT_EQ(gpus, (std::set<int>{0, 1, 2}));
  node = Node("a", 16, 4);
  node.gpus_free = {1, 3};
  const Placement rest = Both({node}, Ranks(2), PairsOfNvlink(), {});
  EXPECT_EQ(rest.ranks[0].gpus.at(0) + rest.ranks[1].gpus.at(0), 4);
  node.gpus_free = {0, 3};  // a rank with two GPUs has them in different islands, or none
  Demand wide = Ranks(1);
  wide.gpus = 2;
  EXPECT_THAT(Both({node}, wide, PairsOfNvlink(), {}).ranks.at(0).gpus, ElementsAre(0, 3));
}

TEST(ByTopologyTest, ARankMayHaveMoreGpusThanAnIsland) {
  topology::Topology topology = Racks("a /r1\nb /r2\nc /r1\n");
  topology.shapes[0] = PairsOfNvlink().shapes[0];
  Demand demand = Ranks(2);
  demand.count_nodes = true;
  demand.all_gpus = true;
  demand.ranks_per_node = 1;
  const Placement placement = Both({Node("a", 8, 4), Node("b", 8, 4), Node("c", 8, 4)}, demand, topology, {});
  EXPECT_THAT(NodesOf(placement), UnorderedElementsAre("a", "c"));
  for (const RankSlot& slot : placement.ranks) EXPECT_THAT(slot.gpus, UnorderedElementsAre(0, 1, 2, 3));
}

TEST(ByTopologyTest, OnlyRanksOfALostMachineMove) {
  std::vector<NodeView> nodes = {Node("a", 4, 2), Node("b", 4, 2), Node("c", 4, 2), Node("d", 4, 2),
                                 Node("e", 4, 2)};
  const topology::Topology topology = Racks("a /r1\nb /r1\nc /r1\nd /r2\ne /r2\n");
  const std::vector<spec::MeshAxis> axes = MeshAxes(2, 2);
  // By name the spare after b would be the far d; c is free and near.
  std::vector<RankSlot> before = {{0, 0, NodeId("a"), {}, {1}},
                                  {1, 1, NodeId("a"), {}, {0}},
                                  {2, 0, NodeId("b"), {}, {0}},
                                  {3, 1, NodeId("b"), {}, {1}}};
  Demand demand = Ranks(4);
  for (const RankSlot& slot : before) demand.previous.push_back(slot.node);
  nodes[1].unusable = "lost";
  nodes.erase(nodes.begin() + 2);
  nodes.push_back(Node("c", 4, 2));
  nodes.back().id = NodeId("z");  // by its id it comes last
  nodes.back().hostname = "c";
  const Placement placement = Both(nodes, demand, topology, axes, before);
  EXPECT_THAT(NodesOf(placement), ElementsAre("a", "a", "z", "z"));
  EXPECT_THAT(placement.ranks[0].gpus, ElementsAre(1)) << "who stays keeps its GPU";
  EXPECT_THAT(placement.ranks[1].gpus, ElementsAre(0));
  EXPECT_THAT(placement.reason, HasSubstr("2 stay where they were"));
}

TEST(ByTopologyTest, NamesWithAndWithoutTheDomainAndStrangers) {
  std::vector<NodeView> nodes = {Node("a", 1), Node("b", 1), Node("c", 1), Node("x", 1)};
  nodes[0].hostname = "a.cluster.example";
  const Placement placement = Both(nodes, Ranks(4), Racks("a /r1\nb /r1\nc /r1\n"), {});
  ASSERT_TRUE(placement.placed);
  EXPECT_THAT(placement.warnings,
              ElementsAre(HasSubstr("the topology does not have x: it counts as far from everything; ")));
  EXPECT_THAT(NodesOf(Both(nodes, Ranks(3), Racks("a /r1\nb /r1\nc /r1\n"), {})),
              UnorderedElementsAre("a", "b", "c"));
  const Placement packed = Place(nodes, Ranks(4));
  const Placement none = ByTopology(nodes, Ranks(4), packed, KnownTopology(Racks("q /r1\n")), {}, {});
  EXPECT_EQ(none.reason, packed.reason);
  EXPECT_THAT(none.warnings, ElementsAre(HasSubstr("ranks are packed; correct the names in the file")));
}

TEST(ByTopologyTest, ProcessesThatGoOnKeepTheirPlaces) {
  const std::vector<NodeView> nodes = {Node("a", 1), Node("b", 1), Node("c", 1), Node("d", 1)};
  Demand demand = Ranks(4);
  for (const char* name : {"a", "b", "c", "d"}) {
    demand.previous.emplace_back(name);
    demand.waiting[NodeId(name)].members = 1;
  }
  const Placement packed = Place(nodes, demand);
  EXPECT_EQ(ByTopology(nodes, demand, packed, KnownTopology(Alternating()), MeshAxes(2, 2), {}).ranks,
            packed.ranks);
}

TEST(ByTopologyTest, WhoComesUpBesideThoseThatGoOnIsNear) {
  // The ranks were on a, c (rack 1), b, d (rack 2); d is lost. By its id the free a2, of rack 1, would come
  // first.
  std::vector<NodeView> nodes = {Node("a", 8, 2), Node("a2", 8, 2), Node("b", 8, 2), Node("c", 8, 2),
                                 Node("e", 8, 2)};
  const topology::Topology topology = Racks("a /r1\na2 /r1\nb /r2\nc /r1\nd /r2\ne /r2\n");
  Demand demand = Ranks(8);
  for (const char* name : {"a", "a", "c", "c", "b", "b", "d", "d"}) demand.previous.emplace_back(name);
  for (const char* name : {"a", "b", "c"}) demand.waiting[NodeId(name)] = {2, 0, {1, 0}};
  const Placement packed = Place(nodes, demand);
  ASSERT_THAT(NodesOf(packed), ElementsAre("a", "a", "c", "c", "b", "b", "a2", "a2"));
  const Placement placement = ByTopology(nodes, demand, packed, KnownTopology(topology), MeshAxes(2, 4), {});
  EXPECT_THAT(NodesOf(placement), ElementsAre("a", "a", "c", "c", "b", "b", "e", "e"));
  for (int rank = 0; rank < 6; ++rank) EXPECT_EQ(placement.ranks[rank].gpus, packed.ranks[rank].gpus) << rank;
  demand.ranks_per_node = 2;  // whole nodes likewise
  EXPECT_THAT(
      NodesOf(ByTopology(nodes, demand, Place(nodes, demand), KnownTopology(topology), MeshAxes(2, 4), {})),
      ElementsAre("a", "a", "c", "c", "b", "b", "e", "e"));
}

TEST(ByTopologyTest, SparesAreNearAndLast) {
  const std::vector<NodeView> nodes = {Node("a", 1), Node("b", 1), Node("c", 1), Node("d", 1), Node("e", 1)};
  Demand demand = Ranks(3);
  demand.spares = 2;
  demand.max = 5;
  demand.asked = 5;
  const Placement placement = Both(nodes, demand, Racks("a /r1\nb /r2\nc /r1\nd /r2\ne /r1\n"), {});
  const std::vector<std::string> on = NodesOf(placement);
  ASSERT_EQ(on.size(), 5u);
  EXPECT_THAT(std::vector<std::string>(on.begin(), on.begin() + 3), UnorderedElementsAre("a", "c", "e"));
}

TEST(ByTopologyTest, LabelsAreATopology) {
  std::vector<NodeView> nodes = {Node("a", 1), Node("b", 1), Node("c", 1), Node("d", 1)};
  EXPECT_THAT(TopologyOfLabels(nodes).machines, IsEmpty());
  for (const int i : {0, 2}) nodes[i].labels["fabric"] = "/zone/rack-1";
  for (const int i : {1, 3}) nodes[i].labels["fabric"] = "/zone/rack-2";
  nodes.push_back(Node("e", 1));
  nodes.back().labels["fabric"] = "no path # at all";
  nodes.push_back(Node("f", 1));
  nodes.back().hostname = "x[0-99999],y";  // an agent says what it likes
  nodes.back().labels["fabric"] = "/zone/rack-3";
  const topology::Topology topology = TopologyOfLabels(nodes);
  ASSERT_EQ(topology.machines.size(), 5u);
  EXPECT_EQ(topology.machines[0].name, "a");
  EXPECT_EQ(topology.machines[4].name, "f") << "by its id";
  EXPECT_THAT(NodesOf(Both(nodes, Ranks(2), topology, {})),
              ::testing::AnyOf(UnorderedElementsAre("a", "c"), UnorderedElementsAre("b", "d")));
}

TEST(ByTopologyTest, ZonesAndRacksAreLabelsToo) {
  std::vector<NodeView> nodes = {Node("a", 1), Node("b", 1), Node("c", 1), Node("d", 1)};
  for (NodeView& node : nodes) node.labels["rack"] = "7";  // each zone counts its racks
  for (const int i : {0, 3}) nodes[i].labels["zone"] = "east";
  for (const int i : {1, 2}) nodes[i].labels["zone"] = "west";
  const Placement placement = Both(nodes, Ranks(4), TopologyOfLabels(nodes), MeshAxes(2, 2));
  const std::vector<std::string> on = NodesOf(placement);
  EXPECT_EQ(nodes[on[0][0] - 'a'].labels["zone"], nodes[on[1][0] - 'a'].labels["zone"]) << on[0] << on[1];
}

// Where islands are of unlike number, what leaves the only one of a machine once had no speed: costs were
// infinite, and the replacement of a lost machine crashed.
TEST(ByTopologyTest, MachinesOfUnlikeIslands) {
  topology::Topology topology = Racks("a /r1\nb /r1\nc /r2\nd /r2\n");
  topology.shapes[0] = PairsOfNvlink().shapes[0];
  std::vector<NodeView> nodes = {Node("a", 16, 4), Node("b", 16, 4), Node("c", 16, 3), Node("d", 16, 4)};
  const std::vector<spec::MeshAxis> axes = {{"dp", std::nullopt}, {"tp", 2}};
  Demand demand = Ranks(10);
  demand.min = 2;
  demand.unit = 2;
  const Placement first = Both(nodes, demand, topology, axes);
  EXPECT_THAT(first.reason, Not(HasSubstr("inf")));
  for (const RankSlot& slot : first.ranks) demand.previous.push_back(slot.node);
  for (const size_t lost : {0, 1, 2}) {
    std::vector<NodeView> left = nodes;
    left[lost].unusable = "lost";
    const Placement placement = Both(left, demand, topology, axes, first.ranks);
    EXPECT_TRUE(placement.placed);
    EXPECT_THAT(placement.reason, Not(HasSubstr("inf")));
  }
}

TEST(ByTopologyTest, WhoStaysKeepsItsGpusAlsoWhereMoreAreFreeThanRanksFit) {
  const std::vector<NodeView> nodes = {Node("a", 16, 8), Node("b", 16, 8), Node("c", 16, 8)};
  Demand demand = Ranks(4);
  demand.ranks_per_node = 2;
  const std::vector<RankSlot> before = {{0, 0, NodeId("a"), {}, {7}},
                                        {1, 1, NodeId("a"), {}, {6}},
                                        {2, 0, NodeId("b"), {}, {6}},
                                        {3, 1, NodeId("b"), {}, {7}}};
  for (const RankSlot& slot : before) {
    demand.previous.push_back(slot.node);
    demand.previous_gpus.push_back(slot.gpus);
  }
  const Placement placement = Both(nodes, demand, Racks("a /r1\nb /r2\nc /r1\n"), MeshAxes(2, 2), before);
  for (size_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(placement.ranks[rank].node, before[rank].node) << rank;
    EXPECT_EQ(placement.ranks[rank].gpus, before[rank].gpus) << rank;
  }
}

TEST(ByTopologyTest, TheIslandWithEnoughFreeGpusIsTaken) {
  NodeView node = Node("a", 16, 4);
  node.gpus_free = {1, 2, 3};
  std::set<int> gpus;
  for (const RankSlot& slot : Both({node}, Ranks(2), PairsOfNvlink(), MeshAxes(1, 2)).ranks)
    gpus.insert(slot.gpus.at(0));
  EXPECT_EQ(gpus, (std::set<int>{1, 3}));
}

// Assumed speeds may say that one GPU of each of 16 machines is as good: a job takes no more machines than it
// needs.
TEST(ByTopologyTest, NoMoreMachinesThanPacked) {
  std::vector<NodeView> nodes;
  std::string rows;
  for (int i = 0; i < 16; ++i) {
    nodes.push_back(Node(absl::StrCat("n", i), 64, 8));
    absl::StrAppend(&rows, "n", i, " /z/r", i % 4, "\n");
  }
  const Placement placement = Both(nodes, Ranks(16), Racks(rows), MeshAxes(2, 8));
  EXPECT_EQ(placement.nodes.size(), 2u);
  EXPECT_EQ(placement.ranks[0].node, placement.ranks[7].node);
}

TEST(ByTopologyTest, OneLabelLosesNoOther) {
  std::vector<NodeView> nodes = {Node("a", 1), Node("b", 1), Node("c", 1)};
  nodes[0].labels["fabric"] = "/z/r";
  nodes[1].labels["fabric"] = "/a";  // a place with the name of a machine
  for (const char* evil :
       {"/z/r\na /other", "/z /r", "////", "/a\x01", "/x[0-9999999]", "/1/2/3/4/5/6/7/8/9"}) {
    nodes[2].labels["fabric"] = evil;
    EXPECT_EQ(TopologyOfLabels(nodes).machines.size(), 2u) << evil;
  }
  nodes[2].labels = {{"rack", std::string("x\n") + std::string(9'000, '\n')}};
  EXPECT_EQ(TopologyOfLabels(nodes).machines.size(), 2u);
}

TEST(ByTopologyTest, WhatTakesTooLongIsPacked) {
  std::vector<NodeView> nodes;
  std::string rows;
  for (int i = 0; i < 256; ++i) {
    nodes.push_back(Node(absl::StrCat("n", i), 64, 8));
    absl::StrAppend(&rows, "n", i, " /r", i % 16, "\n");
  }
  const Placement packed = Place(nodes, Ranks(2048));
  EXPECT_EQ(
      ByTopology(nodes, Ranks(2048), packed, KnownTopology(Racks(rows)), {{"dp", 4}, {"ep", 512}}, {}).ranks,
      packed.ranks);
}

// Whatever is free and whatever the file says: as many ranks as packed, each on GPUs that are free, no two on
// one, no node above its room.
TEST(ByTopologyTest, NoGpuTwiceProperty) {
  Rng rng(7);
  int placed = 0, other = 0, together = 0;
  for (int round = 0; round < 500; ++round) {
    std::vector<NodeView> nodes;
    std::string rows;
    const int count = 1 + static_cast<int>(rng.Below(12));
    for (int n = 0; n < count; ++n) {
      NodeView node =
          Node(absl::StrCat("n", n), 1 + static_cast<int>(rng.Below(12)), static_cast<int>(rng.Below(9)));
      std::erase_if(node.gpus_free, [&](int) { return rng.Below(4) == 0; });
      if (rng.Below(8) != 0)
        absl::StrAppend(&rows, node.id.value, " /z", rng.Below(2), "/r", rng.Below(3), "\n");
      nodes.push_back(std::move(node));
    }
    if (rows.empty()) continue;
    Demand demand;
    demand.min = 1;
    demand.unit = 1 + static_cast<int>(rng.Below(2));
    demand.max = demand.unit * (1 + static_cast<int>(rng.Below(20)));
    if (rng.Below(3) == 0) demand.gpus = static_cast<int>(rng.Below(4));
    if (rng.Below(4) == 0) demand.cpus = 1 + static_cast<int>(rng.Below(3));
    if (rng.Below(4) == 0) demand.ranks_per_node = demand.unit;
    if (rng.Below(5) == 0) {
      demand.count_nodes = true;
      demand.unit = 1;
    }
    std::vector<RankSlot> before;
    if (rng.Below(2) == 0) {
      before = Place(Emptied(nodes), demand).ranks;
      for (const RankSlot& slot : before) {
        demand.previous.push_back(slot.node);
        demand.previous_gpus.push_back(slot.gpus);
      }
    }
    std::map<NodeId, std::vector<std::vector<int>>> waits;  // GPUs of those that go on
    if (rng.Below(2) == 0) {
      for (const RankSlot& slot : before) {
        const NodeView& node = *std::ranges::find(nodes, slot.node, &NodeView::id);
        const bool free = std::ranges::all_of(
            slot.gpus, [&](int gpu) { return std::ranges::count(node.gpus_free, gpu) > 0; });
        if (!free || rng.Below(3) == 0) continue;
        Waiting& waiting = demand.waiting[slot.node];
        ++waiting.members;
        waiting.gpus.insert(waiting.gpus.end(), slot.gpus.begin(), slot.gpus.end());
        waits[slot.node].push_back(slot.gpus);
      }
    }
    const Placement packed = Place(nodes, demand);
    const std::vector<spec::MeshAxis> axes = {{"dp", std::nullopt}, {"tp", demand.unit}};
    const Placement out = ByTopology(nodes, demand, packed, KnownTopology(Racks(rows)), axes, before);
    ASSERT_EQ(out.placed, packed.placed);
    ASSERT_EQ(out.ranks.size(), packed.ranks.size());
    placed += out.placed ? 1 : 0;
    other += out.reason != packed.reason ? 1 : 0;
    std::map<NodeId, std::set<int>> gpus, cpus;
    std::map<NodeId, int> ranks;
    for (const RankSlot& slot : out.ranks) {
      const NodeView& node = *std::ranges::find(nodes, slot.node, &NodeView::id);
      EXPECT_EQ(slot.local_rank, ranks[slot.node]++);
      for (const int gpu : slot.gpus) {
        EXPECT_EQ(std::ranges::count(node.gpus_free, gpu), 1) << "round " << round;
        EXPECT_TRUE(gpus[slot.node].insert(gpu).second) << "round " << round;
      }
      for (const int cpu : slot.cpus) EXPECT_TRUE(cpus[slot.node].insert(cpu).second);
    }
    EXPECT_LE(out.nodes.size(), packed.nodes.size()) << "round " << round;
    const auto going_on = [&](const Placement& placement) {
      std::map<NodeId, std::vector<std::vector<int>>> left = waits;
      int count = 0;
      for (const RankSlot& slot : placement.ranks) {
        std::vector<std::vector<int>>& there = left[slot.node];
        if (const auto it = std::ranges::find(there, slot.gpus); it != there.end()) {
          there.erase(it);
          ++count;
        }
      }
      return count;
    };
    EXPECT_GE(going_on(out), going_on(packed)) << "round " << round;
    for (const auto& [id, processes] : waits) {
      int of_packed = 0;
      for (const RankSlot& slot : packed.ranks) of_packed += slot.node == id ? 1 : 0;
      EXPECT_GE(ranks.contains(id) ? ranks[id] : 0, std::min(of_packed, static_cast<int>(processes.size())))
          << "round " << round;
      together += out.reason != packed.reason ? 1 : 0;
    }
    for (const NodeVerdict& verdict : packed.verdicts) {
      const auto there = ranks.find(verdict.node);
      EXPECT_LE(there == ranks.end() ? 0 : there->second, verdict.room) << "round " << round;
    }
    const std::set<NodeId> groups(out.nodes.begin(), out.nodes.end());
    EXPECT_EQ(groups.size(), ranks.size());
  }
  EXPECT_GT(placed, 200);
  EXPECT_GT(other, 200);
  EXPECT_GT(together, 50) << "of those with processes that go on";
}

}  // namespace
}  // namespace gtrain::plan
