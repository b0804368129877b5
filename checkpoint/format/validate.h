// The checks of manifest.h that other files of this folder need, too.
#pragma once
#include <vector>

#include "absl/status/status.h"
#include "checkpoint/format/manifest.h"

namespace gtrain::ckpt {

inline constexpr int kPartsVersion = 3;  // the first with parts

// Whether the names and types of the tensors are possible, each by itself.
absl::Status CheckTensors(const std::vector<GlobalTensor>& tensors);
// Whether these are the files of that part's ranks, each of them sound.
absl::Status CheckPartFiles(const ManifestPart& part);

}  // namespace gtrain::ckpt
