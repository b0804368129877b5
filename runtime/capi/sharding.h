// Shapes and shardings as callers of the C interface give them.
#pragma once
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gtrain/gtrain_c.h"
#include "gtrain/sharding.h"

namespace gtrain::capi {

absl::StatusOr<std::vector<int64_t>> ShapeFrom(const int64_t* shape, int dimensions);
absl::StatusOr<Sharding> ShardingFrom(const gtrain_sharding* in);

// Writes the box that `compute` finds. `holds` may be null.
absl::Status LocalBoxTo(
    const int64_t* shape, int dimensions, const gtrain_sharding* sharding, int64_t* begin,
    int64_t* local_shape, int* holds,
    absl::FunctionRef<absl::StatusOr<LocalBox>(const std::vector<int64_t>&, const Sharding&)> compute);

}  // namespace gtrain::capi
