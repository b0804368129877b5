// Which part of a tensor a rank holds under a Sharding.
#pragma once
#include <gtrain/sharding.h>

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

namespace gtrain {

// Computes the part of a tensor of this shape that `rank` holds, and so the shape of the memory that
// AddSharded wants. InvalidArgument says what is wrong with the sharding.
absl::StatusOr<LocalBox> LocalBoxOf(const std::vector<int64_t>& shape, const Sharding& sharding, int rank);

// Coordinates of `rank`, one for each axis.
std::vector<int64_t> MeshCoordinates(const std::vector<MeshAxis>& mesh, int rank);

}  // namespace gtrain
