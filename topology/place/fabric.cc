#include "topology/place/fabric.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <queue>
#include <utility>

#include "absl/strings/str_cat.h"

namespace gtrain::topology {
namespace {

constexpr double kNvlinkGbS = 150, kPcieGbS = 25, kSocketGbS = 20, kMemoryGbS = 10, kMachineGbS = 12.5,
                 kNothingGbS = 1.25;
constexpr double kSlotUs = 2, kLinkUs = 1;

// Sets that grow together.
class Sets {
 public:
  explicit Sets(size_t count) : parent_(count) { std::iota(parent_.begin(), parent_.end(), 0); }
  int Find(int i) {
    while (parent_[i] != i) i = parent_[i] = parent_[parent_[i]];
    return i;
  }
  void Join(int a, int b) { parent_[Find(a)] = Find(b); }

 private:
  std::vector<int> parent_;
};

// Vertices are the machines, then the switches.
struct Graph {
  const Topology& topology;
  int machines = 0, vertices = 0;
  std::vector<int> level;                              // of switches; machines have 0
  std::vector<std::vector<std::pair<int, int>>> near;  // [vertex]: neighbour and link
  int Vertex(const End& end) const { return end.is_switch ? machines + end.index : end.index; }
};

// NVLink switches are level 1 where there are some, and the fabric begins above them.
Graph MakeGraph(const Topology& topology) {
  Graph graph{topology, static_cast<int>(topology.machines.size()), 0, {}, {}};
  graph.vertices = graph.machines + static_cast<int>(topology.switches.size());
  graph.near.resize(graph.vertices);
  for (size_t i = 0; i < topology.links.size(); ++i) {
    const int a = graph.Vertex(topology.links[i].from), b = graph.Vertex(topology.links[i].to);
    graph.near[a].emplace_back(b, static_cast<int>(i));
    graph.near[b].emplace_back(a, static_cast<int>(i));
  }
  const bool nvlink = std::ranges::count(topology.switches, SwitchKind::kNvlink, &Switch::kind) > 0;
  graph.level.assign(graph.vertices, -1);
  std::queue<int> queue;
  for (int v = 0; v < graph.vertices; ++v) {
    const bool of_nvlink =
        v >= graph.machines && topology.switches[v - graph.machines].kind == SwitchKind::kNvlink;
    if (v >= graph.machines && !of_nvlink) continue;
    graph.level[v] = of_nvlink ? 1 : 0;
    queue.push(v);
  }
  const int first = nvlink ? 2 : 1;
  while (!queue.empty()) {
    const int v = queue.front();
    queue.pop();
    for (const auto& [other, link] : graph.near[v]) {
      if (graph.level[other] >= 0) continue;
      graph.level[other] = std::min(kLevelsMax - 3, std::max(first, graph.level[v] + 1));
      queue.push(other);
    }
  }
  return graph;
}

// For each switch level, the set of each machine; and the uplink of each set. The last level may have several
// sets: parts that nothing joins.
struct SwitchLevel {
  std::vector<int> set_of_machine;
  std::vector<double> up_gb_s;
  std::vector<float> up_us;
  std::vector<std::string> names;
};

double SpeedOf(const Topology& topology, const Link& link) {
  if (link.gb_s > 0 || link.from.is_switch) return link.gb_s;
  const std::vector<Nic>& nics = topology.shapes[topology.machines[link.from.index].shape].nics;
  if (link.from.nic >= 0) return nics[link.from.nic].gb_s;
  return std::accumulate(nics.begin(), nics.end(), 0.0,
                         [](double sum, const Nic& nic) { return sum + nic.gb_s; });
}

SwitchLevel SetsOfLevel(const Graph& graph, int level, Sets& sets) {
  const Topology& topology = graph.topology;
  for (const Link& link : topology.links) {
    const int a = graph.Vertex(link.from), b = graph.Vertex(link.to);
    const int higher = std::max(graph.level[a], graph.level[b]);
    if (graph.level[a] >= 0 && graph.level[b] >= 0 && higher <= level) sets.Join(a, b);
  }
  SwitchLevel out;
  std::vector<int> number(graph.vertices, -1);
  for (int m = 0; m < graph.machines; ++m) {
    int& n = number[sets.Find(m)];
    if (n < 0) n = static_cast<int>(out.names.size());
    if (n == static_cast<int>(out.names.size())) out.names.emplace_back();
    out.set_of_machine.push_back(n);
  }
  out.up_gb_s.assign(out.names.size(), 0);
  out.up_us.assign(out.names.size(), 0);
  for (int v = graph.machines; v < graph.vertices; ++v) {
    const int n = number[sets.Find(v)];
    if (n < 0 || graph.level[v] != level) continue;
    std::string& name = out.names[n];
    const std::string& more = topology.switches[v - graph.machines].name;
    name = name.empty() ? more : absl::StrCat(name.substr(0, name.find('+')), "+");
  }
  for (const Link& link : topology.links) {
    const int a = graph.Vertex(link.from), b = graph.Vertex(link.to);
    const bool a_in = graph.level[a] <= level, b_in = graph.level[b] <= level;
    if (a_in == b_in) continue;
    const int n = number[sets.Find(a_in ? a : b)];
    if (n < 0) continue;
    out.up_gb_s[n] += SpeedOf(topology, link);
    out.up_us[n] = std::max(out.up_us[n], static_cast<float>(link.us));
  }
  return out;
}

// The GPUs of one machine in islands: over NVLink, or those of one NUMA node, over PCIe.
struct Island {
  std::vector<int> gpus;
  double slot_gb_s = 0, up_gb_s = 0;
};

std::vector<Island> IslandsOf(const Shape& shape, bool& assumed) {
  const auto known = [&](double speed, double otherwise) {
    assumed = assumed || speed <= 0;
    return speed > 0 ? speed : otherwise;
  };
  std::vector<Island> islands;
  std::vector<bool> taken(shape.gpus.size(), false);
  for (const NvlinkGroup& group : shape.nvlink) {
    if (group.gpus.size() < 2) continue;
    islands.push_back({group.gpus, known(group.gb_s, kNvlinkGbS), 0});
    for (const int gpu : group.gpus) taken[gpu] = true;
  }
  std::map<int, Island> by_numa;
  for (size_t i = 0; i < shape.gpus.size(); ++i) {
    if (taken[i]) continue;
    Island& island = by_numa[shape.gpus[i].numa];
    island.gpus.push_back(static_cast<int>(i));
    island.slot_gb_s = known(shape.pcie_gb_s, kPcieGbS);
  }
  for (auto& [numa, island] : by_numa) islands.push_back(std::move(island));
  if (shape.gpus.empty()) islands.push_back({{}, kMemoryGbS, 0});
  if (islands.size() > 1) {
    for (Island& island : islands) island.up_gb_s = known(shape.socket_gb_s, kSocketGbS);
  }
  return islands;
}

struct Draft {
  Fabric fabric;
  Level islands, machines;
  bool assumed_inside = false;
};

double NicsOf(const Shape& shape) {
  double sum = 0;
  for (const Nic& nic : shape.nics) sum += nic.gb_s;
  return sum;
}

void AddMachine(const Topology& topology, int machine, int gpus_per_slot, const std::vector<Island>& islands,
                Draft& draft) {
  const Machine& m = topology.machines[machine];
  const Shape& shape = topology.shapes[m.shape];
  Fabric& fabric = draft.fabric;
  const int32_t before = fabric.size();
  for (const Island& island : islands) {
    const int32_t first = fabric.size();
    const int count =
        shape.gpus.empty() ? SlotsOf(shape) : static_cast<int>(island.gpus.size()) / gpus_per_slot;
    for (int i = 0; i < count; ++i) {
      Slot slot{machine, static_cast<int16_t>(fabric.size() - before), false};
      for (int g = 0; g < gpus_per_slot; ++g) {
        const int gpu = shape.gpus.empty() ? -1 : island.gpus[i * gpus_per_slot + g];
        fabric.gpus.push_back(static_cast<int16_t>(gpu));
        slot.broken = slot.broken || std::ranges::binary_search(m.broken_gpus, gpu);
      }
      fabric.slots.push_back(slot);
      fabric.slot_gb_s.push_back(island.slot_gb_s);
    }
    if (count == 0) continue;
    draft.islands.begin.push_back(first);
    draft.islands.up_gb_s.push_back(island.up_gb_s);
    draft.islands.up_us.push_back(kSlotUs);
  }
  fabric.slots_of_machine[machine] = {before, fabric.size()};
  if (fabric.size() == before) return;
  draft.machines.begin.push_back(before);
  draft.machines.names.push_back(m.name);
}

// Machines in an order in which every set of every level is a run of them.
std::vector<int> Order(const Topology& topology, const std::vector<SwitchLevel>& levels) {
  std::vector<int> order(topology.machines.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](int a, int b) {
    for (auto level = levels.rbegin(); level != levels.rend(); ++level) {
      if (level->set_of_machine[a] != level->set_of_machine[b])
        return level->set_of_machine[a] < level->set_of_machine[b];
    }
    return false;
  });
  return order;
}

std::string LevelName(const Graph& graph, int level, bool nvlink) {
  if (nvlink && level == 1) return "NVLink domain";
  const int tier = level - (nvlink ? 1 : 0);
  static constexpr std::array<const char*, 4> kNames = {"leaf", "pod", "spine", "core"};
  const int highest = *std::ranges::max_element(graph.level) - (nvlink ? 1 : 0);
  if (highest == 2 && tier == 2) return "spine";
  return tier <= 4 ? kNames[tier - 1] : absl::StrCat("tier ", tier);
}

// A domain whose uplink nobody knows: half of what comes up from those below, and a microsecond.
void FillUnknown(const Level& children, Level& level, bool& assumed) {
  int child = 0;
  for (int d = 0; d < level.count(); ++d) {
    double sum = 0;
    for (; child < children.count() && children.begin[child] < level.begin[d + 1]; ++child)
      sum += children.up_gb_s[child];
    if (level.up_gb_s[d] <= 0) {
      level.up_gb_s[d] = sum / 2;
      assumed = assumed || level.count() > 1;  // nothing lies above the one that has everything
    }
    if (level.up_us[d] <= 0) level.up_us[d] = kLinkUs;
  }
}

void AddLevel(Level level, Fabric& fabric) {
  level.begin.push_back(fabric.size());
  fabric.levels.push_back(std::move(level));
}

void AddSwitchLevels(const Graph& graph, const std::vector<SwitchLevel>& switches, bool nvlink,
                     Draft& draft) {
  Fabric& fabric = draft.fabric;
  bool assumed = false;
  for (size_t k = 0; k < switches.size(); ++k) {
    const SwitchLevel& sets = switches[k];
    Level level;
    level.name = LevelName(graph, static_cast<int>(k) + 1, nvlink);
    int last = -1;
    for (const int32_t first : draft.machines.begin) {
      const int set = sets.set_of_machine[fabric.slots[first].machine];
      if (set == last) continue;
      last = set;
      level.begin.push_back(first);
      level.up_gb_s.push_back(sets.up_gb_s[set]);
      level.up_us.push_back(sets.up_us[set]);
      level.names.push_back(sets.names[set].empty() ? "(no switch)" : sets.names[set]);
    }
    if (level.begin.size() == fabric.levels.back().begin.size() - 1) {
      // Each has one domain of the level below: it says nothing but another name and perhaps a narrower
      // uplink.
      Level& below = fabric.levels.back();
      for (int d = 0; d < below.count(); ++d) {
        if (level.up_gb_s[d] > 0) below.up_gb_s[d] = std::min(below.up_gb_s[d], level.up_gb_s[d]);
      }
      continue;
    }
    AddLevel(std::move(level), fabric);
    FillUnknown(fabric.levels[fabric.levels.size() - 2], fabric.levels.back(), assumed);
  }
  if (assumed)
    fabric.assumed.push_back("a switch whose uplinks have no gb_s has half of what comes up to it");
  if (fabric.levels.back().count() == 1) return;
  Level all;
  all.name = "unconnected";
  all.begin = {0};
  all.up_gb_s = {0};
  all.up_us = {0};
  all.names = {"everything"};
  for (double& up : fabric.levels.back().up_gb_s) up = std::min(up, kNothingGbS);
  fabric.assumed.push_back(
      absl::StrCat(fabric.levels.back().count(), " parts that no link joins are 1.25 GB/s apart"));
  AddLevel(std::move(all), fabric);
}

void FillMachines(const Graph& graph, Draft& draft) {
  const Topology& topology = graph.topology;
  bool assumed = false;
  for (const int32_t begin : draft.machines.begin) {
    const int m = draft.fabric.slots[begin].machine;
    // Of several kinds of links those that lead nearest count: where there is NVLink to other machines, NICs
    // are what leaves its domain. A cable to another machine is as near as a leaf.
    int nearest = kLevelsMax;
    for (const auto& [other, link] : graph.near[m])
      nearest = std::min(nearest, std::max(1, graph.level[other]));
    double up = 0, us = 0;
    for (const auto& [other, link] : graph.near[m]) {
      if (std::max(1, graph.level[other]) != nearest) continue;
      up += SpeedOf(topology, topology.links[link]);
      us = std::max(us, topology.links[link].us);
    }
    if (up <= 0) up = NicsOf(topology.shapes[topology.machines[m].shape]);
    assumed = assumed || up <= 0;
    draft.machines.up_gb_s.push_back(up > 0 ? up : kMachineGbS);
    draft.machines.up_us.push_back(static_cast<float>(us > 0 ? us : kLinkUs));
  }
  if (assumed && draft.machines.begin.size() > 1)
    draft.fabric.assumed.push_back("a machine whose NICs and links have no gb_s has 12.5 GB/s");
  draft.machines.name = "machine";
  draft.islands.name = "island";
  // What leaves the only island of a machine leaves the machine.
  for (size_t island = 0, m = 0; island < draft.islands.begin.size(); ++island) {
    while (m + 1 < draft.machines.begin.size() && draft.machines.begin[m + 1] <= draft.islands.begin[island])
      ++m;
    double& up = draft.islands.up_gb_s[island];
    if (up <= 0) up = draft.machines.up_gb_s[m];
  }
  if (draft.islands.begin.size() > draft.machines.begin.size()) AddLevel(draft.islands, draft.fabric);
  draft.fabric.machine_level = static_cast<int>(draft.fabric.levels.size());
  AddLevel(draft.machines, draft.fabric);
}

// The numbers per level, from the averages of its domains.
void FillDistances(Fabric& fabric) {
  const size_t count = fabric.levels.size();
  fabric.domain.assign(count, std::vector<int32_t>(fabric.slots.size()));
  for (size_t l = 0; l < count; ++l) {
    const Level& level = fabric.levels[l];
    for (int d = 0; d < level.count(); ++d)
      std::fill(fabric.domain[l].begin() + level.begin[d], fabric.domain[l].begin() + level.begin[d + 1], d);
  }
  double worst = 0, us = kSlotUs;
  for (const double speed : fabric.slot_gb_s) worst += 1 / speed;
  worst /= fabric.size();
  for (size_t l = 0; l < count; ++l) {
    fabric.seconds_per_gb.push_back(worst);
    fabric.us.push_back(us);
    const Level& level = fabric.levels[l];
    if (level.count() <= 1) continue;
    double share = 0, of_us = 0;
    for (int d = 0; d < level.count(); ++d) {
      share += (level.begin[d + 1] - level.begin[d]) / level.up_gb_s[d] / level.count();
      of_us += level.up_us[d] / level.count();
    }
    us += 2 * of_us;
    // A farther way is never as good as a nearer one: it has more hops.
    worst = std::max(worst * 1.02, share);
  }
}

// Rails: machines have several NICs, and those of one position go to a switch of their own.
void FillRails(const Topology& topology, Fabric& fabric) {
  std::map<std::pair<int, int>, int> switch_of;  // machine and NIC
  for (const Link& link : topology.links) {
    if (!link.from.is_switch && link.from.nic >= 0 && link.to.is_switch)
      switch_of[{link.from.index, link.from.nic}] = link.to.index;
  }
  if (switch_of.empty()) return;
  const int machine = switch_of.begin()->first.first;
  std::vector<int> of_first;
  for (const auto& [key, sw] : switch_of) {
    if (key.first == machine) of_first.push_back(sw);
  }
  std::ranges::sort(of_first);
  fabric.has_rails = of_first.size() > 1 && of_first.front() != of_first.back();
  if (fabric.has_rails) fabric.rail_seconds_per_gb = fabric.seconds_per_gb[0];
}

}  // namespace

absl::StatusOr<Fabric> Compile(const Topology& topology, int gpus_per_slot) {
  const Graph graph = MakeGraph(topology);
  Sets sets(static_cast<size_t>(graph.vertices));
  const int highest = topology.links.empty() ? 0 : std::max(1, *std::ranges::max_element(graph.level));
  std::vector<SwitchLevel> switches;
  for (int level = 1; level <= highest; ++level) switches.push_back(SetsOfLevel(graph, level, sets));
  Draft draft;
  draft.fabric.gpus_per_slot = std::max(1, gpus_per_slot);
  draft.fabric.slots_of_machine.resize(topology.machines.size());
  std::vector<std::vector<Island>> islands;
  for (const Shape& shape : topology.shapes) islands.push_back(IslandsOf(shape, draft.assumed_inside));
  for (const int m : Order(topology, switches))
    AddMachine(topology, m, std::max(1, gpus_per_slot), islands[topology.machines[m].shape], draft);
  Fabric& fabric = draft.fabric;
  if (fabric.slots.empty())
    return absl::InvalidArgumentError(
        absl::StrCat("the topology has no place for a rank",
                     gpus_per_slot > 1 ? absl::StrCat(" of ", gpus_per_slot, " GPUs in one island") : ""));
  if (draft.assumed_inside)
    fabric.assumed.push_back(
        "inside of machines: NVLink 150, PCIe 25, between NUMA nodes 20 GB/s where no speed is given");
  if (std::ranges::any_of(topology.machines, [&](const Machine& machine) {
        return topology.shapes[machine.shape].gpus.empty();
      }))
    fabric.assumed.push_back("a rank on a machine without GPUs has 10 GB/s, of memory");
  FillMachines(graph, draft);
  const bool nvlink = std::ranges::count(topology.switches, SwitchKind::kNvlink, &Switch::kind) > 0;
  AddSwitchLevels(graph, switches, nvlink, draft);
  FillDistances(fabric);
  FillRails(topology, fabric);
  return std::move(draft.fabric);
}

}  // namespace gtrain::topology
