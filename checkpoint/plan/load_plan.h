// Which bytes one rank must read to restore, at any world size.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/plan/save_plan.h"

namespace gtrain::ckpt {

// Bytes of a file that land in a registered tensor.
struct Copy {
  size_t registered = 0;
  uint64_t begin = 0;  // in the tensor
  uint64_t bytes = 0;
  uint64_t file_begin = 0;
  bool operator==(const Copy&) const = default;
};

struct FileRead {
  int file = 0;                  // index into Manifest::files
  std::vector<uint64_t> chunks;  // ascending; each is read whole, verified, then copied from
  std::vector<Copy> copies;      // by file_begin
};

struct LoadPlan {
  std::vector<FileRead> reads;
  std::vector<bool> restored;        // per registered tensor; false: a per-rank blob this rank never had
  std::vector<std::string> unknown;  // in the checkpoint, not registered: not read
};

// FailedPrecondition with every difference when the checkpoint does not fit what is registered: a replicated
// tensor that is missing (never silently fresh, fault C4), another shape or type, a blob of another size.
// `manifest` is Validate()d.
absl::StatusOr<LoadPlan> PlanLoad(const Manifest& manifest, const std::vector<Registered>& registered,
                                  int rank);

}  // namespace gtrain::ckpt
