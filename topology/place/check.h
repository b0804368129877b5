// An independent checker of placements: it recomputes what a plan costs from the definition, and shares no
// code with what made it. Slow on purpose: every pair of ranks is written out, and every domain is looked up
// by walking its borders. PURE.
#pragma once
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "topology/place/cost.h"

namespace gtrain::topology {

// FailedPrecondition says what is wrong: a rank without a slot, a slot that is taken twice or is not usable,
// or a number of `cost` that is not what the placement costs. `usable`: the slots that may be taken.
absl::Status CheckPlacement(const Fabric& fabric, const Mesh& mesh, const std::vector<int32_t>& usable,
                            const std::vector<int32_t>& slot_of_rank, const Cost& cost);

}  // namespace gtrain::topology
