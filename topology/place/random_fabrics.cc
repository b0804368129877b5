#include "topology/place/random_fabrics.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "topology/builder.h"

namespace gtrain::topology {
namespace {

constexpr int kGpus = 8;

Shape MachineShape() {
  Shape shape;
  shape.name = "eight-gpus";
  shape.numa = {{0, 48, 1024}, {1, 48, 1024}};
  NvlinkGroup group{{}, 500, 1};
  for (int i = 0; i < kGpus; ++i) {
    shape.gpus.push_back({"GPU", i / 4, "", 80});
    shape.nics.push_back({absl::StrCat("mlx5_", i), i / 4, "", 50});
    group.gpus.push_back(i);
  }
  shape.nvlink = {group};
  return shape;
}

void AddLeafSpine(int machines, Builder& builder) {
  constexpr int kMachinesOfLeaf = 16;
  const int spine = builder.Switch("spine");
  for (int m = 0; m < machines; ++m) {
    const int leaf = builder.Switch(absl::StrCat("leaf", m / kMachinesOfLeaf));
    if (m % kMachinesOfLeaf == 0) builder.LinkSwitch(leaf, spine, 640, 1);
    builder.LinkMachine(m, leaf, 400, 1);
  }
}

void AddRails(int machines, Builder& builder) {
  constexpr int kMachinesOfGroup = 32, kGroupsOfPod = 8;
  constexpr double kGroupGbS = kMachinesOfGroup * kGpus * 50.0;
  const int core = builder.Switch("core");
  for (int m = 0; m < machines; ++m) {
    const int group = m / kMachinesOfGroup, pod = group / kGroupsOfPod;
    for (int rail = 0; rail < kGpus; ++rail) {
      const int leaf = builder.Switch(absl::StrCat("group", group, "-rail", rail));
      if (m % kMachinesOfGroup == 0) {
        const bool is_new = !builder.HasSwitch(absl::StrCat("pod", pod));
        const int top = builder.Switch(absl::StrCat("pod", pod));
        if (is_new) builder.LinkSwitch(top, core, kGroupsOfPod * kGroupGbS / 8, 1);
        builder.LinkSwitch(leaf, top, kGroupGbS / 2 / kGpus, 1);
      }
      builder.LinkMachine(m, leaf, 50, 1, rail);
    }
  }
}

// The first `count` of a random order of 0 to `of`.
std::vector<int> Draw(int count, int of, Rng& rng) {
  std::vector<int> all(of);
  std::iota(all.begin(), all.end(), 0);
  for (int i = 0; i < count; ++i)
    std::swap(all[i], all[i + static_cast<int>(rng.Below(static_cast<uint64_t>(of - i)))]);
  all.resize(count);
  return all;
}

}  // namespace

RandomFabric MakeFabric(const FabricOptions& options, Rng& rng) {
  RandomFabric out;
  const int needed = options.ranks / kGpus;
  const int machines = static_cast<int>(std::ceil((needed + options.spares) / (1 - options.holes)));
  out.topology.name =
      absl::StrCat(options.kind == FabricKind::kRails ? "rails" : "leaf-spine", "-", options.ranks);
  out.topology.shapes = {MachineShape()};
  Builder builder(out.topology);
  for (int m = 0; m < machines; ++m) builder.Machine(absl::StrCat("node", m));
  options.kind == FabricKind::kRails ? AddRails(machines, builder) : AddLeafSpine(machines, builder);
  const int surplus = machines - needed - options.spares;
  if (options.slot_holes) {
    for (const int gpu : Draw(surplus * kGpus, machines * kGpus, rng))
      out.topology.machines[gpu / kGpus].broken_gpus.push_back(gpu % kGpus);
    for (Machine& machine : out.topology.machines) std::ranges::sort(machine.broken_gpus);
    return out;
  }
  const std::vector<int> drawn = Draw(surplus + options.spares, machines, rng);
  for (int i = 0; i < surplus; ++i) out.topology.machines[drawn[i]].unusable = "drawn as a hole";
  out.spares.assign(drawn.begin() + surplus, drawn.end());
  return out;
}

Mesh BenchMesh(int ranks) {
  const int pp = ranks <= 1024 ? 8 : 16;
  Mesh mesh;
  mesh.axes = {{"dp", ranks / pp / kGpus, Pattern::kRing, 10},
               {"pp", pp, Pattern::kChain, 2},
               {"tp", kGpus, Pattern::kRing, 100}};
  return mesh;
}

}  // namespace gtrain::topology
