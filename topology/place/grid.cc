// Divide: a run of places and a set of as many units are divided among the domains just below the smallest
// one that has all of them, and so on in each of these. The set is cut into slabs across all sides but one,
// and the domains of a bar that is left take its units layer by layer: a multi-jagged partition (Deveci et
// al., 2016) with parts of given sizes. Domains are alike but for their sizes, so which of them share a slab
// is free: those whose sizes add up to it exactly, a subset sum, so that holes cost nothing as long as there
// are enough domains to choose from. Where no sum fits, a slab has a begun layer. Likewise the order of
// domains in a bar is the one in which few of them have a begun layer at both ends. Into how many slabs: what
// promises least GB between the parts, of which the best few are made and counted, also with domains that are
// a whole layer taken out first: all rings of such a one are closed.
//
// Improve: a unit that would gain in the domain of a neighbour changes places with one that loses less there.
// A unit that gains nothing by itself is never the first of a swap, which leaves out nearly all of them at
// once.
//
// Rejected: bisection at the border of two domains that is nearest to the middle, which leaves begun layers
// at each cut: about 6 % above this with holes. Simulated annealing of what this leaves gained next to
// nothing in a hundred times the time. Ordering all units on a space-filling curve is worse where sizes are
// no powers of two.
#include "topology/place/grid.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <span>
#include <utility>

namespace gtrain::topology {
namespace {

struct Extent {  // of a set of units along a side
  int first = 0, size = 0;
};
using Extents = std::array<Extent, kGridAxesMax>;

struct Part {  // places of one domain
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};

// Chooses parts by the sum of their sizes.
class PartSums {
 public:
  // `which`: of these parts.
  PartSums(const std::vector<Part>& parts, const std::vector<int>& which) {
    std::map<int64_t, std::vector<int>, std::greater<>> of_size;
    for (const int p : which) {
      of_size[parts[p].size()].push_back(p);
      left_ += parts[p].size();
    }
    for (auto& [size, of] : of_size) kinds_.push_back({size, std::move(of)});
  }

  int64_t left() const { return left_; }  // units of parts that nobody took

  // Takes parts of about `units` together, of exactly so many if that is found.
  std::vector<int> Take(int64_t units) {
    const std::vector<size_t> counts = Choose(std::min(units, left_));
    std::vector<int> taken;
    for (size_t k = 0; k < kinds_.size(); ++k) {
      for (size_t i = 0; i < counts[k]; ++i) Pop(k, taken);
    }
    return taken;
  }

  // Takes one part of just so many; -1 if there is none.
  int TakeOne(int64_t units) {
    std::vector<int> taken;
    for (size_t k = 0; k < kinds_.size() && taken.empty(); ++k) {
      if (kinds_[k].size == units && !kinds_[k].parts.empty()) Pop(k, taken);
    }
    return taken.empty() ? -1 : taken.front();
  }

  // Takes all, such that few have a begun layer at both ends when they follow one another.
  std::vector<int> TakeInOrder(int64_t layer) {
    std::vector<int> taken;
    for (int64_t begun = 0; left_ > 0;) {
      size_t best = 0;
      int64_t best_fill = -1;
      for (size_t k = 0; k < kinds_.size(); ++k) {
        if (kinds_[k].parts.empty()) continue;
        // How full the last layer is then; a part that begins one more than it has to comes last.
        const int64_t full = begun + (kinds_[k].size - 1) % layer + 1, fill = full <= layer ? full : 0;
        if (fill <= best_fill) continue;
        best = k;
        best_fill = fill;
      }
      begun = (begun + kinds_[best].size) % layer;
      Pop(best, taken);
    }
    return taken;
  }

 private:
  struct Kind {
    int64_t size = 0;
    std::vector<int> parts;  // that nobody took
  };

  void Pop(size_t kind, std::vector<int>& taken) {
    taken.push_back(kinds_[kind].parts.back());
    kinds_[kind].parts.pop_back();
    left_ -= kinds_[kind].size;
  }

  // [kind]: how many to take.
  std::vector<size_t> Choose(int64_t units) const {
    // Nearly all of them as they come, so that no slab gets all large ones; what is left is a sum to be
    // found.
    constexpr int64_t kToFind = 16;
    const int64_t largest = kinds_.front().size, sure = std::max<int64_t>(0, units - kToFind * largest);
    std::vector<size_t> counts(kinds_.size());
    double due = 0;  // units
    int64_t rest = units;
    for (size_t k = 0; k < kinds_.size(); ++k) {
      const auto size = static_cast<double>(kinds_[k].size), of = static_cast<double>(kinds_[k].parts.size());
      due += size * of * static_cast<double>(sure) / static_cast<double>(left_);
      counts[k] = static_cast<size_t>(std::min(of, std::floor(due / size)));
      due -= size * static_cast<double>(counts[k]);
      rest -= static_cast<int64_t>(counts[k]) * kinds_[k].size;
    }
    // [sum]: the last kind of a choice that has it, -1 if there is none.
    std::vector<int> last(static_cast<size_t>(rest + largest), -1);
    const auto end = static_cast<int64_t>(last.size());
    last[0] = 0;
    for (size_t k = 0; k < kinds_.size(); ++k) {
      const int64_t size = kinds_[k].size;
      const size_t most = kinds_[k].parts.size() - counts[k];
      std::vector<size_t> used(last.size(), 0);
      for (int64_t sum = size; sum < end; ++sum) {
        if (last[sum] >= 0 || last[sum - size] < 0 || used[sum - size] >= most) continue;
        last[sum] = static_cast<int>(k);
        used[sum] = used[sum - size] + 1;
      }
    }
    int64_t off = 0;
    while ((off > rest || last[rest - off] < 0) && (rest + off >= end || last[rest + off] < 0)) ++off;
    for (int64_t sum = off <= rest && last[rest - off] >= 0 ? rest - off : rest + off; sum > 0;) {
      const int k = last[sum];
      ++counts[k];
      sum -= kinds_[k].size;
    }
    return counts;
  }

  std::vector<Kind> kinds_;
  int64_t left_ = 0;
};

// Divides places `begin` to `end`, and so on in each part. Units and places are as many.
class Division {
 public:
  Division(const Fabric& fabric, const Grid& grid, const UnitPlaces& places, int nth)
      : fabric_(fabric),
        grid_(grid),
        places_(places),
        nth_(nth),
        unit_at_(grid.units),
        ordered_(grid.units),
        part_of_(grid.units, -1) {
    std::iota(unit_at_.begin(), unit_at_.end(), 0);
  }

  std::vector<int32_t> Run() {
    Divide(0, grid_.units);
    return std::move(unit_at_);
  }

 private:
  // Every side but `along` is cut into so many strips, and bars are what is in one strip of each.
  struct Layout {
    double gb = 0;  // that leave the parts, about
    size_t along = 0;
    std::array<int, kGridAxesMax> strips = {};
    bool peel = false;  // layers of the first side that is cut which are just a part come before its strips
  };

  Extents ExtentsOf(int64_t begin, int64_t end) const {
    Extents extents;
    for (size_t s = 0; s < grid_.sides.size(); ++s) {
      const Grid::Side& side = grid_.sides[s];
      auto& [first, size] = extents[s];
      int last = 0;
      first = side.size;
      for (int64_t i = begin; i < end; ++i) {
        const int at = grid_.At(unit_at_[i], side);
        first = std::min(first, at);
        last = std::max(last, at);
      }
      size = last - first + 1;
    }
    return extents;
  }

  // Cut edges of a line of this side, in GB, that is cut into so many pieces.
  double LineGb(size_t s, const Extents& extents, double pieces) const {
    const Grid::Side& side = grid_.sides[s];
    const double size = extents[s].size;
    if (side.pattern == Pattern::kAllToAll) return side.gb * size * (size - size / pieces) / (side.size - 1);
    const bool closed = side.pattern == Pattern::kRing && size == side.size;
    return side.gb * (closed && pieces > 1 ? pieces : pieces - 1);
  }

  // The most promising layouts for these parts, or the nth of them.
  std::vector<Layout> Layouts(const Extents& extents, const std::vector<Part>& parts) const {
    const int64_t units = parts.back().end - parts.front().begin;
    const double part = static_cast<double>(units) / static_cast<double>(parts.size());
    std::vector<Layout> layouts;
    Layout layout;
    for (layout.along = 0; layout.along < grid_.sides.size(); ++layout.along)
      AddLayouts(extents, part, 0, static_cast<double>(extents[layout.along].size), layout, layouts);
    const auto count = static_cast<std::ptrdiff_t>(std::min(kLayoutsMax, layouts.size()));
    std::partial_sort(layouts.begin(), layouts.begin() + count, layouts.end(),
                      [](const Layout& a, const Layout& b) { return a.gb < b.gb; });
    layouts.resize(static_cast<size_t>(count));
    if (nth_ >= 0) return {layouts[std::min(layouts.size() - 1, static_cast<size_t>(nth_))]};
    for (std::ptrdiff_t i = 0; i < count; ++i) {
      layout = layouts[i];
      const size_t s = FirstCut(layout, 0);
      if (s == grid_.sides.size()) continue;
      const int64_t size = extents[s].size;
      layout.peel = units % size == 0 && std::ranges::count(parts, units / size, &Part::size) > 0;
      if (layout.peel) layouts.push_back(layout);
    }
    return layouts;
  }

  // The first side that is cut into strips, from side s on.
  size_t FirstCut(const Layout& layout, size_t s) const {
    while (s < grid_.sides.size() && (s == layout.along || layout.strips[s] <= 1)) ++s;
    return s;
  }

  // Those that begin as `layout` does, which has strips of the sides before s; a bar has `bar` units so far.
  void AddLayouts(const Extents& extents, double part, size_t s, double bar, Layout layout,
                  std::vector<Layout>& out) const {
    if (s == grid_.sides.size()) {
      const double size = extents[layout.along].size;
      layout.gb += LineGb(layout.along, extents, std::max(1.0, bar / part)) / size;
      out.push_back(layout);
      return;
    }
    if (s == layout.along) return AddLayouts(extents, part, s + 1, bar, layout, out);
    const int size = extents[s].size;
    for (int strips = size; strips > 0;) {
      layout.strips[s] = strips;
      Layout more = layout;
      more.gb += LineGb(s, extents, strips) / size;
      AddLayouts(extents, part, s + 1, bar * size / strips, more, out);
      if (strips == 1) break;
      const int thick = (size + strips - 2) / (strips - 1);  // the least that makes fewer
      strips = (size + thick - 1) / thick;
    }
  }

  // Sorts ordered_ from `begin` to `end` by side s, then by `along`, then by the others.
  void Sort(size_t s, size_t along, const Extents& extents, int64_t begin, int64_t end) {
    std::array<size_t, kGridAxesMax> sides;
    size_t count = 0;
    sides[count++] = s;
    if (along != s) sides[count++] = along;
    for (size_t other = 0; other < grid_.sides.size(); ++other) {
      if (other != s && other != along) sides[count++] = other;
    }
    int64_t keys = 1;
    for (const Extent& extent : std::span(extents).first(count)) keys *= extent.size;
    const auto key = [&](int32_t unit) {
      int64_t value = 0;
      for (size_t i = 0; i < count; ++i) {
        const Extent& extent = extents[sides[i]];
        value = value * extent.size + grid_.At(unit, grid_.sides[sides[i]]) - extent.first;
      }
      return value;
    };
    const std::span<int32_t> units(ordered_.begin() + begin, ordered_.begin() + end);
    if (keys <= kSparsest * (end - begin)) {  // nearly a box: every unit has its own place
      by_key_.assign(static_cast<size_t>(keys), -1);
      for (const int32_t unit : units) by_key_[key(unit)] = unit;
      std::ranges::copy_if(by_key_, units.begin(), [](int32_t unit) { return unit >= 0; });
    } else {
      std::ranges::sort(units, {}, key);
    }
  }

  // Orders the units of ordered_ from `begin` to `end`, and these parts in order_, that they fit each other.
  // Sides before s are cut.
  void Arrange(Layout layout, Extents extents, const std::vector<Part>& parts, const std::vector<int>& which,
               size_t s, int64_t begin, int64_t end) {
    s = FirstCut(layout, s);
    PartSums sums(parts, which);
    if (s == grid_.sides.size()) {
      Sort(layout.along, layout.along, extents, begin, end);
      const int64_t size = extents[layout.along].size;
      const std::vector<int> order = sums.TakeInOrder(std::max<int64_t>(1, (end - begin + size / 2) / size));
      order_.insert(order_.end(), order.begin(), order.end());
      return;
    }
    Sort(s, layout.along, extents, begin, end);
    if (layout.peel) begin = Peel(s, begin, end, sums);
    layout.peel = false;
    const auto at = [&](int64_t i) { return grid_.At(ordered_[i], grid_.sides[s]); };
    const int first = begin < end ? at(begin) : 0, size = extents[s].first + extents[s].size - first;
    int64_t next = begin;
    for (int strip = 1; begin < end; ++strip) {
      const int border = first + static_cast<int>(int64_t{strip} * size / layout.strips[s]);
      while (next < end && at(next) < border) ++next;
      const std::vector<int> taken = sums.Take(std::max<int64_t>(0, next - begin));
      const int64_t from = begin;
      begin = end - sums.left();
      if (begin == from) continue;
      extents[s] = {at(from), at(begin - 1) - at(from) + 1};
      Arrange(layout, extents, parts, taken, s + 1, from, begin);
    }
  }

  // Gives layers of side s to parts that have just as many units. Returns where the first other layer begins.
  int64_t Peel(size_t s, int64_t begin, int64_t end, PartSums& sums) {
    const auto at = [&](int64_t i) { return grid_.At(ordered_[i], grid_.sides[s]); };
    while (begin < end) {
      int64_t next = begin;
      while (next < end && at(next) == at(begin)) ++next;
      const int part = sums.TakeOne(next - begin);
      if (part < 0) break;
      order_.push_back(part);
      begin = next;
    }
    return begin;
  }

  // GB between parts when they take ordered_ from `begin` on in this order.
  double Gb(const std::vector<Part>& parts, int64_t begin) {
    int64_t i = begin;
    for (const int p : order_) {
      for (int64_t k = 0; k < parts[p].size(); ++k)
        part_of_[ordered_[i++]] = static_cast<int32_t>(parts[p].begin);
    }
    double sum = 0;
    for (int64_t k = begin; k < i; ++k) {
      const int32_t unit = ordered_[k];
      grid_.EachNeighbour(unit, [&](int64_t other, double gb) {
        if (part_of_[other] != part_of_[unit]) sum += gb;
      });
    }
    return sum;
  }

  // Divides the units of places `begin` to `end`.
  void Divide(int64_t begin, int64_t end) {
    const int meet = end - begin <= 1 ? 0 : fabric_.Meet(places_.first(begin), places_.first(end - 1));
    const std::vector<Part> parts = meet <= 0 ? std::vector<Part>() : PartsOf(meet - 1, begin, end);
    if (static_cast<int64_t>(parts.size()) == end - begin || parts.empty()) {
      std::sort(unit_at_.begin() + begin, unit_at_.begin() + end);
      return;
    }
    const Extents extents = ExtentsOf(begin, end);
    std::vector<int> all(parts.size());
    std::iota(all.begin(), all.end(), 0);
    double least = std::numeric_limits<double>::max();
    std::vector<int32_t> best(unit_at_.begin() + begin, unit_at_.begin() + end);
    for (const Layout& layout : Layouts(extents, parts)) {
      std::copy(unit_at_.begin() + begin, unit_at_.begin() + end, ordered_.begin() + begin);
      order_.clear();
      Arrange(layout, extents, parts, all, 0, begin, end);
      const double gb = Gb(parts, begin);
      if (gb >= least) continue;
      least = gb;
      int64_t from = begin;
      for (const int p : order_) {
        std::copy_n(ordered_.begin() + from, parts[p].size(), best.begin() + (parts[p].begin - begin));
        from += parts[p].size();
      }
    }
    std::ranges::copy(best, unit_at_.begin() + begin);
    for (const Part& p : parts) Divide(p.begin, p.end);
  }

  std::vector<Part> PartsOf(int level, int64_t begin, int64_t end) const {
    std::vector<Part> parts;
    int32_t last = -1;
    for (int64_t i = begin; i < end; ++i) {
      const int32_t domain = fabric_.domain[level][places_.first(i)];
      if (domain != last) parts.push_back({i, i});
      last = domain;
      parts.back().end = i + 1;
    }
    return parts;
  }

  static constexpr size_t kLayoutsMax = 6;
  static constexpr int64_t kSparsest = 4;

  const Fabric& fabric_;
  const Grid& grid_;
  const UnitPlaces& places_;
  const int nth_;
  std::vector<int32_t> unit_at_;
  std::vector<int32_t> ordered_;  // units while a layout is tried
  std::vector<int32_t> by_key_;
  std::vector<int32_t> part_of_;
  std::vector<int> order_;  // of parts
};

class Search {
 public:
  Search(const Fabric& fabric, const Grid& grid, const UnitPlaces& places, std::vector<int32_t>& unit_at)
      : fabric_(fabric),
        grid_(grid),
        places_(places),
        unit_at_(unit_at),
        place_of_(unit_at.size()),
        domain_(unit_at.size()) {
    const int level = std::min(fabric.machine_level + 1, static_cast<int>(fabric.levels.size()) - 1);
    for (size_t i = 0; i < unit_at.size(); ++i) {
      place_of_[unit_at[i]] = static_cast<int32_t>(i);
      domain_[i] = fabric.domain[level][places.first(static_cast<int64_t>(i))];
    }
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
        const int32_t target = domain_[place_of_[other]];
        if (target == domain_[place_of_[unit]] || seen_count == seen.size()) return;
        if (std::find(seen.begin(), seen.begin() + seen_count, target) != seen.begin() + seen_count) return;
        seen[seen_count++] = target;
        swapped += TrySwap(static_cast<int32_t>(unit), place_of_[other], tries_left) ? 1 : 0;
      });
    }
    return swapped;
  }

 private:
  static constexpr int64_t kPartnersMax = 64;
  static constexpr double kGainMin = 1e-9;

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
    const int32_t domain = domain_[target];
    int64_t first = target, last = target;
    while (first > 0 && domain_[first - 1] == domain && target - first < kPartnersMax / 2) --first;
    while (last + 1 < grid_.units && domain_[last + 1] == domain && last - target < kPartnersMax / 2) ++last;
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
  // [place]: the domain that it lies in, of the level whose domains units move between: the first one above
  // machines.
  std::vector<int32_t> domain_;
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

std::vector<int32_t> Divide(const Fabric& fabric, const Grid& grid, const UnitPlaces& places, int nth) {
  return Division(fabric, grid, places, nth).Run();
}

void Improve(const Fabric& fabric, const Grid& grid, const UnitPlaces& places, int64_t tries_max,
             std::vector<int32_t>& unit_at) {
  Search search(fabric, grid, places, unit_at);
  while (tries_max > 0 && search.Pass(tries_max) > 0) {
  }
}

}  // namespace gtrain::topology
