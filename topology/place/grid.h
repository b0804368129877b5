// The mesh in units, and who takes which place: the two steps of the mesh-aware policy. PURE.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "topology/place/fabric.h"
#include "topology/place/mesh.h"
#include "topology/place/units.h"

namespace gtrain::topology {

inline constexpr size_t kGridAxesMax = 6;

// Axes along which there is more than one unit. Units lie row by row, the last axis varies fastest.
struct Grid {
  struct Side {
    int size = 1;
    int32_t stride = 1;
    Pattern pattern = Pattern::kRing;
    double gb = 0;  // on the edge between two neighbours, in the units of Axis::gb
  };
  std::vector<Side> sides;
  int64_t units = 1;  // fewer than 2^31

  // Of 32 bits and without sign: the divisions are a good part of all that Divide and Improve do.
  static int At(int64_t unit, const Side& side) {
    return static_cast<int>(static_cast<uint32_t>(unit) / static_cast<uint32_t>(side.stride) %
                            static_cast<uint32_t>(side.size));
  }
  // Calls take(other, gb) for each unit that `unit` sends to or hears from.
  template <typename Take>
  void EachNeighbour(int64_t unit, const Take& take) const {
    for (const Side& side : sides) {
      const int at = At(unit, side);
      const int64_t first = unit - int64_t{at} * side.stride;
      if (side.pattern == Pattern::kAllToAll) {
        for (int i = 0; i < side.size; ++i) {
          if (i != at) take(first + int64_t{i} * side.stride, 2 * side.gb / (side.size - 1));
        }
        continue;
      }
      const bool ring = side.pattern == Pattern::kRing;
      if (at > 0 || ring) take(first + int64_t{at == 0 ? side.size - 1 : at - 1} * side.stride, side.gb);
      if (at + 1 < side.size || ring)
        take(first + int64_t{at + 1 == side.size ? 0 : at + 1} * side.stride, side.gb);
    }
  }
};

Grid MakeGrid(const Mesh& mesh, const std::vector<int>& box);

// [place]: the unit that goes there. As many places as units. `nth`, from 0: of the layouts that promise
// least GB the one to take everywhere; -1: in each domain the best of some.
std::vector<int32_t> Divide(const Fabric& fabric, const Grid& grid, const UnitPlaces& places, int nth);

// Swaps units of different machines while that lowers the sum of GB x distance. Tries at most `tries_max`
// swaps.
void Improve(const Fabric& fabric, const Grid& grid, const UnitPlaces& places, int64_t tries_max,
             std::vector<int32_t>& unit_at);

}  // namespace gtrain::topology
