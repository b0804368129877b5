// A topology as a picture. PURE.
#pragma once
#include <string>

#include "topology/topology.h"

namespace gtrain::topology {

inline constexpr size_t kDrawnMax = 256;  // machines, and switches of one tier

// An SVG document: machines with their GPUs in the lowest row, switches above by their distance from them. Of
// more than kDrawnMax in a row the rest is a number.
std::string DrawSvg(const Topology& topology);

}  // namespace gtrain::topology
