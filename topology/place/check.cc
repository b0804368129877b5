#include "topology/place/check.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <tuple>

#include "absl/strings/str_cat.h"

namespace gtrain::topology {
namespace {

absl::Status Wrong(const std::string& what) { return absl::FailedPreconditionError(what); }

// One message between two ranks along an axis.
struct Message {
  int64_t from, to;
  double gb;
};

std::vector<int> CoordinatesOf(const Mesh& mesh, int64_t rank) {
  std::vector<int> at(mesh.axes.size());
  for (size_t a = mesh.axes.size(); a-- > 0;) {
    at[a] = static_cast<int>(rank % mesh.axes[a].size);
    rank /= mesh.axes[a].size;
  }
  return at;
}

int64_t RankAt(const Mesh& mesh, const std::vector<int>& at) {
  int64_t rank = 0;
  for (size_t a = 0; a < mesh.axes.size(); ++a) rank = rank * mesh.axes[a].size + at[a];
  return rank;
}

// What `rank` sends along an axis.
std::vector<Message> SentBy(const Mesh& mesh, size_t axis, int64_t rank) {
  const Axis& a = mesh.axes[axis];
  const std::vector<int> at = CoordinatesOf(mesh, rank);
  std::vector<Message> messages;
  const auto send = [&](int other, double gb) {
    if (other < 0 || other >= a.size || other == at[axis]) return;
    std::vector<int> to = at;
    to[axis] = other;
    messages.push_back({rank, RankAt(mesh, to), gb});
  };
  if (a.pattern == Pattern::kRing) send((at[axis] + 1) % a.size, a.gb);
  if (a.pattern == Pattern::kChain) {
    send(at[axis] - 1, a.gb / 2);
    send(at[axis] + 1, a.gb / 2);
  }
  for (int other = 0; a.pattern == Pattern::kAllToAll && other < a.size; ++other)
    send(other, a.gb / (a.size - 1));
  return messages;
}

// The domain of a slot, by the borders of its level.
int DomainAt(const Level& level, int32_t slot) {
  return static_cast<int>(std::ranges::upper_bound(level.begin, slot) - level.begin.begin()) - 1;
}

struct Recount {
  double total = 0, slowest = 0, latency_us = 0;
};

Recount Recompute(const Fabric& fabric, const Mesh& mesh, size_t axis, const std::vector<int32_t>& slots) {
  Recount sums;
  std::map<std::tuple<int, int, bool>, double> load;  // level, domain, leaving
  std::map<int32_t, double> sent;                     // by slot
  for (int64_t rank = 0; rank < mesh.ranks(); ++rank) {
    for (const Message& m : SentBy(mesh, axis, rank)) {
      const int32_t a = slots[m.from], b = slots[m.to];
      sent[a] += m.gb;
      size_t level = 0;
      for (; DomainAt(fabric.levels[level], a) != DomainAt(fabric.levels[level], b); ++level) {
        load[{static_cast<int>(level), DomainAt(fabric.levels[level], a), true}] += m.gb;
        load[{static_cast<int>(level), DomainAt(fabric.levels[level], b), false}] += m.gb;
      }
      double seconds_per_gb = fabric.seconds_per_gb[level];
      const bool other_rail = fabric.has_rails && fabric.slots[a].rail != fabric.slots[b].rail;
      if (other_rail && static_cast<int>(level) > fabric.machine_level &&
          mesh.axes[axis].pattern != Pattern::kAllToAll)
        seconds_per_gb += fabric.rail_seconds_per_gb;
      sums.total += m.gb * seconds_per_gb;
      const int hops = mesh.axes[axis].pattern == Pattern::kRing ? 2 * (mesh.axes[axis].size - 1) : 1;
      sums.latency_us = std::max(sums.latency_us, hops * fabric.us[level]);
    }
  }
  for (const auto& [slot, gb] : sent) sums.slowest = std::max(sums.slowest, gb / fabric.slot_gb_s[slot]);
  for (const auto& [key, gb] : load)
    sums.slowest = std::max(sums.slowest, gb / fabric.levels[std::get<0>(key)].up_gb_s[std::get<1>(key)]);
  return sums;
}

bool Near(double a, double b) { return std::abs(a - b) <= 1e-6 * std::max({1e-9, std::abs(a), std::abs(b)}); }

}  // namespace

absl::Status CheckPlacement(const Fabric& fabric, const Mesh& mesh, const std::vector<int32_t>& usable,
                            const std::vector<int32_t>& slot_of_rank, const Cost& cost) {
  if (static_cast<int64_t>(slot_of_rank.size()) != mesh.ranks())
    return Wrong(absl::StrCat(slot_of_rank.size(), " ranks have a slot, the mesh has ", mesh.ranks()));
  const std::set<int32_t> allowed(usable.begin(), usable.end());
  std::set<int32_t> taken;
  for (size_t rank = 0; rank < slot_of_rank.size(); ++rank) {
    if (!allowed.contains(slot_of_rank[rank]))
      return Wrong(absl::StrCat("rank ", rank, " has slot ", slot_of_rank[rank], ", which is not usable"));
    if (!taken.insert(slot_of_rank[rank]).second)
      return Wrong(absl::StrCat("slot ", slot_of_rank[rank], " has rank ", rank, " and another one"));
  }
  double seconds = 0, total = 0;
  for (size_t axis = 0; axis < mesh.axes.size(); ++axis) {
    if (mesh.axes[axis].size <= 1) continue;
    const Recount sums = Recompute(fabric, mesh, axis, slot_of_rank);
    seconds += sums.slowest + sums.latency_us * 1e-6;
    total += sums.total;
  }
  if (!Near(seconds, cost.seconds))
    return Wrong(absl::StrCat("a step communicates for ", seconds, " s, the plan says ", cost.seconds));
  if (!Near(total, cost.total))
    return Wrong(absl::StrCat("all transfers take ", total, " s, the plan says ", cost.total));
  return absl::OkStatus();
}

}  // namespace gtrain::topology
