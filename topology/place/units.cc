#include "topology/place/units.h"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <utility>

namespace gtrain::topology {
namespace {

struct Place {
  int32_t first = 0;  // slot
  int32_t begin = 0;  // where its slots are in Cuts::slots
  int32_t level = 0;  // of the domain that has all of them
};

struct Cuts {
  std::vector<int32_t> slots;
  std::vector<Place> places;
};

// One level up: what its domains can make of what those below left over.
std::vector<int32_t> MakeOnLevel(const Fabric& fabric, int level, const std::vector<int32_t>& left, int size,
                                 Cuts& draft) {
  std::vector<int32_t> rest;
  for (size_t i = 0; i < left.size();) {
    const int32_t domain = fabric.domain[level][left[i]];
    size_t end = i;
    while (end < left.size() && fabric.domain[level][left[end]] == domain) ++end;
    for (; i + size <= end; i += size) {
      draft.places.push_back({left[i], static_cast<int32_t>(draft.slots.size()), level});
      draft.slots.insert(draft.slots.end(), left.begin() + static_cast<std::ptrdiff_t>(i),
                         left.begin() + static_cast<std::ptrdiff_t>(i) + size);
    }
    rest.insert(rest.end(), left.begin() + static_cast<std::ptrdiff_t>(i),
                left.begin() + static_cast<std::ptrdiff_t>(end));
    i = end;
  }
  return rest;
}

// Takes `wanted` of the places [begin, end), which lie in one domain of `level`, and marks them in `taken`.
void Choose(const Fabric& fabric, const std::vector<Place>& places, int level, size_t begin, size_t end,
            size_t wanted, std::vector<bool>& taken) {
  if (wanted == 0) return;
  if (level < 0 || wanted == end - begin) {
    for (size_t i = begin; i < begin + wanted; ++i) taken[i] = true;
    return;
  }
  if (level == 0) return Choose(fabric, places, -1, begin, end, wanted, taken);
  struct Part {
    size_t begin, end;
    size_t size() const { return end - begin; }
  };
  std::vector<Part> parts;
  for (size_t i = begin; i < end;) {
    const int32_t domain = fabric.domain[level - 1][places[i].first];
    const size_t from = i;
    while (i < end && fabric.domain[level - 1][places[i].first] == domain) ++i;
    parts.push_back({from, i});
  }
  std::ranges::stable_sort(parts, std::greater<>(), &Part::size);
  for (size_t p = 0; p < parts.size() && wanted > 0; ++p) {
    // The smallest that has room for all that is still wanted, else the largest.
    size_t best = p;
    while (best + 1 < parts.size() && parts[best + 1].size() >= wanted) ++best;
    std::swap(parts[p], parts[best]);
    const size_t here = std::min(wanted, parts[p].size());
    Choose(fabric, places, level - 1, parts[p].begin, parts[p].end, here, taken);
    wanted -= here;
  }
}

// Drops places that lie on the highest levels until none of them or only `wanted` are left.
void DropScattered(const Fabric& fabric, int64_t wanted, std::vector<Place>& places) {
  for (int level = static_cast<int>(fabric.levels.size()) - 1; level > fabric.machine_level; --level) {
    int64_t surplus = static_cast<int64_t>(places.size()) - wanted;
    std::erase_if(places, [&](const Place& place) { return place.level == level && surplus-- > 0; });
  }
}

std::vector<int> Divisors(int number) {
  std::vector<int> divisors;
  for (int d = 1; d <= number && d <= kDevicesMax; ++d) {
    if (number % d == 0) divisors.push_back(d);
  }
  return divisors;
}

// All boxes of at most `room` ranks.
void EachBox(const Mesh& mesh, int room, std::vector<int>& box, int size,
             std::vector<std::pair<std::vector<int>, int>>& out) {
  if (box.size() == mesh.axes.size()) {
    out.emplace_back(box, size);
    return;
  }
  for (const int extent : Divisors(mesh.axes[box.size()].size)) {
    if (static_cast<int64_t>(size) * extent > room) break;
    box.push_back(extent);
    EachBox(mesh, room, box, size * extent, out);
    box.pop_back();
  }
}

}  // namespace

UnitPlaces MakePlaces(const Fabric& fabric, const std::vector<int32_t>& usable, int size, int64_t wanted) {
  Cuts draft;
  draft.slots.reserve(usable.size());
  std::vector<int32_t> left = usable;
  const int levels = static_cast<int>(fabric.levels.size());
  for (int level = 0; level < levels && !left.empty(); ++level)
    left = MakeOnLevel(fabric, level, left, size, draft);
  std::vector<Place>& places = draft.places;
  DropScattered(fabric, wanted, places);
  std::ranges::sort(places, {}, &Place::first);
  std::vector<bool> taken(places.size(), false);
  const size_t count = std::min<size_t>(static_cast<size_t>(wanted), places.size());
  Choose(fabric, places, levels - 1, 0, places.size(), count, taken);
  UnitPlaces out{size, {}};
  out.slots.reserve(count * static_cast<size_t>(size));
  for (size_t i = 0; i < places.size(); ++i) {
    if (!taken[i]) continue;
    const auto begin = draft.slots.begin() + places[i].begin;
    out.slots.insert(out.slots.end(), begin, begin + size);
  }
  return out;
}

std::vector<std::vector<int>> UnitBoxes(const Fabric& fabric, const Mesh& mesh,
                                        const std::vector<int32_t>& usable) {
  std::map<int, int> machines;  // usable slots to machines that have so many
  int room = 0;
  for (size_t i = 0; i < usable.size();) {
    const size_t from = i;
    const int32_t machine = fabric.slots[usable[i]].machine;
    while (i < usable.size() && fabric.slots[usable[i]].machine == machine) ++i;
    ++machines[static_cast<int>(i - from)];
    room = std::max(room, static_cast<int>(i - from));
  }
  std::vector<std::pair<std::vector<int>, int>> boxes;
  std::vector<int> box;
  EachBox(mesh, room, box, 1, boxes);
  struct Choice {
    double gb = std::numeric_limits<double>::max();
    int size = 0;
    const std::vector<int>* box = nullptr;
  };
  Choice whole, any;
  for (const auto& [extents, size] : boxes) {
    Choice choice{0, size, &extents};
    for (size_t a = 0; a < extents.size(); ++a) {
      const Axis& axis = mesh.axes[a];
      if (extents[a] < axis.size) choice.gb += CutLawOf(axis, extents[a]).At(extents[a]);
    }
    int64_t places = 0;
    for (const auto& [slots, count] : machines) places += static_cast<int64_t>(slots / size) * count;
    const auto better = [](const Choice& a, const Choice& b) {
      return a.gb < b.gb - 1e-12 || (a.gb < b.gb + 1e-12 && a.size > b.size);
    };
    if (better(choice, any)) any = choice;
    if (places >= mesh.ranks() / size && better(choice, whole)) whole = choice;
  }
  std::vector<std::vector<int>> out = {*whole.box};
  if (any.box != whole.box) out.push_back(*any.box);
  return out;
}

}  // namespace gtrain::topology
