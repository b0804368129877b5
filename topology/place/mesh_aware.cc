// Three steps. A unit is the box of the mesh that keeps most traffic inside of a machine (units.h): for tp 8
// on machines of eight GPUs it is one tp group. The grid of units is cut along the domains of the fabric
// (Divide), and then improved by swaps. Inside of a unit the axes with the most traffic vary fastest, so that
// islands of a machine get them whole and equal coordinates sit on equal rails.
//
// Both weigh a cut by its GB. The time of a step also depends on which links are busy anyway, so for it
// several weights of the axes and several ways to cut are tried, with the swaps and without, and the best
// outcome is kept; for very large meshes the first alone is.
//
// Work: O(units x log(units)) and O(ranks); the swaps are bounded by their number, not by time, so that equal
// input gives equal output.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "topology/place/cost.h"
#include "topology/place/grid.h"
#include "topology/place/policy.h"
#include "topology/place/units.h"

namespace gtrain::topology {
namespace {

constexpr int64_t kTriesPerUnit = 64;
constexpr int64_t kRanksOfAllTries = 65'536;  // ranks x attempts: bounds the time

// Ranks of the mesh in a unit at the origin, in the order in which they take the slots of a place.
std::vector<int64_t> RanksOfUnit(const Mesh& mesh, const std::vector<int>& box) {
  std::vector<size_t> axes(box.size());
  std::iota(axes.begin(), axes.end(), 0);
  std::ranges::stable_sort(axes, std::greater<>(), [&](size_t a) { return mesh.axes[a].gb; });
  std::vector<int64_t> ranks = {0};
  for (const size_t a : axes) {  // the first of them varies fastest
    const size_t before = ranks.size();
    for (int at = 1; at < box[a]; ++at) {
      for (size_t i = 0; i < before; ++i) ranks.push_back(ranks[i] + at * mesh.StrideOf(a));
    }
  }
  return ranks;
}

// The rank at the origin of each unit of the grid.
int64_t FirstRank(const Mesh& mesh, const std::vector<int>& box, int64_t unit) {
  int64_t rank = 0;
  for (size_t a = mesh.axes.size(); a-- > 0;) {
    const int count = mesh.axes[a].size / box[a];
    rank += unit % count * box[a] * mesh.StrideOf(a);
    unit /= count;
  }
  return rank;
}

struct Attempt {
  int nth = -1;                 // for Divide
  std::vector<double> weights;  // of the sides of the grid
};

// All weights 1 first; at most `count` of them.
std::vector<Attempt> Attempts(size_t sides, size_t count) {
  std::vector<Attempt> attempts;
  for (const double factor : {1.0, 0.5, 2.0, 0.25, 4.0}) {
    for (size_t s = 0; s < (factor == 1 ? 1 : sides); ++s) {
      for (int nth = -1; nth < 4 && attempts.size() < count; ++nth) {
        attempts.push_back({nth, std::vector<double>(sides, 1)});
        if (factor != 1) attempts.back().weights[s] = factor;
      }
    }
  }
  return attempts;
}

class Best {
 public:
  // `is_only`: there will be no other, so nobody needs to know what it costs.
  Best(Objective objective, bool is_only) : objective_(objective), is_only_(is_only) {}

  void Offer(const Fabric& fabric, const Mesh& mesh, std::vector<int32_t> slot_of_rank) {
    Cost cost;
    if (!is_only_) cost = Evaluate(fabric, mesh, slot_of_rank);
    if (!slot_of_rank_.empty() && !IsBetter(cost)) return;
    slot_of_rank_ = std::move(slot_of_rank);
    seconds_ = cost.seconds;
    total_ = cost.total;
  }
  std::vector<int32_t> Take() { return std::move(slot_of_rank_); }

 private:
  // Often several take equally long, as a link that none can spare decides; then less traffic is better.
  bool IsBetter(const Cost& cost) const {
    const bool by_time =
        objective_ == Objective::kSeconds && std::abs(cost.seconds - seconds_) > 1e-9 * seconds_;
    return by_time ? cost.seconds < seconds_ : cost.total < total_;
  }

  const Objective objective_;
  const bool is_only_;
  std::vector<int32_t> slot_of_rank_;
  double seconds_ = 0, total_ = 0;
};

std::vector<int32_t> SlotsOf(const Mesh& mesh, const std::vector<int>& box, const std::vector<int64_t>& ranks,
                             const UnitPlaces& places, const std::vector<int32_t>& unit_at) {
  std::vector<int32_t> slot_of_rank(mesh.ranks());
  for (int64_t place = 0; place < static_cast<int64_t>(unit_at.size()); ++place) {
    const int64_t first = FirstRank(mesh, box, unit_at[place]);
    for (size_t i = 0; i < ranks.size(); ++i)
      slot_of_rank[first + ranks[i]] = places.slots[place * places.size + static_cast<int64_t>(i)];
  }
  return slot_of_rank;
}

void PlaceBoxes(const Fabric& fabric, const Mesh& mesh, const std::vector<int>& box,
                const std::vector<int32_t>& usable, Objective objective, Best& best) {
  const Grid grid = MakeGrid(mesh, box);
  const std::vector<int64_t> ranks = RanksOfUnit(mesh, box);
  const UnitPlaces places = MakePlaces(fabric, usable, static_cast<int>(ranks.size()), grid.units);
  if (places.count() < grid.units) return;
  const int64_t tries =
      objective == Objective::kTotal ? 1 : std::max<int64_t>(1, kRanksOfAllTries / mesh.ranks());
  for (const Attempt& attempt : Attempts(grid.sides.size(), static_cast<size_t>(tries))) {
    Grid weighed = grid;
    for (size_t s = 0; s < grid.sides.size(); ++s) weighed.sides[s].gb *= attempt.weights[s];
    std::vector<int32_t> unit_at = Divide(fabric, weighed, places, attempt.nth);
    if (tries > 1) best.Offer(fabric, mesh, SlotsOf(mesh, box, ranks, places, unit_at));
    Improve(fabric, grid, places, kTriesPerUnit * grid.units, unit_at);
    best.Offer(fabric, mesh, SlotsOf(mesh, box, ranks, places, unit_at));
  }
}

}  // namespace

std::vector<int32_t> PlaceMeshAware(const Fabric& fabric, const Mesh& mesh,
                                    const std::vector<int32_t>& usable, Objective objective) {
  const std::vector<std::vector<int>> boxes = UnitBoxes(fabric, mesh, usable);
  const bool once = objective == Objective::kTotal || mesh.ranks() * 2 > kRanksOfAllTries;
  Best best(objective, boxes.size() == 1 && once);
  for (const std::vector<int>& box : boxes) PlaceBoxes(fabric, mesh, box, usable, objective, best);
  return best.Take();
}

}  // namespace gtrain::topology
