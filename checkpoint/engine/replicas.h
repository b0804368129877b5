// Whether ranks that should hold the same hold the same. A checkpoint takes each byte of replicated state
// from one of the ranks that hold it; if these have drifted apart, halves of two different states would be
// stitched together, with every checksum right.
#pragma once
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "checkpoint/engine/agreement.h"
#include "checkpoint/plan/save_plan.h"

namespace gtrain::ckpt {

// Collective. Compares this rank's boxes of all tensors with those of its replicas, by XXH3.
// FailedPrecondition on all ranks names the tensors and the ranks that differ. `data` is as registered.
// Blocks for one reading of the state, with as many threads as a restore, and one message a way in which
// tensors lie on the ranks: 8 bytes from each rank. Only where something differs each tensor of that kind
// costs 8 bytes from each rank more.
absl::Status CompareReplicas(Agreement* agree, const std::vector<Registered>& registered,
                             const std::vector<void*>& data, int64_t step);

}  // namespace gtrain::ckpt
