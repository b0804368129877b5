// Three steps. A unit is the box of the mesh that keeps most traffic inside of a machine (units.h): for tp 8
// on machines of eight GPUs it is one tp group. The grid of units is cut along the domains of the fabric
// (Bisect), and then improved by swaps. Inside of a unit the axes with the most traffic vary fastest, so that
// islands of a machine get them whole and equal coordinates sit on equal rails.
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

std::vector<int32_t> PlaceBoxes(const Fabric& fabric, const Mesh& mesh, const std::vector<int>& box,
                                const std::vector<int32_t>& usable) {
  const Grid grid = MakeGrid(mesh, box);
  const std::vector<int64_t> ranks = RanksOfUnit(mesh, box);
  const UnitPlaces places = MakePlaces(fabric, usable, static_cast<int>(ranks.size()), grid.units);
  if (places.count() < grid.units) return {};
  std::vector<int32_t> unit_at = Bisect(fabric, grid, places);
  Improve(fabric, grid, places, kTriesPerUnit * grid.units, unit_at);
  std::vector<int32_t> slot_of_rank(mesh.ranks());
  for (int64_t place = 0; place < grid.units; ++place) {
    const int64_t first = FirstRank(mesh, box, unit_at[place]);
    for (size_t i = 0; i < ranks.size(); ++i)
      slot_of_rank[first + ranks[i]] = places.slots[place * places.size + static_cast<int64_t>(i)];
  }
  return slot_of_rank;
}

}  // namespace

std::vector<int32_t> PlaceMeshAware(const Fabric& fabric, const Mesh& mesh,
                                    const std::vector<int32_t>& usable) {
  std::vector<int32_t> best;
  double best_seconds = 0;
  const std::vector<std::vector<int>> boxes = UnitBoxes(fabric, mesh, usable);
  for (const std::vector<int>& box : boxes) {
    std::vector<int32_t> slots = PlaceBoxes(fabric, mesh, box, usable);
    if (slots.empty()) continue;
    if (boxes.size() == 1) return slots;
    const double seconds = Evaluate(fabric, mesh, slots).seconds;
    if (best.empty() || seconds < best_seconds) {
      best = std::move(slots);
      best_seconds = seconds;
    }
  }
  return best;
}

}  // namespace gtrain::topology
