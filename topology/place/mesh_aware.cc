// Three steps. A unit is the box of the mesh that keeps most traffic inside of a machine (units.h): for tp 8
// on machines of eight GPUs it is one tp group. The grid of units is cut along the domains of the fabric
// (Bisect), and then improved by swaps. Inside of a unit the axes with the most traffic vary fastest, so that
// islands of a machine get them whole and equal coordinates sit on equal rails.
//
// The bisection weighs a cut by its GB. The time of a step also depends on which links are busy anyway, so
// several weights of the axes are tried and the best outcome is kept; for very large meshes the first alone
// is.
//
// Work: O(units x log(units)) and O(ranks); the swaps are bounded by their number, not by time, so that equal
// input gives equal output.
#include <algorithm>
#include <numeric>

#include "topology/place/cost.h"
#include "topology/place/grid.h"
#include "topology/place/policy.h"
#include "topology/place/units.h"

namespace gtrain::topology {
namespace {

constexpr int64_t kTriesPerUnit = 64;
constexpr int64_t kRanksToAnneal = 16'384, kStepsPerUnit = 1'000, kStepsMax = 400'000;
constexpr int64_t kRanksOfAllTries = 65'536;  // ranks x weights that are tried: bounds the time

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

// Weights for the sides of the grid, all 1 first; at most `count` of them.
std::vector<std::vector<double>> Weights(size_t sides, size_t count) {
  std::vector<std::vector<double>> weights = {std::vector<double>(sides, 1)};
  for (const double factor : {0.5, 2.0, 0.25, 4.0}) {
    for (size_t s = 0; s < sides && sides > 1 && weights.size() < count; ++s) {
      weights.push_back(weights.front());
      weights.back()[s] = factor;
    }
  }
  return weights;
}

class Best {
 public:
  // `is_only`: there will be no other, so nobody needs to know what it costs.
  Best(Objective objective, bool is_only) : objective_(objective), is_only_(is_only) {}

  void Offer(const Fabric& fabric, const Mesh& mesh, std::vector<int32_t> slot_of_rank) {
    double value = 0;
    if (!is_only_) {
      const Cost cost = Evaluate(fabric, mesh, slot_of_rank);
      value = objective_ == Objective::kSeconds ? cost.seconds : cost.total;
    }
    if (!slot_of_rank_.empty() && value >= value_) return;
    slot_of_rank_ = std::move(slot_of_rank);
    value_ = value;
  }
  std::vector<int32_t> Take() { return std::move(slot_of_rank_); }

 private:
  const Objective objective_;
  const bool is_only_;
  std::vector<int32_t> slot_of_rank_;
  double value_ = 0;
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
                const std::vector<int32_t>& usable, Best& best) {
  const Grid grid = MakeGrid(mesh, box);
  const std::vector<int64_t> ranks = RanksOfUnit(mesh, box);
  const UnitPlaces places = MakePlaces(fabric, usable, static_cast<int>(ranks.size()), grid.units);
  if (places.count() < grid.units) return;
  const size_t tries = static_cast<size_t>(std::max<int64_t>(1, kRanksOfAllTries / mesh.ranks()));
  const std::vector<std::vector<double>> all = Weights(grid.sides.size(), tries);
  for (const std::vector<double>& weights : all) {
    Grid weighed = grid;
    for (size_t s = 0; s < weights.size(); ++s) weighed.sides[s].gb *= weights[s];
    std::vector<int32_t> unit_at = Bisect(fabric, weighed, places);
    Improve(fabric, grid, places, kTriesPerUnit * grid.units, unit_at);
    best.Offer(fabric, mesh, SlotsOf(mesh, box, ranks, places, unit_at));
    if (mesh.ranks() > kRanksToAnneal || &weights != &all.front()) continue;
    Anneal(fabric, grid, places, std::min(kStepsPerUnit * grid.units, kStepsMax), unit_at);
    Improve(fabric, grid, places, kTriesPerUnit * grid.units, unit_at);
    best.Offer(fabric, mesh, SlotsOf(mesh, box, ranks, places, unit_at));
  }
}

}  // namespace

std::vector<int32_t> PlaceMeshAware(const Fabric& fabric, const Mesh& mesh,
                                    const std::vector<int32_t>& usable, Objective objective) {
  const std::vector<std::vector<int>> boxes = UnitBoxes(fabric, mesh, usable);
  Best best(objective, boxes.size() == 1 && mesh.ranks() * 2 > kRanksOfAllTries);
  for (const std::vector<int>& box : boxes) PlaceBoxes(fabric, mesh, box, usable, best);
  return best.Take();
}

}  // namespace gtrain::topology
