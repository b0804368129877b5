// The placement policies, one a file: each gives every rank of a mesh a slot. PURE.
//
// `usable`: the slots that may be taken, ascending, at least one for each rank. The result is indexed by
// rank, and no slot is in it twice. Equal input gives equal output.
#pragma once
#include <cstdint>
#include <vector>

#include "topology/place/fabric.h"
#include "topology/place/mesh.h"

namespace gtrain::topology {

// Ranks in their order on neighbouring slots of the smallest domain that has room.
std::vector<int32_t> PlaceContiguous(const Fabric& fabric, const Mesh& mesh,
                                     const std::vector<int32_t>& usable);

// A rank on each machine in turn, as `-map-by node` does.
std::vector<int32_t> PlaceSpread(const Fabric& fabric, const Mesh& mesh, const std::vector<int32_t>& usable);

// What is to be small: the predicted time of a step, or the sum of all transfers (Cost::total), which graph
// mappers minimise and bench_placement compares.
enum class Objective { kSeconds, kTotal };

// The mesh is cut along the domains, from the widest to the machines, then local search.
std::vector<int32_t> PlaceMeshAware(const Fabric& fabric, const Mesh& mesh,
                                    const std::vector<int32_t>& usable,
                                    Objective objective = Objective::kSeconds);

}  // namespace gtrain::topology
