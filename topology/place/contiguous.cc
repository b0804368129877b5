#include "topology/place/policy.h"
#include "topology/place/units.h"

namespace gtrain::topology {

std::vector<int32_t> PlaceContiguous(const Fabric& fabric, const Mesh& mesh,
                                     const std::vector<int32_t>& usable) {
  return MakePlaces(fabric, usable, 1, mesh.ranks()).slots;
}

}  // namespace gtrain::topology
