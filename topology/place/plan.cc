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

Refusal RefusedMachine(const Machine& machine, const std::set<std::string>& excluded,
                       const PlanRequest& request) {
  if (!machine.unusable.empty())
    return {absl::StrCat("unusable: ", machine.unusable), "these machines usable again"};
  if (excluded.contains(machine.name))
    return {"excluded by where.exclude", "where.exclude without these machines"};
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

}  // namespace

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
  const std::set<std::string> excluded(request.exclude.begin(), request.exclude.end());
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
    if (s.machine != machine) of_machine = RefusedMachine(m, excluded, request);
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
  if (request.mesh.ranks() + request.spares <= static_cast<int64_t>(usable.size()))
    plan = PlanOn(fabric, request.mesh, usable, request.spares);
  plan.obstacles = std::move(obstacles);
  if (!plan.placed) ExplainNoRoom(fabric, request, static_cast<int64_t>(usable.size()), plan);
  return plan;
}

}  // namespace gtrain::topology
