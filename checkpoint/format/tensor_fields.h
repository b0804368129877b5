// The tensors of a checkpoint as JSON: their layouts, and the lists of boxes that they share. Implementation
// header: included by .cc files of this folder only.
#pragma once
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/format/shared_fields.h"
#include "checkpoint/format/tensor.h"

namespace gtrain::ckpt {

// Adds "tensors", and "boxes" if some need them.
void AddTensors(const std::vector<GlobalTensor>& tensors, Json* out);
// `version` is the manifest's. DataLoss for what AddTensors would not write; CheckTensors and Shares::Make
// judge the rest.
absl::StatusOr<std::vector<GlobalTensor>> ReadTensors(const ParsedJson& object, int version);

}  // namespace gtrain::ckpt
