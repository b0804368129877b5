// A lost machine's ranks talk to few others, so what a machine would add is a sum over their neighbours'
// places. All free machines are ranked by the first rank alone, and the best few by all ranks: O(free slots +
// ranks lost x few).
#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "topology/place/plan.h"

namespace gtrain::topology {
namespace {

constexpr size_t kFinalistsMax = 64;

class Repair {
 public:
  Repair(const Fabric& fabric, const Mesh& mesh, const std::vector<int32_t>& slot_of_rank,
         const std::vector<int32_t>& free_slots)
      : fabric_(fabric), mesh_(mesh), slot_of_rank_(slot_of_rank), free_(free_slots) {
    for (size_t axis = 0; axis < mesh.axes.size(); ++axis) strides_.push_back(mesh.StrideOf(axis));
  }

  // Ranks that lost their slots on one machine, ascending.
  bool Place(const std::vector<int>& ranks, Replacement& out) {
    lost_.insert(ranks.begin(), ranks.end());
    if (!PlaceTogether(ranks, out) && !PlaceSingly(ranks, out)) return false;
    for (const int rank : ranks) lost_.erase(rank);
    return true;
  }

  std::set<int> lost_;  // their slots do not count

 private:
  struct Run {  // of free slots of one machine
    size_t begin = 0, end = 0;
    double cost = 0;
  };

  int32_t SlotOf(int rank) const {
    const auto moved = moved_.find(rank);
    return moved != moved_.end() ? moved->second : slot_of_rank_[rank];
  }

  // What `rank` would cost at `slot`, with the neighbours that have a place.
  double CostAt(int rank, int32_t slot) const {
    double cost = 0;
    for (size_t a = 0; a < mesh_.axes.size(); ++a) {
      const Axis& axis = mesh_.axes[a];
      if (axis.size <= 1) continue;
      const int64_t at = rank / strides_[a] % axis.size, first = rank - at * strides_[a];
      const auto add = [&](int64_t i, double gb) {
        const int other = static_cast<int>(first + i * strides_[a]);
        if (other != rank && !lost_.contains(other)) cost += gb * fabric_.Distance(slot, SlotOf(other));
      };
      if (axis.pattern == Pattern::kAllToAll) {
        for (int i = 0; i < axis.size; ++i) add(i, 2 * axis.gb / (axis.size - 1));
        continue;
      }
      const bool ring = axis.pattern == Pattern::kRing;
      if (at > 0 || ring) add((at + axis.size - 1) % axis.size, axis.gb);
      if (at + 1 < axis.size || ring) add((at + 1) % axis.size, axis.gb);
    }
    return cost;
  }

  void Take(int rank, size_t index, Replacement& out) {
    out.moves.push_back({rank, slot_of_rank_[rank], free_[index]});
    moved_[rank] = free_[index];
  }

  bool PlaceTogether(const std::vector<int>& ranks, Replacement& out) {
    std::vector<Run> runs;
    for (size_t i = 0; i < free_.size();) {
      const int32_t machine = fabric_.slots[free_[i]].machine;
      const size_t begin = i;
      while (i < free_.size() && fabric_.slots[free_[i]].machine == machine) ++i;
      if (i - begin >= ranks.size()) runs.push_back({begin, i, CostAt(ranks[0], free_[begin])});
    }
    if (runs.empty()) return false;
    const size_t finalists = std::min(runs.size(), kFinalistsMax);
    std::partial_sort(
        runs.begin(), runs.begin() + static_cast<std::ptrdiff_t>(finalists), runs.end(),
        [](const Run& a, const Run& b) { return std::pair(a.cost, a.begin) < std::pair(b.cost, b.begin); });
    const Run* best = nullptr;
    double least = std::numeric_limits<double>::max();
    for (size_t r = 0; r < finalists; ++r) {
      double cost = 0;
      for (size_t i = 0; i < ranks.size(); ++i) cost += CostAt(ranks[i], free_[runs[r].begin + i]);
      if (best != nullptr && cost >= least) continue;
      least = cost;
      best = &runs[r];
    }
    for (size_t i = 0; i < ranks.size(); ++i) Take(ranks[i], best->begin + i, out);
    free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(best->begin),
                free_.begin() + static_cast<std::ptrdiff_t>(best->begin + ranks.size()));
    return true;
  }

  bool PlaceSingly(const std::vector<int>& ranks, Replacement& out) {
    for (const int rank : ranks) {
      if (free_.empty()) return false;
      size_t best = 0;
      double least = std::numeric_limits<double>::max();
      for (size_t i = 0; i < free_.size(); ++i) {
        const double cost = CostAt(rank, free_[i]);
        if (cost >= least) continue;
        least = cost;
        best = i;
      }
      Take(rank, best, out);
      free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(best));
      lost_.erase(rank);
    }
    return true;
  }

  const Fabric& fabric_;
  const Mesh& mesh_;
  const std::vector<int32_t>& slot_of_rank_;
  std::vector<int32_t> free_;
  std::vector<int64_t> strides_;
  std::map<int, int32_t> moved_;
};

}  // namespace

Replacement Replace(const Fabric& fabric, const Mesh& mesh, const std::vector<int32_t>& slot_of_rank,
                    const std::vector<int32_t>& free_slots, const std::vector<int>& lost_machines) {
  // Ranks by the machine they were on; those that had none come last, together.
  std::map<int, std::vector<int>> groups;
  for (const int machine : lost_machines) {
    const auto [first, end] = fabric.slots_of_machine[machine];
    for (size_t rank = 0; rank < slot_of_rank.size(); ++rank) {
      if (slot_of_rank[rank] >= first && slot_of_rank[rank] < end)
        groups[machine].push_back(static_cast<int>(rank));
    }
  }
  for (size_t rank = 0; rank < slot_of_rank.size(); ++rank) {
    if (slot_of_rank[rank] < 0) groups[kMachinesMax].push_back(static_cast<int>(rank));
  }
  std::vector<std::vector<int>> together;
  for (auto& [machine, ranks] : groups) together.push_back(std::move(ranks));
  return ReplaceGroups(fabric, mesh, slot_of_rank, free_slots, together);
}

Replacement ReplaceGroups(const Fabric& fabric, const Mesh& mesh, const std::vector<int32_t>& slot_of_rank,
                          const std::vector<int32_t>& free_slots,
                          const std::vector<std::vector<int>>& groups) {
  Replacement out;
  Repair repair(fabric, mesh, slot_of_rank, free_slots);
  size_t count = 0;
  for (const std::vector<int>& ranks : groups) {
    repair.lost_.insert(ranks.begin(), ranks.end());
    count += ranks.size();
  }
  for (const std::vector<int>& ranks : groups) {
    if (repair.Place(ranks, out)) continue;
    out.moves.clear();
    out.reason = absl::StrCat(count, " ranks lost their places, and ", free_slots.size(), " are free");
    return out;
  }
  out.done = true;
  std::ranges::sort(out.moves, {}, &Move::rank);
  return out;
}

}  // namespace gtrain::topology
