// Units: boxes of the mesh that fit into a machine, and the slots that take one. PURE.
#pragma once
#include <cstdint>
#include <vector>

#include "topology/place/fabric.h"
#include "topology/place/mesh.h"

namespace gtrain::topology {

// Places for `count()` units of `size` ranks each: unit u has slots[u * size] to slots[(u + 1) * size],
// ascending. Places are in the order of their first slots.
struct UnitPlaces {
  int size = 1;
  std::vector<int32_t> slots;
  int64_t count() const { return static_cast<int64_t>(slots.size()) / size; }
  int32_t first(int64_t unit) const { return slots[unit * size]; }
};

// Cuts the usable slots into places: as many as possible inside of the smallest domains, the rest from slots
// that are left over, in the smallest domain that has enough of them. Keeps `wanted` of them: of places that
// no machine has whole as few as possible, then the smallest domains that have room, and the fullest of
// these. Fewer than `wanted` where there are not so many.
UnitPlaces MakePlaces(const Fabric& fabric, const std::vector<int32_t>& usable, int size, int64_t wanted);

// The extents of the boxes to try as units, best first, one or two: what cuts the least traffic among those
// with enough whole places in machines, and what would cut still less if some places may be made of what
// machines have left over.
std::vector<std::vector<int>> UnitBoxes(const Fabric& fabric, const Mesh& mesh,
                                        const std::vector<int32_t>& usable);

}  // namespace gtrain::topology
