#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "topology/hostlist.h"
#include "topology/place/plan.h"

namespace gtrain::topology {
namespace {

// The link that is the slowest one of an axis.
std::string LinkOf(const Fabric& fabric, const Topology& topology, const AxisCost& cost) {
  if (cost.level < 0) return "each rank's own link";
  const Level& level = fabric.levels[cost.level];
  const int32_t first = level.begin[cost.domain];
  const std::string name =
      level.names.empty() ? topology.machines[fabric.slots[first].machine].name : level.names[cost.domain];
  return absl::StrFormat("the uplink of %s %s (%.4g GB at %.4g GB/s)", level.name, name, cost.link_gb,
                         level.up_gb_s[cost.domain]);
}

std::string Coordinates(const Mesh& mesh, int64_t rank) {
  std::vector<std::string> parts;
  for (size_t a = 0; a < mesh.axes.size(); ++a)
    parts.push_back(absl::StrCat(mesh.axes[a].name, "=", rank / mesh.StrideOf(a) % mesh.axes[a].size));
  return absl::StrJoin(parts, " ");
}

std::string PlaceText(const Topology& topology, const Fabric& fabric, int32_t slot) {
  const Machine& machine = topology.machines[fabric.slots[slot].machine];
  std::vector<int> gpus;
  for (int g = 0; g < fabric.gpus_per_slot; ++g) {
    const int gpu = fabric.gpus[static_cast<size_t>(slot) * fabric.gpus_per_slot + g];
    if (gpu >= 0) gpus.push_back(gpu);
  }
  if (gpus.empty())
    return absl::StrCat(machine.name, " place ",
                        slot - fabric.slots_of_machine[fabric.slots[slot].machine].first);
  return absl::StrCat(machine.name, " gpu ", PrintNumbers(gpus));
}

std::string RankMap(const Topology& topology, const Fabric& fabric, const Mesh& mesh, const Plan& plan,
                    size_t ranks_max) {
  std::string text;
  const size_t shown = std::min(ranks_max, plan.slot_of_rank.size());
  for (size_t rank = 0; rank < shown; ++rank) {
    absl::StrAppend(&text, "  rank ", rank, "  ", Coordinates(mesh, static_cast<int64_t>(rank)), "  ",
                    PlaceText(topology, fabric, plan.slot_of_rank[rank]), "\n");
  }
  if (shown < plan.slot_of_rank.size())
    absl::StrAppend(&text, "  and ", plan.slot_of_rank.size() - shown,
                    " more ranks (--rankfile-out, --json)\n");
  return text;
}

std::string NotPlaced(const Plan& plan) {
  std::string text = absl::StrCat("not placed: ", plan.reason, "\n");
  for (const Obstacle& o : plan.obstacles)
    absl::StrAppend(&text, "  ", o.slots, o.slots == 1 ? " place of " : " places of ", o.machines, ": ",
                    o.constraint, "\n");
  for (const std::string& unblock : plan.unblocks)
    absl::StrAppend(&text, "  would unblock it: ", unblock, "\n");
  return text;
}

}  // namespace

std::string PrintSeconds(double seconds) {
  if (seconds >= 1) return absl::StrFormat("%.2f s", seconds);
  return seconds >= 1e-3 ? absl::StrFormat("%.1f ms", seconds * 1e3)
                         : absl::StrFormat("%.1f us", seconds * 1e6);
}

std::string PrintDomains(const Fabric& fabric) {
  std::string text;
  for (const Level& level : fabric.levels) {
    int32_t least = fabric.size(), most = 0;
    double narrow = 0, wide = 0;
    for (int d = 0; d < level.count(); ++d) {
      const int32_t slots = level.begin[d + 1] - level.begin[d];
      least = std::min(least, slots);
      most = std::max(most, slots);
      narrow = d == 0 ? level.up_gb_s[d] : std::min(narrow, level.up_gb_s[d]);
      wide = std::max(wide, level.up_gb_s[d]);
    }
    absl::StrAppend(&text, "placement sees ", level.count(), " of ", level.name, ", ",
                    least == most ? absl::StrCat(most) : absl::StrCat(least, " to ", most),
                    most == 1 ? " place each" : " places each");
    if (level.count() > 1)
      absl::StrAppend(
          &text, ", ",
          narrow == wide ? absl::StrFormat("%.4g", wide) : absl::StrFormat("%.4g to %.4g", narrow, wide),
          " GB/s out of it");
    absl::StrAppend(&text, "\n");
  }
  for (const std::string& assumed : fabric.assumed) absl::StrAppend(&text, "assumed: ", assumed, "\n");
  return text;
}

std::string PrintPlan(const Topology& topology, const Fabric& fabric, const Mesh& mesh, const Plan& plan,
                      size_t ranks_max) {
  if (!plan.placed) return NotPlaced(plan);
  std::string text = absl::StrCat("placed: ", plan.reason, "\n");
  absl::StrAppend(&text, RankMap(topology, fabric, mesh, plan, ranks_max));
  for (const int32_t slot : plan.spare_slots)
    absl::StrAppend(&text, "  spare   ", PlaceText(topology, fabric, slot), "\n");
  absl::StrAppend(&text, "predicted communication of a step: ", PrintSeconds(plan.cost.seconds));
  if (plan.bound.seconds > 0)
    absl::StrAppend(&text, "; no placement is below ", PrintSeconds(plan.bound.seconds),
                    absl::StrFormat(" (gap %.1f %%)", (plan.cost.seconds / plan.bound.seconds - 1) * 100));
  absl::StrAppend(&text, "\n");
  size_t slowest = 0;
  for (size_t a = 0; a < mesh.axes.size(); ++a) {
    if (plan.cost.axes[a].seconds > plan.cost.axes[slowest].seconds) slowest = a;
  }
  for (size_t a = 0; a < mesh.axes.size(); ++a) {
    const AxisCost& cost = plan.cost.axes[a];
    if (mesh.axes[a].size <= 1) continue;
    absl::StrAppend(&text, "  ", mesh.axes[a].name, ": ", PrintSeconds(cost.seconds), ", ",
                    absl::StrFormat("%g GB a rank", mesh.axes[a].gb), ", bounded by ",
                    LinkOf(fabric, topology, cost), "; a group lies on at most ", cost.machines_max,
                    cost.machines_max == 1 ? " machine" : " machines",
                    a == slowest ? "  <- the slowest axis" : "", "\n");
  }
  if (fabric.has_rails)
    absl::StrAppend(&text, absl::StrFormat("  on its own rail: %.0f %% of the edges between machines\n",
                                           plan.cost.same_rail * 100));
  for (const Candidate& c : plan.rejected) {
    const double times = plan.cost.seconds > 0 ? c.cost.seconds / plan.cost.seconds : 1;
    if (times < 1.005) {
      absl::StrAppend(&text, "as good: ", c.policy, "\n");
    } else {
      absl::StrAppend(&text, "rejected: ", c.policy, ", ", PrintSeconds(c.cost.seconds),
                      absl::StrFormat(" (%.2f times as long)\n", times));
    }
  }
  for (const Obstacle& o : plan.obstacles)
    absl::StrAppend(&text, "left out: ", o.slots, o.slots == 1 ? " place of " : " places of ", o.machines,
                    ": ", o.constraint, "\n");
  for (const std::string& assumed : fabric.assumed) absl::StrAppend(&text, "assumed: ", assumed, "\n");
  return text;
}

}  // namespace gtrain::topology
