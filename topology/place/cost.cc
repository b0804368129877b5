#include "topology/place/cost.h"

#include <algorithm>
#include <array>

namespace gtrain::topology {
namespace {

// Sums of one axis while its edges are walked.
class Sums {
 public:
  explicit Sums(const Fabric& fabric) : fabric_(fabric) {
    for (const Level& level : fabric.levels) {
      out_.emplace_back(level.count(), 0.0);
      in_.emplace_back(level.count(), 0.0);
    }
  }

  // One edge from slot a to slot b with what goes each way.
  void Edge(int32_t a, int32_t b, double forth_gb, double back_gb) {
    const int meet = fabric_.Meet(a, b);
    for (int level = 0; level < meet; ++level) {
      const int32_t da = fabric_.domain[level][a], db = fabric_.domain[level][b];
      out_[level][da] += forth_gb;
      in_[level][db] += forth_gb;
      out_[level][db] += back_gb;
      in_[level][da] += back_gb;
    }
    if (meet > fabric_.machine_level) {
      ++between_machines;
      if (fabric_.slots[a].rail == fabric_.slots[b].rail) ++same_rail;
    }
    highest = std::max(highest, meet);
    total += (forth_gb + back_gb) * fabric_.Distance(a, b);
  }

  // `inside` of a group of `size` ranks are in one domain, and each sends `gb` to all others together.
  void Domain(int level, int32_t domain, int inside, int size, double gb) {
    const double leaving = gb * inside * (size - inside) / (size - 1);
    out_[level][domain] += leaving;
    in_[level][domain] += leaving;
  }

  // `slowest`: GB/s of the slowest slot that has a rank.
  void Finish(double per_slot_gb, double slowest, AxisCost& cost) const {
    cost.seconds = per_slot_gb / slowest;
    cost.link_gb = per_slot_gb;
    cost.level = -1;
    for (size_t level = 0; level < out_.size(); ++level) {
      cost.cut_gb.push_back(0);
      for (size_t d = 0; d < out_[level].size(); ++d) {
        cost.cut_gb.back() += out_[level][d];
        const double gb = std::max(out_[level][d], in_[level][d]);
        const double seconds = gb > 0 ? gb / fabric_.levels[level].up_gb_s[d] : 0;
        if (seconds <= cost.seconds) continue;
        cost.seconds = seconds;
        cost.level = static_cast<int>(level);
        cost.domain = static_cast<int>(d);
        cost.link_gb = gb;
      }
    }
  }

  double total = 0;
  int64_t between_machines = 0, same_rail = 0;
  int highest = 0;  // level at which two ends of an edge meet

 private:
  const Fabric& fabric_;
  std::vector<std::vector<double>> out_, in_;
};

// Calls `take` with the first rank of each group along an axis.
template <typename Take>
void EachGroup(const Mesh& mesh, size_t axis, const Take& take) {
  const int64_t stride = mesh.StrideOf(axis), block = stride * mesh.axes[axis].size, ranks = mesh.ranks();
  for (int64_t begin = 0; begin < ranks; begin += block) {
    for (int64_t i = 0; i < stride; ++i) take(begin + i, stride);
  }
}

// Each pair of the group sends to each other; counted by domain, not by pair.
void AllToAll(const Fabric& fabric, const Axis& axis, std::vector<int32_t>& group, Sums& sums) {
  std::ranges::sort(group);
  const int size = axis.size;
  double near_pairs = size;  // ordered, that meet below the level
  for (size_t level = 0; level < fabric.levels.size(); ++level) {
    double pairs = 0;
    for (size_t i = 0; i < group.size();) {
      const int32_t domain = fabric.domain[level][group[i]];
      size_t end = i;
      while (end < group.size() && fabric.domain[level][group[end]] == domain) ++end;
      const int inside = static_cast<int>(end - i);
      pairs += static_cast<double>(inside) * inside;
      if (inside < size) sums.Domain(static_cast<int>(level), domain, inside, size, axis.gb);
      i = end;
    }
    const double more = (pairs - near_pairs) * axis.gb / (size - 1);
    if (more > 0) sums.highest = std::max(sums.highest, static_cast<int>(level));
    sums.total += more * fabric.seconds_per_gb[level];
    near_pairs = pairs;
  }
}

int MachinesOf(const Fabric& fabric, const std::vector<int32_t>& group) {
  int count = 0;
  int32_t last = -1;
  for (const int32_t slot :
       group) {  // neighbours are mostly on one machine; a return to an earlier one counts again
    count += fabric.slots[slot].machine != last ? 1 : 0;
    last = fabric.slots[slot].machine;
  }
  return count;
}

AxisCost CostOf(const Fabric& fabric, const Mesh& mesh, size_t index, const std::vector<int32_t>& slots,
                Cost& all, std::array<int64_t, 2>& rails) {
  const Axis& axis = mesh.axes[index];
  AxisCost cost;
  Sums sums(fabric);
  std::vector<int32_t> group(axis.size);
  EachGroup(mesh, index, [&](int64_t first, int64_t stride) {
    for (int i = 0; i < axis.size; ++i) group[i] = slots[first + i * stride];
    cost.machines_max = std::max(cost.machines_max, MachinesOf(fabric, group));
    if (axis.pattern == Pattern::kAllToAll) return AllToAll(fabric, axis, group, sums);
    const bool ring = axis.pattern == Pattern::kRing;
    for (int i = 0; i + 1 < axis.size; ++i)
      sums.Edge(group[i], group[i + 1], ring ? axis.gb : axis.gb / 2, ring ? 0 : axis.gb / 2);
    if (ring) sums.Edge(group[axis.size - 1], group[0], axis.gb, 0);
  });
  double slowest = fabric.slot_gb_s[slots[0]];
  for (const int32_t slot : slots) slowest = std::min(slowest, fabric.slot_gb_s[slot]);
  const bool pair = axis.pattern == Pattern::kChain && axis.size == 2;
  sums.Finish(pair ? axis.gb / 2 : axis.gb, slowest, cost);
  const int messages = axis.pattern == Pattern::kRing ? 2 * (axis.size - 1) : 1;
  cost.latency_seconds = messages * fabric.us[sums.highest] * 1e-6;
  cost.seconds += cost.latency_seconds;
  cost.total = sums.total;
  all.total += sums.total;
  rails[0] += sums.same_rail;
  rails[1] += sums.between_machines;
  return cost;
}

}  // namespace

Cost Evaluate(const Fabric& fabric, const Mesh& mesh, const std::vector<int32_t>& slot_of_rank) {
  Cost cost;
  std::array<int64_t, 2> rails = {0, 0};
  for (size_t i = 0; i < mesh.axes.size(); ++i) {
    cost.axes.push_back(mesh.axes[i].size > 1 ? CostOf(fabric, mesh, i, slot_of_rank, cost, rails)
                                              : AxisCost{});
    cost.seconds += cost.axes.back().seconds;
  }
  if (fabric.has_rails && rails[1] > 0)
    cost.same_rail = static_cast<double>(rails[0]) / static_cast<double>(rails[1]);
  return cost;
}

}  // namespace gtrain::topology
