// Bisect: a run of places and a set of as many units are cut in two, again and again, until a run lies in one
// smallest domain. Places are cut where two domains meet, of the widest level that has such a border; units
// are cut across one axis, in the order of that axis first and the others after it, so that the first half is
// whole layers and at most one begun layer. Which border and which axis: those with the least GB over the
// cut, a begun layer counted. A set that is cut this way stays nearly a box, as in recursive coordinate
// bisection of meshes; other than there the places decide where to cut, so that holes cost only what the
// begun layers do.
//
// Improve: a unit that would gain in the domain of a neighbour changes places with one that loses less there.
// A unit that gains nothing by itself is never the first of a swap, which leaves out nearly all of them at
// once.
//
// Anneal: holes leave no box whole, and then swaps that only gain end far above the best. It is for meshes
// small enough that its thousands of steps a unit take some tens of milliseconds.
//
// Rejected: ordering all units on a space-filling curve. On clean trees it equals this where all sizes are
// powers of two, and is worse elsewhere.
#include "topology/place/grid.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/rng.h"

namespace gtrain::topology {
namespace {

using Extents = std::array<std::pair<int, int>, kGridAxesMax>;  // first and last of a set along each side

class Bisection {
 public:
  Bisection(const Fabric& fabric, const Grid& grid, const UnitPlaces& places)
      : fabric_(fabric), grid_(grid), places_(places), units_(grid.units), keyed_(grid.units) {
    for (int64_t i = 0; i < grid.units; ++i) units_[i] = static_cast<int32_t>(i);
  }

  std::vector<int32_t> Run() {
    Cut(0, grid_.units);
    return std::move(units_);
  }

 private:
  struct Choice {
    double gb = std::numeric_limits<double>::max();
    int64_t border = 0;
    std::array<size_t, kGridAxesMax> order = {};  // sides, the slowest first
  };

  Extents ExtentsOf(int64_t begin, int64_t end) const {
    Extents extents;
    for (size_t s = 0; s < grid_.sides.size(); ++s) {
      const Grid::Side& side = grid_.sides[s];
      auto& [first, last] = extents[s];
      first = side.size;
      last = -1;
      for (int64_t i = begin; i < end; ++i) {
        const int at = grid_.At(units_[i], side);
        first = std::min(first, at);
        last = std::max(last, at);
      }
    }
    return extents;
  }

  // GB over a cut across side s of a set of `count` units: a whole layer, for both ends of a ring.
  double LayerGb(size_t s, const Extents& extents, double count) const {
    const Grid::Side& side = grid_.sides[s];
    const double extent = extents[s].second - extents[s].first + 1, lines = count / extent;
    if (extent <= 1) return std::numeric_limits<double>::max();
    if (side.pattern == Pattern::kAllToAll) return lines * side.gb * extent * extent / 2 / (side.size - 1);
    const bool closed = side.pattern == Pattern::kRing && extent >= side.size;
    return lines * side.gb * (closed ? 2 : 1);
  }

  // Sides with the cheapest cut first.
  std::array<size_t, kGridAxesMax> Order(const Extents& extents, double count) const {
    std::array<size_t, kGridAxesMax> order = {};
    for (size_t s = 0; s < grid_.sides.size(); ++s) order[s] = s;
    std::stable_sort(
        order.begin(), order.begin() + static_cast<std::ptrdiff_t>(grid_.sides.size()),
        [&](size_t a, size_t b) { return LayerGb(a, extents, count) < LayerGb(b, extents, count); });
    return order;
  }

  // What a begun layer adds: an edge of the layer, which the second-cheapest side has across it.
  double BegunGb(size_t slowest, const Extents& extents, double layer) const {
    double least = 0;
    for (size_t s = 0; s < grid_.sides.size(); ++s) {
      const double extent = extents[s].second - extents[s].first + 1;
      if (s == slowest || extent <= 1) continue;
      const double gb = grid_.sides[s].gb * layer / extent;
      if (least == 0 || gb < least) least = gb;
    }
    return least;
  }

  // Borders between domains of `level` in the middle third of [begin, end); else the one nearest to the
  // middle.
  std::vector<int64_t> Borders(int level, int64_t begin, int64_t end) const {
    const auto domain = [&](int64_t i) { return fabric_.domain[level][places_.first(i)]; };
    // The end of the run of places that have the domain of place i.
    const auto next = [&](int64_t i) {
      const int32_t limit = fabric_.levels[level].begin[domain(i) + 1];
      int64_t low = i + 1, high = end;
      while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (places_.first(middle) < limit) {
          low = middle + 1;
        } else {
          high = middle;
        }
      }
      return low;
    };
    constexpr size_t kBordersMax = 8;
    const int64_t middle = begin + (end - begin) / 2, third = (end - begin) / 3;
    std::vector<int64_t> borders;
    int64_t nearest = begin;
    for (int64_t i = next(begin); i < end; i = next(i)) {
      if (nearest == begin || std::abs(i - middle) < std::abs(nearest - middle)) nearest = i;
      if (i >= begin + third && i <= end - third) borders.push_back(i);
    }
    std::ranges::stable_sort(borders, {}, [&](int64_t i) { return std::abs(i - middle); });
    if (borders.size() > kBordersMax) borders.resize(kBordersMax);
    if (borders.empty()) borders.push_back(nearest);
    return borders;
  }

  Choice Choose(int level, int64_t begin, int64_t end) const {
    const double count = static_cast<double>(end - begin);
    const Extents extents = ExtentsOf(begin, end);
    const std::array<size_t, kGridAxesMax> order = Order(extents, count);
    Choice best;
    for (const int64_t border : Borders(level, begin, end)) {
      for (size_t s = 0; s < grid_.sides.size(); ++s) {
        const double gb = LayerGb(order[s], extents, count);
        if (gb == std::numeric_limits<double>::max()) continue;
        const int extent = extents[order[s]].second - extents[order[s]].first + 1;
        const int64_t layer = std::max<int64_t>(1, (end - begin) / extent);
        const double all =
            gb + ((border - begin) % layer == 0 ? 0 : BegunGb(order[s], extents, static_cast<double>(layer)));
        if (all >= best.gb) continue;
        best = {all, border, order};
        std::rotate(best.order.begin(), best.order.begin() + static_cast<std::ptrdiff_t>(s),
                    best.order.begin() + static_cast<std::ptrdiff_t>(s) + 1);
      }
    }
    return best;
  }

  void Cut(int64_t begin, int64_t end) {
    const int meet = end - begin <= 1 ? 0 : fabric_.Meet(places_.first(begin), places_.first(end - 1));
    if (meet <= 0) {
      std::sort(units_.begin() + begin, units_.begin() + end);
      return;
    }
    const Choice choice = Choose(meet - 1, begin, end);
    for (int64_t i = begin; i < end; ++i) {
      uint64_t key = 0;
      for (size_t s = 0; s < grid_.sides.size(); ++s) {
        const Grid::Side& side = grid_.sides[choice.order[s]];
        key = key * static_cast<uint64_t>(side.size) + static_cast<uint64_t>(grid_.At(units_[i], side));
      }
      keyed_[i] = {key, units_[i]};
    }
    std::nth_element(keyed_.begin() + begin, keyed_.begin() + choice.border, keyed_.begin() + end);
    for (int64_t i = begin; i < end; ++i) units_[i] = keyed_[i].second;
    Cut(begin, choice.border);
    Cut(choice.border, end);
  }

  const Fabric& fabric_;
  const Grid& grid_;
  const UnitPlaces& places_;
  std::vector<int32_t> units_;
  std::vector<std::pair<uint64_t, int32_t>> keyed_;
};

class Search {
 public:
  Search(const Fabric& fabric, const Grid& grid, const UnitPlaces& places, std::vector<int32_t>& unit_at)
      : fabric_(fabric), grid_(grid), places_(places), unit_at_(unit_at), place_of_(unit_at.size()) {
    for (size_t i = 0; i < unit_at.size(); ++i) place_of_[unit_at[i]] = static_cast<int32_t>(i);
  }

  // One look at every unit. Returns how many were swapped.
  int64_t Pass(int64_t& tries_left) {
    int64_t swapped = 0;
    for (int64_t unit = 0; unit < grid_.units && tries_left > 0; ++unit) {
      std::array<int32_t, 8> seen;
      size_t seen_count = 0;
      // Neighbours far away, by the domain just below the one where both meet, and by the machines' own
      // switch.
      grid_.EachNeighbour(unit, [&](int64_t other, double) {
        const int32_t target = DomainOf(place_of_[other]);
        if (target == DomainOf(place_of_[unit]) || seen_count == seen.size()) return;
        if (std::find(seen.begin(), seen.begin() + seen_count, target) != seen.begin() + seen_count) return;
        seen[seen_count++] = target;
        swapped += TrySwap(static_cast<int32_t>(unit), place_of_[other], tries_left) ? 1 : 0;
      });
    }
    return swapped;
  }

  void Anneal(int64_t steps) {
    std::vector<std::pair<int64_t, int64_t>> range(fabric_.levels[level()].count(),
                                                   {0, 0});  // places of domains
    for (int64_t place = grid_.units; place-- > 0;) {
      auto& [first, end] = range[DomainOf(place)];
      if (end == 0) end = place + 1;
      first = place;
    }
    double gb = 0;
    for (const Grid::Side& side : grid_.sides) gb = std::max(gb, side.gb);
    const double hottest = kHottest * gb * fabric_.seconds_per_gb.back();
    Rng rng(1);
    std::vector<int64_t> near;
    for (int64_t step = 0; step < steps; ++step) {
      const double done = static_cast<double>(step) / static_cast<double>(steps);
      const double heat = hottest * std::pow(kColdest / kHottest, done);
      const auto unit = static_cast<int32_t>(rng.Below(static_cast<uint64_t>(grid_.units)));
      near.clear();
      grid_.EachNeighbour(unit, [&](int64_t other, double) { near.push_back(other); });
      const int32_t domain = DomainOf(place_of_[near[rng.Below(near.size())]]);
      const int64_t place = place_of_[unit];
      if (domain == DomainOf(place)) continue;
      const auto [first, end] = range[domain];
      const int64_t other = first + static_cast<int64_t>(rng.Below(static_cast<uint64_t>(end - first)));
      const int32_t partner = unit_at_[other];
      const double before = CostAt(unit, place, -1, 0) + CostAt(partner, other, -1, 0);
      const double after = CostAt(unit, other, partner, place) + CostAt(partner, place, unit, other);
      if (after > before && rng.Unit() >= std::exp((before - after) / heat)) continue;
      Swap(place, other);
    }
  }

 private:
  static constexpr double kHottest = 0.5, kColdest = 0.02;  // of the most that an edge costs
  static constexpr int64_t kPartnersMax = 64;
  static constexpr double kGainMin = 1e-9;

  // The level whose domains units move between: the first one above machines.
  int level() const {
    return std::min(fabric_.machine_level + 1, static_cast<int>(fabric_.levels.size()) - 1);
  }
  int32_t DomainOf(int64_t place) const { return fabric_.domain[level()][places_.first(place)]; }

  // What unit costs at `place` with its neighbours where they are; `partner` counts as if it were at
  // `partner_place`.
  double CostAt(int32_t unit, int64_t place, int32_t partner, int64_t partner_place) const {
    double cost = 0;
    grid_.EachNeighbour(unit, [&](int64_t other, double gb) {
      const int64_t at = other == partner ? partner_place : place_of_[other];
      cost += gb * fabric_.Distance(places_.first(place), places_.first(at));
    });
    return cost;
  }

  // Swaps the unit with the best partner in the domain of `target`, if that is a gain.
  bool TrySwap(int32_t unit, int64_t target, int64_t& tries_left) {
    const int64_t place = place_of_[unit];
    const int32_t domain = DomainOf(target);
    int64_t first = target, last = target;
    while (first > 0 && DomainOf(first - 1) == domain && target - first < kPartnersMax / 2) --first;
    while (last + 1 < grid_.units && DomainOf(last + 1) == domain && last - target < kPartnersMax / 2) ++last;
    const double here = CostAt(unit, place, -1, 0);
    tries_left -= 1;
    // At any other place of that domain the unit costs about what it costs beside its neighbour.
    const int64_t beside = target > first ? target - 1 : std::min(last, target + 1);
    if (beside == target || here - CostAt(unit, beside, unit_at_[beside], place) <= kGainMin) return false;
    double best = kGainMin;
    int64_t best_place = -1;
    for (int64_t other = first; other <= last; ++other) {
      const int32_t partner = unit_at_[other];
      if (partner == unit) continue;
      const double before = here + CostAt(partner, other, -1, 0);
      const double after = CostAt(unit, other, partner, place) + CostAt(partner, place, unit, other);
      tries_left -= 1;
      if (before - after <= best) continue;
      best = before - after;
      best_place = other;
    }
    if (best_place < 0) return false;
    Swap(place, best_place);
    return true;
  }

  void Swap(int64_t a, int64_t b) {
    std::swap(unit_at_[a], unit_at_[b]);
    place_of_[unit_at_[a]] = static_cast<int32_t>(a);
    place_of_[unit_at_[b]] = static_cast<int32_t>(b);
  }

  const Fabric& fabric_;
  const Grid& grid_;
  const UnitPlaces& places_;
  std::vector<int32_t>& unit_at_;
  std::vector<int32_t> place_of_;
};

}  // namespace

Grid MakeGrid(const Mesh& mesh, const std::vector<int>& box) {
  Grid grid;
  int64_t size = 1;
  for (const int extent : box) size *= extent;
  for (size_t a = 0; a < mesh.axes.size(); ++a) {
    const Axis& axis = mesh.axes[a];
    const int count = axis.size / box[a];
    grid.units *= count;
    if (count <= 1) continue;
    const double lines = static_cast<double>(size) / box[a];  // that a unit has along this axis
    // Of all-to-all every rank of a unit sends to every rank of the others.
    const double gb = axis.pattern == Pattern::kAllToAll
                          ? axis.gb * static_cast<double>(size) * box[a] * (count - 1) / (axis.size - 1)
                          : axis.gb * lines;
    grid.sides.push_back({count, 1, axis.pattern, gb});
  }
  int32_t stride = 1;
  for (auto side = grid.sides.rbegin(); side != grid.sides.rend(); ++side) {
    side->stride = stride;
    stride *= side->size;
  }
  return grid;
}

std::vector<int32_t> Bisect(const Fabric& fabric, const Grid& grid, const UnitPlaces& places) {
  return Bisection(fabric, grid, places).Run();
}

void Anneal(const Fabric& fabric, const Grid& grid, const UnitPlaces& places, int64_t steps,
            std::vector<int32_t>& unit_at) {
  if (!grid.sides.empty()) Search(fabric, grid, places, unit_at).Anneal(steps);
}

void Improve(const Fabric& fabric, const Grid& grid, const UnitPlaces& places, int64_t tries_max,
             std::vector<int32_t>& unit_at) {
  Search search(fabric, grid, places, unit_at);
  while (tries_max > 0 && search.Pass(tries_max) > 0) {
  }
}

}  // namespace gtrain::topology
