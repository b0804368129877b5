#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "topology/builder.h"
#include "topology/place/bound.h"
#include "topology/place/check.h"
#include "topology/place/plan.h"
#include "topology/place/policy.h"
#include "topology/place/random_fabrics.h"
#include "topology/place/rankfile.h"

namespace gtrain::topology {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

// `machines` of four GPUs, `of_leaf` on each leaf, under one spine.
Topology SmallTree(int machines, int of_leaf) {
  Topology out;
  Shape shape;
  shape.name = "four";
  shape.gpus.assign(4, {"H100", -1, "", 80});
  shape.nvlink = {{{0, 1, 2, 3}, 400, 1}};
  out.shapes = {shape};
  Builder builder(out);
  const int spine = builder.Switch("spine");
  for (int m = 0; m < machines; ++m) {
    const int machine = builder.Machine(absl::StrCat("n", m));
    const int leaf = builder.Switch(absl::StrCat("leaf", m / of_leaf));
    if (m % of_leaf == 0) builder.LinkSwitch(leaf, spine, 50 * of_leaf / 2, 1);
    builder.LinkMachine(machine, leaf, 50, 1);
  }
  return out;
}

Mesh MeshOf(const std::vector<std::pair<std::string, int>>& axes) {
  Mesh mesh;
  for (const auto& [name, size] : axes) mesh.axes.push_back(AxisNamed(name, size));
  return mesh;
}

std::vector<int32_t> All(const Fabric& fabric) {
  std::vector<int32_t> slots(fabric.slots.size());
  for (size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<int32_t>(i);
  return slots;
}

TEST(FabricTest, LevelsAreMachinesLeavesAndTheSpine) {
  const absl::StatusOr<Fabric> fabric = Compile(SmallTree(8, 2));
  ASSERT_TRUE(fabric.ok()) << fabric.status();
  ASSERT_THAT(fabric->levels, SizeIs(3));
  EXPECT_EQ(fabric->levels[0].name, "machine");
  EXPECT_EQ(fabric->levels[1].name, "leaf");
  EXPECT_EQ(fabric->levels[1].count(), 4);
  EXPECT_EQ(fabric->levels[1].up_gb_s[0], 50);
  EXPECT_EQ(fabric->Meet(0, 1), 0);
  EXPECT_EQ(fabric->Meet(0, 4), 1);
  EXPECT_EQ(fabric->Meet(0, 8), 2);
  EXPECT_TRUE(std::ranges::is_sorted(fabric->seconds_per_gb));
  EXPECT_THAT(fabric->assumed, ElementsAre());
}

TEST(FabricTest, MachinesOutOfOrderAreGroupedByTheirLeaf) {
  Topology topology = SmallTree(4, 2);
  for (Link& link : topology.links) {
    if (!link.from.is_switch) link.to.index = 1 + link.from.index % 2;  // n0 n2 on leaf0, n1 n3 on leaf1
  }
  const absl::StatusOr<Fabric> fabric = Compile(topology);
  ASSERT_TRUE(fabric.ok());
  EXPECT_EQ(fabric->slots[4].machine, 2);
  EXPECT_EQ(fabric->slots_of_machine[1], std::make_pair(8, 12));
}

TEST(FabricTest, PartsThatNothingJoinsAreFarApart) {
  Topology topology = SmallTree(4, 2);
  std::erase_if(topology.links, [](const Link& link) { return link.from.is_switch; });
  const absl::StatusOr<Fabric> fabric = Compile(topology);
  ASSERT_TRUE(fabric.ok());
  EXPECT_EQ(fabric->levels.back().name, "unconnected");
  EXPECT_THAT(fabric->assumed, ::testing::Contains(HasSubstr("2 parts that no link joins")));
}

TEST(FabricTest, RanksOfSeveralGpusStayInAnIsland) {
  const absl::StatusOr<Fabric> fabric = Compile(SmallTree(2, 2), 2);
  ASSERT_TRUE(fabric.ok());
  EXPECT_EQ(fabric->size(), 4);
  EXPECT_THAT(fabric->gpus, ElementsAre(0, 1, 2, 3, 0, 1, 2, 3));
  EXPECT_FALSE(Compile(SmallTree(2, 2), 5).ok());
}

TEST(MeshAwareTest, GroupsWithMuchTrafficStayInMachinesAndPipelinesInLeaves) {
  const Topology topology = SmallTree(8, 4);
  const absl::StatusOr<Fabric> fabric = Compile(topology);
  ASSERT_TRUE(fabric.ok());
  const Mesh mesh = MeshOf({{"tp", 4}, {"pp", 2}, {"dp", 4}});  // tp varies slowest
  const Cost cost = Evaluate(*fabric, mesh, PlaceMeshAware(*fabric, mesh, All(*fabric), Objective::kTotal));
  EXPECT_EQ(cost.axes[0].machines_max, 1);
  EXPECT_EQ(cost.axes[0].cut_gb[0], 0);
  // dp rings stay on a leaf, and only the pipeline leaves it.
  EXPECT_EQ(cost.axes[2].cut_gb[1], 0);
  // The time is less if they do leave it: their machines' links are the slower ones anyway.
  EXPECT_LT(Evaluate(*fabric, mesh, PlaceMeshAware(*fabric, mesh, All(*fabric))).seconds, cost.seconds);
  EXPECT_GT(Evaluate(*fabric, mesh, PlaceContiguous(*fabric, mesh, All(*fabric))).seconds, cost.seconds);
}

// Every policy on every kind of fabric: the placement is one, its cost is what the checker finds, the bound
// is below.
TEST(PlacementProperty, TheCheckerAgreesAndTheBoundHolds) {
  const std::vector<Mesh> meshes = {BenchMesh(256),
                                    MeshOf({{"dp", 8}, {"pp", 2}, {"cp", 2}, {"tp", 8}}),
                                    MeshOf({{"dp", 4}, {"ep", 8}, {"tp", 8}}),
                                    MeshOf({{"dp", 256}}),
                                    MeshOf({{"pp", 3}, {"dp", 17}, {"tp", 5}}),
                                    MeshOf({{"fsdp", 127}, {"tp", 2}})};
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    Rng rng(seed);
    const FabricOptions options{seed % 2 == 0 ? FabricKind::kRails : FabricKind::kLeafSpine, 256,
                                seed % 3 == 0 ? 0 : 0.1, seed % 3 == 2, 2};
    const RandomFabric random = MakeFabric(options, rng);
    const absl::StatusOr<Fabric> fabric = Compile(random.topology);
    ASSERT_TRUE(fabric.ok());
    const std::vector<int32_t> usable = UsableSlots(random.topology, *fabric, {});
    for (const Mesh& mesh : meshes) {
      const Bound bound = LowerBound(*fabric, mesh, usable);
      for (const auto policy : {+[](const Fabric&f, const Mesh&m, const std::vector<int32_t>&u) {
                                  return PlaceMeshAware(f, m, u);
                                },
                                +[](const Fabric&f, const Mesh&m, const std::vector<int32_t>&u) {
                                  return PlaceMeshAware(f, m, u, Objective::kTotal);
                                },
                                &PlaceContiguous, &PlaceSpread}) {
        const std::vector<int32_t> slots = policy(*fabric, mesh, usable);
        const Cost cost = Evaluate(*fabric, mesh, slots);
        EXPECT_EQ(CheckPlacement(*fabric, mesh, usable, slots, cost), absl::OkStatus()) << "seed " << seed;
        EXPECT_LE(bound.seconds, cost.seconds * (1 + 1e-9)) << "seed " << seed;
        EXPECT_LE(bound.total, cost.total * (1 + 1e-9)) << "seed " << seed;
      }
      // Plans cut only what they must; this cuts every axis everywhere.
      std::vector<int32_t> any = usable;
      std::ranges::shuffle(any, rng);
      any.resize(static_cast<size_t>(mesh.ranks()));
      const Cost cost = Evaluate(*fabric, mesh, any);
      EXPECT_EQ(CheckPlacement(*fabric, mesh, usable, any, cost), absl::OkStatus()) << "seed " << seed;
      EXPECT_LE(bound.seconds, cost.seconds * (1 + 1e-9)) << "seed " << seed;
      EXPECT_LE(bound.total, cost.total * (1 + 1e-9)) << "seed " << seed;
    }
  }
}

// Two GPUs a machine; the leaves have so many machines.
Topology TreeOf(const std::vector<int>& leaves) {
  Topology out;
  Shape shape;
  shape.name = "two";
  shape.gpus.assign(2, {"H100", -1, "", 80});
  shape.nvlink = {{{0, 1}, 400, 1}};
  out.shapes = {shape};
  Builder builder(out);
  const int spine = builder.Switch("spine");
  for (const int machines : leaves) {
    const int leaf = builder.Switch(absl::StrCat("leaf", out.switches.size()));
    builder.LinkSwitch(leaf, spine, 30, 1);
    for (int m = 0; m < machines; ++m)
      builder.LinkMachine(builder.Machine(absl::StrCat("n", out.machines.size())), leaf, 50, 1);
  }
  return out;
}

// No order of eight ranks is below the bound, and often one is at it.
TEST(BoundTest, NoPlacementOfASmallMeshIsBelow) {
  const auto mesh_of = [](const std::vector<Axis>& axes) { return Mesh{axes}; };
  const Pattern ring = Pattern::kRing, chain = Pattern::kChain, all = Pattern::kAllToAll;
  const std::vector<Mesh> meshes = {mesh_of({{"a", 4, ring, 1}, {"b", 2, ring, 8}}),
                                    mesh_of({{"a", 4, ring, 5}, {"b", 2, chain, 1}}),
                                    mesh_of({{"a", 2, chain, 1}, {"b", 4, chain, 2}}),
                                    mesh_of({{"a", 2, chain, 1}, {"b", 2, ring, 2}, {"c", 2, all, 9}}),
                                    mesh_of({{"a", 8, ring, 1}}),
                                    mesh_of({{"a", 7, chain, 1}})};
  int reached = 0;
  for (const std::vector<int>& leaves :
       std::vector<std::vector<int>>{{2, 2}, {3, 1}, {1, 1, 1, 1}, {2, 1, 1}}) {
    const absl::StatusOr<Fabric> fabric = Compile(TreeOf(leaves));
    ASSERT_TRUE(fabric.ok());
    std::vector<int32_t> slots = All(*fabric);
    for (const Mesh& mesh : meshes) {
      const Bound bound = LowerBound(*fabric, mesh, slots);
      double least_seconds = 1e9, least_total = 1e9;
      std::vector<int32_t> order = slots;
      do {
        // The two slots of a machine are alike: once in their order is enough.
        std::vector<size_t> at(order.size());
        for (size_t i = 0; i < order.size(); ++i) at[order[i]] = i;
        if (at[0] > at[1] || at[2] > at[3] || at[4] > at[5] || at[6] > at[7]) continue;
        const Cost cost = Evaluate(*fabric, mesh, order);
        least_seconds = std::min(least_seconds, cost.seconds);
        least_total = std::min(least_total, cost.total);
      } while (std::next_permutation(order.begin(), order.end()));
      EXPECT_LE(bound.seconds, least_seconds * (1 + 1e-9));
      EXPECT_LE(bound.total, least_total * (1 + 1e-9));
      reached += bound.total >= least_total * (1 - 1e-9) ? 1 : 0;
    }
  }
  EXPECT_GE(reached, 12);
}

TEST(MeshAwareTest, ComesNearTheBoundWithAndWithoutHoles) {
  for (const FabricKind kind : {FabricKind::kLeafSpine, FabricKind::kRails}) {
    for (uint64_t seed = 1; seed <= 4; ++seed) {
      const double holes = seed == 1 ? 0 : 0.05;
      Rng rng(seed);
      const RandomFabric random = MakeFabric({kind, 8192, holes, false, 0}, rng);
      const absl::StatusOr<Fabric> fabric = Compile(random.topology);
      ASSERT_TRUE(fabric.ok());
      const Mesh mesh = BenchMesh(8192);
      const std::vector<int32_t> usable = UsableSlots(random.topology, *fabric, {});
      const std::vector<int32_t> slots = PlaceMeshAware(*fabric, mesh, usable, Objective::kTotal);
      EXPECT_EQ(slots, PlaceMeshAware(*fabric, mesh, usable, Objective::kTotal));
      const double total = Evaluate(*fabric, mesh, slots).total,
                   bound = LowerBound(*fabric, mesh, usable).total;
      EXPECT_LE(total, bound * (holes > 0 ? 1.02 : 1 + 1e-9)) << "seed " << seed;
    }
  }
}

TEST(CheckTest, WhatIsWrongIsFound) {
  const absl::StatusOr<Fabric> fabric = Compile(SmallTree(4, 2));
  const Mesh mesh = MeshOf({{"dp", 4}, {"tp", 4}});
  const std::vector<int32_t> usable = All(*fabric);
  std::vector<int32_t> slots = PlaceMeshAware(*fabric, mesh, usable);
  Cost cost = Evaluate(*fabric, mesh, slots);
  EXPECT_EQ(CheckPlacement(*fabric, mesh, usable, slots, cost), absl::OkStatus());
  std::swap(slots[0], slots[4]);
  EXPECT_THAT(CheckPlacement(*fabric, mesh, usable, slots, cost).message(), HasSubstr("the plan says"));
  slots[0] = slots[1];
  EXPECT_THAT(CheckPlacement(*fabric, mesh, usable, slots, cost).message(), HasSubstr("and another one"));
  slots[0] = 99;
  EXPECT_THAT(CheckPlacement(*fabric, mesh, usable, slots, cost).message(), HasSubstr("not usable"));
  slots.pop_back();
  EXPECT_THAT(CheckPlacement(*fabric, mesh, usable, slots, cost).message(), HasSubstr("the mesh has 16"));
}

TEST(PlanTest, WhyAJobHasNoPlaceAndWhatWouldUnblockIt) {
  Topology topology = SmallTree(4, 2);
  topology.machines[0].unusable = "drained";
  topology.machines[1].broken_gpus = {1};
  const absl::StatusOr<Fabric> fabric = Compile(topology);
  PlanRequest request{MeshOf({{"dp", 4}, {"tp", 4}}), {"n2"}, {}, {}, 0};
  const Plan plan = MakePlan(topology, *fabric, request);
  EXPECT_FALSE(plan.placed);
  EXPECT_EQ(plan.reason,
            "needs 16 places for mesh {dp: 4, tp: 4}; the topology has 16, of which 7 may be taken");
  EXPECT_THAT(plan.obstacles, SizeIs(3));
  EXPECT_THAT(PrintPlan(topology, *fabric, request.mesh, plan, 8),
              HasSubstr("4 places of n2: excluded by where.exclude"));
  EXPECT_THAT(plan.unblocks, ::testing::Contains("dp: 1 instead of 4"));
  EXPECT_THAT(plan.unblocks, ::testing::Contains("machines with 9 places more"));
}

TEST(PlanTest, LabelsAndTypesOfGpusChooseMachines) {
  Topology topology = SmallTree(4, 2);
  topology.machines[3].labels["pool"] = "spot";
  const absl::StatusOr<Fabric> fabric = Compile(topology);
  PlanRequest request{MeshOf({{"dp", 4}}), {}, {{"pool", "spot"}}, {"h100"}, 0};
  const Plan plan = MakePlan(topology, *fabric, request);
  ASSERT_TRUE(plan.placed) << plan.reason;
  for (const int32_t slot : plan.slot_of_rank) EXPECT_EQ(fabric->slots[slot].machine, 3);
  request.gpu_types = {"b200"};
  EXPECT_THAT(MakePlan(topology, *fabric, request).obstacles[0].constraint, HasSubstr("no GPU of type b200"));
}

TEST(PlanTest, SoManyRanksOnEachMachine) {
  Topology topology = SmallTree(8, 4);
  topology.machines[1].broken_gpus = {0, 1, 2};
  const absl::StatusOr<Fabric> fabric = Compile(topology);
  PlanRequest request{MeshOf({{"dp", 4}, {"tp", 2}}), {}, {}, {}, 2};
  request.ranks_per_machine = 2;
  for (const char* rank0 : {"", "n0"}) {
    if (*rank0 != '\0') request.rank0 = {rank0};
    const Plan plan = MakePlan(topology, *fabric, request);
    ASSERT_TRUE(plan.placed) << plan.reason;
    EXPECT_THAT(plan.reason, HasSubstr("2 on each machine"));
    std::map<int, int> ranks;
    for (const int32_t slot : plan.slot_of_rank) ++ranks[fabric->slots[slot].machine];
    EXPECT_THAT(ranks, SizeIs(4)) << "and not two machines of four";
    for (const auto& [machine, count] : ranks) EXPECT_EQ(count, 2) << machine;
    EXPECT_FALSE(ranks.contains(1)) << "it has one place";
    EXPECT_EQ(ranks.contains(0), *rank0 != '\0') << "a leaf with just so many machines is left to it";
    EXPECT_THAT(plan.spare_slots, SizeIs(2));
  }
  request.ranks_per_machine = 1;
  request.hosts = {"n0", "n1", "n2", "n3", "n4", "n5", "n6"};
  const Plan refused = MakePlan(topology, *fabric, request);
  EXPECT_FALSE(refused.placed);
  EXPECT_EQ(refused.reason, "needs 8 machines with 1 place for ranks; the topology has 7 that may be taken");
  EXPECT_THAT(refused.unblocks, ::testing::Contains("where.hosts with these machines (4 places more)"));
}

TEST(PlanTest, ANameWithoutItsDomain) {
  Topology topology = SmallTree(4, 1);
  topology.machines[0].name = "a.x";
  topology.machines[1].name = "a.y";
  topology.machines[2].name = "b.x";
  EXPECT_THAT(MachinesCalled(topology, {"a", "b", "n3"}), ::testing::ElementsAre(2, 3));
  const absl::StatusOr<Fabric> fabric = Compile(topology);
  PlanRequest request{MeshOf({{"dp", 1}}), {"a"}, {}, {}, 0};
  EXPECT_THAT(UsableSlots(topology, *fabric, request), SizeIs(8)) << "all that are called so";
}

TEST(PlanTest, SparesAreNearTheRanksAndOnMachinesWithoutAny) {
  const Topology topology = SmallTree(8, 4);
  const absl::StatusOr<Fabric> fabric = Compile(topology);
  const Plan plan = MakePlan(topology, *fabric, {MeshOf({{"dp", 3}, {"tp", 4}}), {}, {}, {}, 4});
  ASSERT_TRUE(plan.placed);
  const int leaf = fabric->domain[1][plan.slot_of_rank[0]];
  for (const int32_t slot : plan.slot_of_rank) EXPECT_EQ(fabric->domain[1][slot], leaf);
  for (const int32_t slot : plan.spare_slots) EXPECT_EQ(fabric->domain[1][slot], leaf);
}

TEST(ReplaceTest, OnlyTheRanksOfTheLostMachineMoveAndTheyMoveNear) {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    Rng rng(seed);
    RandomFabric random = MakeFabric({FabricKind::kLeafSpine, 1024, 0.05, false, 4}, rng);
    for (const int spare : random.spares) random.topology.machines[spare].unusable = "kept as a spare";
    const absl::StatusOr<Fabric> fabric = Compile(random.topology);
    const Mesh mesh = BenchMesh(1024);
    std::vector<int32_t> slots = PlaceMeshAware(*fabric, mesh, UsableSlots(random.topology, *fabric, {}));
    const int lost = fabric->slots[slots[rng.Below(1024)]].machine;
    for (const int spare : random.spares) random.topology.machines[spare].unusable.clear();
    random.topology.machines[lost].unusable = "lost";
    const std::vector<int32_t> usable = UsableSlots(random.topology, *fabric, {});
    std::vector<int32_t> taken = slots, free;
    std::ranges::sort(taken);
    std::ranges::set_difference(usable, taken, std::back_inserter(free));
    const Replacement replacement = Replace(*fabric, mesh, slots, free, {lost});
    ASSERT_TRUE(replacement.done) << replacement.reason;
    EXPECT_THAT(replacement.moves, SizeIs(8));
    for (const Move& move : replacement.moves) {
      EXPECT_EQ(fabric->slots[move.from].machine, lost);
      slots[move.rank] = move.to;
    }
    const Cost cost = Evaluate(*fabric, mesh, slots);
    EXPECT_EQ(CheckPlacement(*fabric, mesh, usable, slots, cost), absl::OkStatus());
    // Small jobs feel a machine more than large ones, for which bench_placement has 2 %.
    EXPECT_LE(cost.total,
              1.1 * Evaluate(*fabric, mesh, PlaceMeshAware(*fabric, mesh, usable, Objective::kTotal)).total);
  }
}

TEST(ReplaceTest, WithoutAWholeMachineRanksGoToSingleSlots) {
  const absl::StatusOr<Fabric> fabric = Compile(SmallTree(4, 2));
  const Mesh mesh = MeshOf({{"dp", 2}, {"tp", 4}});
  const std::vector<int32_t> slots = {0, 1, 2, 3, 4, 5, 6, 7};
  const Replacement replacement = Replace(*fabric, mesh, slots, {8, 9, 12, 13}, {0});
  ASSERT_TRUE(replacement.done);
  EXPECT_THAT(replacement.moves, SizeIs(4));
  const Replacement none = Replace(*fabric, mesh, slots, {8, 9, 12}, {0});
  EXPECT_FALSE(none.done);
  EXPECT_EQ(none.reason, "4 ranks lost their places, and 3 are free");
  EXPECT_THAT(none.moves, SizeIs(0));
}

TEST(RankfileTest, IsReadBackAndUnknownMachinesHaveNoSlot) {
  const Topology topology = SmallTree(4, 2);
  const absl::StatusOr<Fabric> fabric = Compile(topology);
  const std::vector<int32_t> slots = {5, 0, 15};
  const std::string text = PrintRankfile(topology, *fabric, slots);
  EXPECT_EQ(text, "rank 0=n1 slot=1\nrank 1=n0 slot=0\nrank 2=n3 slot=3\n");
  EXPECT_EQ(*ParseRankfile(text, "r", topology, *fabric), slots);
  EXPECT_THAT(*ParseRankfile("rank 0=gone slot=0 # old\n\nrank 1=n0 slot=9\n", "r", topology, *fabric),
              ElementsAre(-1, -1));
}

TEST(RankfileTest, WrongLinesAreNamed) {
  const Topology topology = SmallTree(4, 2);
  const absl::StatusOr<Fabric> fabric = Compile(topology);
  const auto error = [&](const char* text) {
    return std::string(ParseRankfile(text, "r", topology, *fabric).status().message());
  };
  EXPECT_EQ(error("rank 0=n0 slot=0\nhello\n"), "r:2: must be \"rank NUMBER=HOST slot=NUMBER\"");
  EXPECT_EQ(error("rank 0=n0 slot=0\nrank 0=n0 slot=1\n"), "r:2: rank 0 is there twice");
  EXPECT_EQ(error("rank 0=n0 slot=0\nrank 1=n0 slot=0\n"), "r:2: n0 slot 0 is taken by another rank");
  EXPECT_EQ(error("rank 1=n0 slot=0\n"), "r: rank 0 is missing");
  EXPECT_EQ(error(""), "r: no rank in it");
  EXPECT_THAT(error("rank 0=n0 slot=0:1\n"), HasSubstr("r:1: slot=0:1 names sockets or several cores"));
  EXPECT_THAT(error("rank 0=n0 slot=0-3\n"), HasSubstr("r:1: slot=0-3 names sockets or several cores"));
  EXPECT_EQ(error("rank 0=+n0 slot=0\n"), "r:1: +n0 is a host by its position: write its name");
}

}  // namespace
}  // namespace gtrain::topology
