// Reads the parts of a manifest: for many ranks the root names parts, and a reader loads only those that it
// needs. Each costs one GET; up to kCallsAtOnce (parallel.h) are out at a time.
#pragma once
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/plan/save_plan.h"
#include "checkpoint/port/blob_store.h"

namespace gtrain::ckpt {

// Adds the parts of the files of `ranks` that `manifest` lacks. Blocks as the storage does. DataLoss names a
// part that is absent or is not the one that the manifest names, FailedPrecondition one of a newer gtrain;
// other errors are the storage's and say nothing about the checkpoint.
absl::Status LoadParts(port::BlobStore* store, const std::vector<int>& ranks, Manifest* manifest);
// Returns the same manifest with every part.
absl::StatusOr<Manifest> WithParts(port::BlobStore* store, Manifest manifest);
// Loads the parts that `rank` of `world_size` needs to restore `registered`: those of the files that its plan
// reads, of those whose lengths it checks (CheckLengths), and of its own. Among n ranks with sharded state
// that is a few requests a rank, with state replicated over all of them n / 64. `may_be_missing` is that of
// the plan.
absl::Status LoadPartsToRestore(port::BlobStore* store, const std::vector<Registered>& registered, int rank,
                                int world_size, const std::vector<std::string>& may_be_missing,
                                Manifest* manifest);

}  // namespace gtrain::ckpt
