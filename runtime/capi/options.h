// Structures of gtrain_c.h that more than one kind of object takes or gives.
#pragma once
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/engine/checkpoint.h"
#include "comm/reducer/reducer.h"
#include "gtrain/gtrain_c.h"

namespace gtrain::capi {

// NULL: the defaults. InvalidArgument says which field is wrong. `before_save` of the result calls the
// program's function.
absl::StatusOr<CheckpointOptions> CheckpointOptionsFrom(const gtrain_checkpoint_options* in);
absl::StatusOr<ReducerOptions> ReducerOptionsFrom(const gtrain_reducer_options* in);
// *out points into `step`. InvalidArgument: its size is not that of the structure.
absl::Status WriteReducedStep(const ReducedStep& step, gtrain_reduced_step* out);

}  // namespace gtrain::capi
