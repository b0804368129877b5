// What no placement can beat. PURE.
#pragma once
#include <cstdint>
#include <vector>

#include "topology/place/fabric.h"
#include "topology/place/mesh.h"

namespace gtrain::topology {

struct Bound {
  double seconds = 0;  // at most Cost::seconds of every placement of the mesh on the usable slots
  double total = 0;    // at most Cost::total of each
};

// `usable`: the slots that may be taken, ascending; at least one for each rank.
Bound LowerBound(const Fabric& fabric, const Mesh& mesh, const std::vector<int32_t>& usable);

}  // namespace gtrain::topology
