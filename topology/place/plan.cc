#include "topology/place/plan.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "topology/hostlist.h"
#include "topology/place/policy.h"

namespace gtrain::topology {
namespace {

struct Refusal {
  std::string constraint, remedy;
};

bool IsAmong(const Machine& machine, const MachineNames& names) {
  return names.contains(machine.name) || names.contains(ShortName(machine.name));
}

Refusal RefusedMachine(const Machine& machine, const PlanRequest& request) {
  if (!machine.unusable.empty())
    return {absl::StrCat("unusable: ", machine.unusable), "these machines usable again"};
  if (IsAmong(machine, request.exclude))
    return {"excluded by where.exclude", "where.exclude without these machines"};
  if (!request.hosts.empty() && !IsAmong(machine, request.hosts))
    return {"not in where.hosts", "where.hosts with these machines"};
  for (const auto& [key, value] : request.labels) {
    const auto it = machine.labels.find(key);
    if (it != machine.labels.end() && it->second == value) continue;
    return {absl::StrCat("no label ", key, "=", value), absl::StrCat("where.labels without ", key)};
  }
  return {};
}

bool WantedModel(const std::string& model, const std::vector<std::string>& types) {
  const std::string lower = absl::AsciiStrToLower(model);
  return types.empty() || std::ranges::any_of(types, [&](const std::string& type) {
           return absl::StrContains(lower, absl::AsciiStrToLower(type));
         });
}

Refusal RefusedSlot(const Shape& shape, const Fabric& fabric, int32_t slot, const PlanRequest& request) {
  const Slot& s = fabric.slots[slot];
  if (s.broken) return {"a broken GPU", "these GPUs mended"};
  for (int g = 0; g < fabric.gpus_per_slot; ++g) {
    const int gpu = fabric.gpus[static_cast<size_t>(slot) * fabric.gpus_per_slot + g];
    if (request.gpus && gpu < 0) return {"no GPU", "resources.gpus: 0"};
    if (!WantedModel(gpu < 0 ? "" : shape.gpus[gpu].model, request.gpu_types))
      return {absl::StrCat("no GPU of type ", absl::StrJoin(request.gpu_types, " or ")),
              "another resources.gpu_type"};
  }
  return {};
}

std::string Counted(int64_t places) { return absl::StrCat(places, places == 1 ? " place" : " places"); }

void ExplainNoRoom(const Fabric& fabric, const PlanRequest& request, int64_t usable, Plan& plan) {
  const int64_t needed = request.mesh.ranks() + request.spares;
  plan.reason = absl::StrCat("needs ", Counted(needed), " for mesh ", PrintMesh(request.mesh),
                             request.spares > 0 ? absl::StrCat(" and ", request.spares, " spares") : "",
                             "; the topology has ", fabric.size(), ", of which ", usable, " may be taken");
  for (const Obstacle& obstacle : plan.obstacles) {
    const bool enough = usable + obstacle.slots >= needed;
    plan.unblocks.push_back(absl::StrCat(obstacle.remedy, " (", Counted(obstacle.slots), " more",
                                         enough ? ")" : ", not enough alone)"));
  }
  plan.unblocks.push_back(absl::StrCat("machines with ", Counted(needed - usable), " more"));
  const auto dp = std::ranges::find(request.mesh.axes, "dp", &Axis::name);
  if (dp == request.mesh.axes.end()) return;
  const int64_t unit = request.mesh.ranks() / dp->size, fits = (usable - request.spares) / unit;
  if (fits > 0) plan.unblocks.push_back(absl::StrCat("dp: ", fits, " instead of ", dp->size));
}

// Places of `count` machines near each other: of the smallest domain that has so many, and one of `first` if
// there are any. Empty: there is none.
std::vector<int32_t> NearEachOther(const Fabric& fabric, const std::vector<std::vector<int32_t>>& machines,
                                   size_t count, const std::set<int>* first) {
  const auto comes_first = [&](const std::vector<int32_t>& slots) {
    return first == nullptr || first->contains(fabric.slots[slots[0]].machine);
  };
  std::vector<int32_t> chosen;
  for (size_t level = fabric.machine_level; level < fabric.levels.size() && chosen.empty(); ++level) {
    std::map<int32_t, std::vector<const std::vector<int32_t>*>> domains;
    for (const std::vector<int32_t>& slots : machines)
      domains[fabric.domain[level][slots[0]]].push_back(&slots);
    std::vector<const std::vector<int32_t>*> best;
    for (auto& [domain, of_domain] : domains) {
      const auto it = std::ranges::find_if(of_domain, [&](const auto* slots) { return comes_first(*slots); });
      if (of_domain.size() < count || it == of_domain.end()) continue;
      if (!best.empty() && best.size() <= of_domain.size()) continue;
      std::rotate(of_domain.begin(), it, it + 1);
      best = of_domain;
    }
    for (size_t i = 0; i < std::min(count, best.size()); ++i)
      chosen.insert(chosen.end(), best[i]->begin(), best[i]->end());
  }
  std::ranges::sort(chosen);
  return chosen;
}

// On whole machines alone.
void PlanByMachines(const Topology& topology, const Fabric& fabric, const PlanRequest& request,
                    const std::vector<int32_t>& usable, Plan& plan) {
  const int64_t each = request.ranks_per_machine, count = request.mesh.ranks() / each;
  const auto machines = WholeMachines(fabric, usable, static_cast<size_t>(each));
  const std::set<int> first = MachinesCalled(topology, request.rank0);
  const bool rank0_fits = std::ranges::any_of(
      machines, [&](const auto& slots) { return first.contains(fabric.slots[slots[0]].machine); });
  const std::vector<int32_t> chosen =
      NearEachOther(fabric, machines, static_cast<size_t>(count), rank0_fits ? &first : nullptr);
  if (chosen.empty() || request.mesh.ranks() + request.spares > std::ssize(usable)) {
    plan.reason =
        absl::StrCat("needs ", count, count == 1 ? " machine" : " machines", " with ", Counted(each),
                     " for ranks; the topology has ", machines.size(), " that may be taken");
    for (const Obstacle& obstacle : plan.obstacles)
      plan.unblocks.push_back(absl::StrCat(obstacle.remedy, " (", Counted(obstacle.slots), " more)"));
    plan.unblocks.push_back("another ranks_per_node");
    return;
  }
  std::vector<Obstacle> obstacles = std::move(plan.obstacles);
  plan = PlanOn(fabric, request.mesh, chosen, 0);
  plan.obstacles = std::move(obstacles);
  absl::StrAppend(&plan.reason, ", ", each, " on each machine");
  if (request.spares > 0) plan.spare_slots = SpareSlots(fabric, usable, plan.slot_of_rank, request.spares);
}

}  // namespace

std::vector<std::vector<int32_t>> WholeMachines(const Fabric& fabric, const std::vector<int32_t>& usable,
                                                size_t each) {
  std::vector<std::vector<int32_t>> machines;
  int32_t last = -1;
  for (const int32_t slot : usable) {
    if (fabric.slots[slot].machine != std::exchange(last, fabric.slots[slot].machine))
      machines.emplace_back();
    if (machines.back().size() < each) machines.back().push_back(slot);
  }
  std::erase_if(machines, [&](const std::vector<int32_t>& slots) { return slots.size() < each; });
  return machines;
}

std::set<int> MachinesCalled(const Topology& topology, const MachineNames& names) {
  std::set<int> called;
  MachineNames found;
  std::map<std::string, std::vector<int>, std::less<>> by_short;
  for (size_t m = 0; m < topology.machines.size() && !names.empty(); ++m) {
    const std::string& name = topology.machines[m].name;
    if (names.contains(name)) {
      called.insert(static_cast<int>(m));
      found.insert(name);
    } else if (const absl::string_view part = ShortName(name); names.contains(part)) {
      by_short[std::string(part)].push_back(static_cast<int>(m));
    }
  }
  for (const auto& [name, machines] : by_short) {
    if (machines.size() == 1 && !found.contains(name)) called.insert(machines[0]);
  }
  return called;
}

std::string PrintMesh(const Mesh& mesh) {
  return absl::StrCat("{",
                      absl::StrJoin(mesh.axes, ", ",
                                    [](std::string* out, const Axis& axis) {
                                      absl::StrAppend(out, axis.name, ": ", axis.size);
                                    }),
                      "}");
}

std::vector<int32_t> UsableSlots(const Topology& topology, const Fabric& fabric, const PlanRequest& request,
                                 std::vector<Obstacle>* obstacles) {
  struct Count {
    int slots = 0;
    std::vector<std::string> machines;
    std::string remedy;
  };
  std::map<std::string, Count> counts;
  std::vector<int32_t> usable;
  usable.reserve(fabric.slots.size());
  int32_t machine = -1;
  Refusal of_machine;
  for (int32_t slot = 0; slot < fabric.size(); ++slot) {
    const Slot& s = fabric.slots[slot];
    const Machine& m = topology.machines[s.machine];
    if (s.machine != machine) of_machine = RefusedMachine(m, request);
    machine = s.machine;
    const Refusal refusal = !of_machine.constraint.empty()
                                ? of_machine
                                : RefusedSlot(topology.shapes[m.shape], fabric, slot, request);
    if (refusal.constraint.empty()) {
      usable.push_back(slot);
      continue;
    }
    if (obstacles == nullptr) continue;
    Count& count = counts[refusal.constraint];
    ++count.slots;
    count.remedy = refusal.remedy;
    if (count.machines.empty() || count.machines.back() != m.name) count.machines.push_back(m.name);
  }
  for (const auto& [constraint, count] : counts)
    obstacles->push_back({constraint, count.slots, PrintHostlist(count.machines), count.remedy});
  return usable;
}

std::vector<int32_t> SpareSlots(const Fabric& fabric, const std::vector<int32_t>& usable,
                                const std::vector<int32_t>& slot_of_rank, int count) {
  std::vector<int32_t> taken = slot_of_rank, free;
  std::ranges::sort(taken);
  std::ranges::set_difference(usable, taken, std::back_inserter(free));
  std::vector<std::vector<int>> ranks;  // [level][domain]
  for (size_t level = fabric.machine_level; level < fabric.levels.size(); ++level) {
    ranks.emplace_back(fabric.levels[level].count(), 0);
    for (const int32_t slot : slot_of_rank) ++ranks.back()[fabric.domain[level][slot]];
  }
  std::vector<std::pair<std::vector<int>, int32_t>> order;  // most ranks near first
  for (const int32_t slot : free) {
    std::vector<int> near;
    // A machine without ranks is the better one: what ends one of its neighbours does not end the spare.
    near.push_back(ranks[0][fabric.domain[fabric.machine_level][slot]]);
    for (size_t l = 1; l < ranks.size(); ++l)
      near.push_back(-ranks[l][fabric.domain[fabric.machine_level + l][slot]]);
    order.emplace_back(std::move(near), slot);
  }
  std::ranges::sort(order);
  std::vector<int32_t> spares;
  for (size_t i = 0; i < std::min(static_cast<size_t>(count), order.size()); ++i)
    spares.push_back(order[i].second);
  return spares;
}

Plan PlanOn(const Fabric& fabric, const Mesh& mesh, const std::vector<int32_t>& usable, int spares) {
  struct Policy {
    const char* name;
    std::vector<int32_t> slots;
  };
  std::vector<Policy> policies = {{"mesh-aware", PlaceMeshAware(fabric, mesh, usable)},
                                  {"contiguous", PlaceContiguous(fabric, mesh, usable)},
                                  {"spread", PlaceSpread(fabric, mesh, usable)}};
  std::vector<Cost> costs;
  for (const Policy& policy : policies) costs.push_back(Evaluate(fabric, mesh, policy.slots));
  size_t best = 0;
  for (size_t i = 1; i < costs.size(); ++i) {
    if (costs[i].seconds < costs[best].seconds * (1 - 1e-9)) best = i;
  }
  Plan plan;
  plan.placed = true;
  plan.policy = policies[best].name;
  plan.slot_of_rank = std::move(policies[best].slots);
  plan.cost = costs[best];
  for (size_t i = 0; i < costs.size(); ++i) {
    if (i != best) plan.rejected.push_back({policies[i].name, costs[i]});
  }
  plan.bound = LowerBound(fabric, mesh, usable);
  if (spares > 0) plan.spare_slots = SpareSlots(fabric, usable, plan.slot_of_rank, spares);
  plan.reason =
      absl::StrFormat("%d ranks of mesh %s by the policy %s", mesh.ranks(), PrintMesh(mesh), plan.policy);
  return plan;
}

Plan MakePlan(const Topology& topology, const Fabric& fabric, const PlanRequest& request) {
  std::vector<Obstacle> obstacles;
  const std::vector<int32_t> usable = UsableSlots(topology, fabric, request, &obstacles);
  Plan plan;
  if (request.ranks_per_machine > 0) {
    plan.obstacles = std::move(obstacles);
    PlanByMachines(topology, fabric, request, usable, plan);
    return plan;
  }
  if (request.mesh.ranks() + request.spares <= static_cast<int64_t>(usable.size()))
    plan = PlanOn(fabric, request.mesh, usable, request.spares);
  plan.obstacles = std::move(obstacles);
  if (!plan.placed) ExplainNoRoom(fabric, request, static_cast<int64_t>(usable.size()), plan);
  return plan;
}

}  // namespace gtrain::topology
