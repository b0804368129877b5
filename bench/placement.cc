// bench_placement: where 1,024 to 1,048,576 ranks of a dp x pp x tp mesh go on two kinds of fabric, beside
// scotch_gmap of Debian's scotch on the same graphs: the sum of GB x distance over all edges, which is what
// Scotch minimises, and the time to find it. With holes, 5 % of the machines are missing and Scotch gets the
// rest as its target ("sub"). Then the loss of a machine: the time for a new plan, and its cost beside one
// from scratch.
//
// First what a head takes to grant by the topology, beside packing.
//
// An independent checker recomputes every cost. The seeds begin at 1001; the solver was written looking at 1
// and 2.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "bench/harness.h"
#include "bench/local_cluster.h"
#include "job/plan/by_topology.h"
#include "topology/import.h"
#include "topology/place/check.h"
#include "topology/place/plan.h"
#include "topology/place/policy.h"
#include "topology/place/random_fabrics.h"

namespace gtrain::bench {
namespace {

using topology::Cost;
using topology::Fabric;
using topology::FabricKind;
using topology::Mesh;
using Slots = std::vector<int32_t>;

constexpr uint64_t kFirstSeed = 1001;
constexpr int kTurns = 7;
constexpr char kScotch[] = "/usr/bin/scotch_gmap";

struct Case {
  FabricKind kind = FabricKind::kLeafSpine;
  int ranks = 1024;
  double holes = 0;
  std::string Name() const {
    return absl::StrCat(kind == FabricKind::kRails ? "rails" : "leaf/spine", ", ", ranks, " ranks",
                        holes > 0 ? ", holes" : "");
  }
};

struct World {
  topology::RandomFabric random;
  Fabric fabric;
  Mesh mesh;
  Slots usable;
};

absl::StatusOr<World> MakeWorld(const Case& of, uint64_t seed, int spares) {
  World world;
  Rng rng(seed);
  world.random = topology::MakeFabric({of.kind, of.ranks, of.holes, false, spares}, rng);
  for (const int spare : world.random.spares) world.random.topology.machines[spare].unusable = "a spare";
  GT_ASSIGN_OR_RETURN(world.fabric, topology::Compile(world.random.topology));
  world.mesh = topology::BenchMesh(of.ranks);
  world.usable = UsableSlots(world.random.topology, world.fabric, {});
  return world;
}

// Milliseconds of `turns` calls, one unrecorded first.
template <typename Work>
Series Timed(int turns, const Work& work) {
  Series series;
  for (int turn = 0; turn <= turns; ++turn) {
    const absl::Time begin = absl::Now();
    work();
    if (turn > 0) series.samples.push_back(absl::ToDoubleMilliseconds(absl::Now() - begin));
  }
  return series;
}

absl::StatusOr<Cost> CheckedCost(const World& world, const Slots& slots) {
  const Cost cost = Evaluate(world.fabric, world.mesh, slots);
  GT_RETURN_IF_ERROR(CheckPlacement(world.fabric, world.mesh, world.usable, slots, cost));
  return cost;
}

// The communication graph in Scotch's format: per vertex its degree and, for each edge, weight and vertex.
void WriteGraph(const Mesh& mesh, const std::string& path) {
  std::vector<std::map<int64_t, int>> near(static_cast<size_t>(mesh.ranks()));
  for (size_t a = 0; a < mesh.axes.size(); ++a) {
    const topology::Axis& axis = mesh.axes[a];
    const int64_t stride = mesh.StrideOf(a);
    for (int64_t rank = 0; rank < mesh.ranks(); ++rank) {
      const int64_t at = rank / stride % axis.size;
      if (at + 1 == axis.size && axis.pattern == topology::Pattern::kChain) continue;
      const int64_t next = at + 1 == axis.size ? rank - at * stride : rank + stride;
      near[rank][next] += static_cast<int>(axis.gb);
      near[next][rank] += static_cast<int>(axis.gb);
    }
  }
  size_t ends = 0;
  for (const auto& of_rank : near) ends += of_rank.size();
  std::ofstream out(path);
  out << "0\n" << near.size() << " " << ends << "\n0 010\n";
  for (const auto& of_rank : near) {
    out << of_rank.size();
    for (const auto& [other, weight] : of_rank) out << " " << weight << " " << other;
    out << "\n";
  }
}

// The fabric as a tree of equal arities, of which the usable slots are a part. Distances are sums of the
// costs of levels.
void WriteTarget(const World& world, const std::string& path) {
  const Fabric& fabric = world.fabric;
  std::string levels;
  for (size_t l = 0; l < fabric.levels.size(); ++l) {
    int arity = 0;
    for (int d = 0; d < fabric.levels[l].count(); ++d) {
      const int32_t first = fabric.levels[l].begin[d], last = fabric.levels[l].begin[d + 1] - 1;
      const int children =
          l == 0 ? last - first + 1 : fabric.domain[l - 1][last] - fabric.domain[l - 1][first] + 1;
      arity = std::max(arity, children);
    }
    const double below = l == 0 ? 0 : fabric.seconds_per_gb[l - 1];
    const int cost =
        static_cast<int>(10 * (fabric.seconds_per_gb[l] - below) / fabric.seconds_per_gb[0] + 0.5);
    levels = absl::StrCat(" ", arity, " ", cost, levels);
  }
  std::ofstream out(path);
  out << "sub " << world.usable.size();
  for (const int32_t slot : world.usable) out << " " << slot;
  out << "\ntleaf " << fabric.levels.size() << levels << "\n";
}

// On rails it matters which GPU of a machine a rank has, and Scotch's tree does not say so: ranks of each
// machine in the order of their place in the tp group.
Slots SortedInMachines(const World& world, const Slots& slots) {
  std::map<int, std::vector<int>> ranks;
  for (size_t rank = 0; rank < slots.size(); ++rank)
    ranks[world.fabric.slots[slots[rank]].machine].push_back(static_cast<int>(rank));
  Slots sorted = slots;
  for (auto& [machine, of_machine] : ranks) {
    Slots taken;
    for (const int rank : of_machine) taken.push_back(slots[rank]);
    std::ranges::sort(taken);
    const int tp = world.mesh.axes.back().size;
    std::ranges::stable_sort(of_machine, {}, [&](int rank) { return rank % tp; });
    for (size_t i = 0; i < taken.size(); ++i) sorted[of_machine[i]] = taken[i];
  }
  return sorted;
}

struct Mapped {
  Cost cost;
  double milliseconds = 0;
};

absl::StatusOr<Mapped> MapByScotch(const World& world, const std::string& folder) {
  const std::string graph = folder + "/graph.grf", target = folder + "/target.tgt", map = folder + "/map.map";
  WriteGraph(world.mesh, graph);
  WriteTarget(world, target);
  const absl::Time begin = absl::Now();
  GT_RETURN_IF_ERROR(Run({kScotch, graph, target, map}, absl::Minutes(5)));
  Mapped mapped;
  mapped.milliseconds = absl::ToDoubleMilliseconds(absl::Now() - begin);
  GT_ASSIGN_OR_RETURN(const std::string text, ReadFile(map, size_t{256} << 20));
  Slots slots(static_cast<size_t>(world.mesh.ranks()), -1);
  const std::vector<absl::string_view> words =
      absl::StrSplit(text, absl::ByAnyChar(" \t\n"), absl::SkipEmpty());
  for (size_t i = 1; i + 1 < words.size(); i += 2) {
    size_t rank = 0, place = 0;  // a place is an index into the list of the target's "sub"
    if (!absl::SimpleAtoi(words[i], &rank) || !absl::SimpleAtoi(words[i + 1], &place) ||
        rank >= slots.size() || place >= world.usable.size())
      return absl::InternalError("scotch_gmap wrote a mapping that is none");
    slots[rank] = world.usable[place];
  }
  GT_ASSIGN_OR_RETURN(mapped.cost, CheckedCost(world, slots));
  GT_ASSIGN_OR_RETURN(const Cost sorted, CheckedCost(world, SortedInMachines(world, slots)));
  if (sorted.total < mapped.cost.total) mapped.cost = sorted;
  return mapped;
}

struct Rows {
  Outcome cost, seconds, time, gap;
};

absl::Status OneSeed(const Case& of, uint64_t seed, const std::string& folder, bool with_scotch, Rows& rows) {
  GT_ASSIGN_OR_RETURN(const World world, MakeWorld(of, seed, 0));
  Slots slots;
  const Series time = Timed(kTurns, [&] {
    slots = PlaceMeshAware(world.fabric, world.mesh, world.usable, topology::Objective::kTotal);
  });
  GT_ASSIGN_OR_RETURN(const Cost cost, CheckedCost(world, slots));
  const topology::Bound bound = LowerBound(world.fabric, world.mesh, world.usable);
  rows.cost.ours.samples.push_back(cost.total);
  rows.time.ours.samples.push_back(time.Median());
  rows.gap.ours.samples.push_back(100 * (cost.total / bound.total - 1));
  const Slots for_time = PlaceMeshAware(world.fabric, world.mesh, world.usable);
  GT_ASSIGN_OR_RETURN(const Cost by_time, CheckedCost(world, for_time));
  rows.seconds.ours.samples.push_back(by_time.seconds);
  if (!with_scotch) return absl::OkStatus();
  GT_ASSIGN_OR_RETURN(const Mapped scotch, MapByScotch(world, folder));
  rows.cost.theirs.samples.push_back(scotch.cost.total);
  rows.seconds.theirs.samples.push_back(scotch.cost.seconds);
  rows.time.theirs.samples.push_back(scotch.milliseconds);
  return absl::OkStatus();
}

// A machine that has ranks is lost, and one of eight spares takes them.
absl::Status OneLoss(const Case& of, uint64_t seed, Outcome& time, Outcome& cost) {
  GT_ASSIGN_OR_RETURN(World world, MakeWorld(of, seed, 8));
  Slots slots = PlaceMeshAware(world.fabric, world.mesh, world.usable, topology::Objective::kTotal);
  Rng rng(seed);
  std::vector<topology::Machine>& machines = world.random.topology.machines;
  const int lost = world.fabric.slots[slots[rng.Below(slots.size())]].machine;
  for (const int spare : world.random.spares) machines[spare].unusable.clear();
  machines[lost].unusable = "lost";
  world.usable = UsableSlots(world.random.topology, world.fabric, {});
  Slots taken = slots, free;
  std::ranges::sort(taken);
  std::ranges::set_difference(world.usable, taken, std::back_inserter(free));
  topology::Replacement replacement;
  time.ours.samples.push_back(
      Timed(kTurns, [&] { replacement = Replace(world.fabric, world.mesh, slots, free, {lost}); }).Median());
  if (!replacement.done) return absl::InternalError(replacement.reason);
  for (const topology::Move& move : replacement.moves) {
    if (world.fabric.slots[move.from].machine != lost)
      return absl::InternalError("another machine's rank moved");
    slots[move.rank] = move.to;
  }
  GT_ASSIGN_OR_RETURN(const Cost after, CheckedCost(world, slots));
  const Slots scratch = PlaceMeshAware(world.fabric, world.mesh, world.usable, topology::Objective::kTotal);
  GT_ASSIGN_OR_RETURN(const Cost anew, CheckedCost(world, scratch));
  cost.ours.samples.push_back(after.total);
  cost.theirs.samples.push_back(anew.total);
  return absl::OkStatus();
}

absl::Status Measure(const Options& options, const std::string& folder, std::vector<Outcome>& outcomes) {
  const bool installed = ReadFile(kScotch, size_t{64} << 20).ok();
  if (!installed) std::printf("scotch is not installed (tools/install.sh --bench): no peer\n");
  std::vector<int> sizes = {1024, 8192};
  if (!options.quick) sizes.insert(sizes.end(), {65'536, 1'048'576});
  for (const FabricKind kind : {FabricKind::kLeafSpine, FabricKind::kRails}) {
    for (const int ranks : sizes) {
      for (const double holes : {0.0, 0.05}) {
        const Case of{kind, ranks, holes};
        const bool with_scotch = installed && ranks <= 65'536;
        const std::string peer = with_scotch ? "scotch_gmap" : "";
        Rows rows{{absl::StrCat("sum of GB x distance, ", of.Name()), "s", peer, {}, {}},
                  {absl::StrCat("predicted time of a step, ", of.Name()), "s", peer, {}, {}},
                  {absl::StrCat("to find it, ", of.Name()), "ms", peer, {}, {}},
                  {absl::StrCat("above the lower bound, ", of.Name()), "%", "", {}, {}}};
        const int seeds = ranks > 8192 ? std::min(options.seeds, 3) : options.seeds;
        for (int i = 0; i < seeds; ++i)
          GT_RETURN_IF_ERROR(OneSeed(of, kFirstSeed + static_cast<uint64_t>(i), folder, with_scotch, rows));
        outcomes.insert(outcomes.end(), {rows.cost, rows.seconds, rows.time, rows.gap});
      }
      const Case of{kind, ranks, 0.05};
      Outcome time{absl::StrCat("a new plan after a loss, ", of.Name()), "ms", "", {}, {}};
      Outcome cost{absl::StrCat("its cost, ", of.Name()), "s", "from scratch", {}, {}};
      for (int i = 0; i < options.seeds && ranks <= 65'536; ++i)
        GT_RETURN_IF_ERROR(OneLoss(of, kFirstSeed + static_cast<uint64_t>(i), time, cost));
      if (ranks <= 65'536) outcomes.insert(outcomes.end(), {time, cost});
    }
  }
  return absl::OkStatus();
}

// What a head takes to grant all GPUs of so many machines, 16 a leaf: Place() alone, and with the topology.
void Grants(const Options& options, std::vector<Outcome>& outcomes) {
  for (const int machines : {16, 128, 1250}) {
    std::vector<plan::NodeView> nodes;
    std::string rows;
    for (int i = 0; i < machines; ++i) {
      plan::NodeView node;
      node.id = NodeId(absl::StrCat("n", i * 7919 % machines));  // ids say nothing of leaves
      node.hostname = node.id.value;
      node.cpus = node.cpus_free = 64;
      node.gpu_models.assign(8, "H100");
      node.gpus_free = {0, 1, 2, 3, 4, 5, 6, 7};
      absl::StrAppend(&rows, node.hostname, " /spine", i / 256, "/leaf", i / 16, "\n");
      nodes.push_back(std::move(node));
    }
    topology::Topology topology = topology::ImportPaths(rows, "racks", topology::ShapeOfOneSlot()).value();
    topology.shapes[0].gpus.resize(8);
    const plan::KnownTopology known(topology);
    const std::vector<spec::MeshAxis> axes = {{"dp", std::nullopt}, {"tp", 8}};
    for (const int ranks : {machines * 8, 64}) {  // all of the cluster, and a small part of it
      plan::Demand demand;
      demand.min = demand.max = ranks;
      demand.unit = 8;
      const plan::Placement packed = Place(nodes, demand);
      outcomes.push_back({absl::StrCat("a grant of ", ranks, " of ", machines * 8, " GPUs by the topology"),
                          "ms", "packed",
                          Timed(options.seeds, [&] { ByTopology(nodes, demand, packed, known, axes, {}); }),
                          Timed(options.seeds, [&] { Place(nodes, demand); })});
    }
  }
}

int Main(int argc, char** argv) {
  const Options options = ParseOptions(argc, argv, {}, 5);
  std::string folder = (std::filesystem::temp_directory_path() / "gt-placement-XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) {
    std::fprintf(stderr, "bench_placement: %s: %s: set TMPDIR to a folder that may be written\n",
                 folder.c_str(), strerror(errno));
    return 1;
  }
  std::vector<Outcome> outcomes;
  Grants(options, outcomes);
  const absl::Status done = Measure(options, folder, outcomes);
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
  if (!done.ok()) {
    std::fprintf(stderr, "bench_placement: %s\n", std::string(done.message()).c_str());
    return 1;
  }
  return Report(options, "placement", outcomes);
}

}  // namespace
}  // namespace gtrain::bench

int main(int argc, char** argv) { return gtrain::bench::Main(argc, argv); }
