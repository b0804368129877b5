// Deleting from a checkpoint directory: what stands there, and the order in which it goes.
#pragma once
#include <map>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/plan/retention.h"
#include "checkpoint/port/blob_store.h"
#include "runtime/core/save_core.h"

namespace gtrain::ckpt {

// Everything of the directory as retention sees it after `newest` was committed. `finite_of` spares reading
// manifests again: those it knows are taken from there, the others added. An error of the storage is never
// taken for a damaged manifest.
absl::StatusOr<StoredCheckpoints> ListStored(port::BlobStore* store, const SaveId& newest,
                                             std::map<SaveId, bool>* finite_of);

// Manifests first, then the folders (fault C2).
absl::Status DeletePlanned(port::BlobStore* store, const RetentionPlan& plan);

// Puts that never happened, of attempts older than `newest`.
absl::StatusOr<std::vector<port::BlobStore::Unfinished>> ListUnfinishedBefore(port::BlobStore* store,
                                                                              const SaveId& newest);

// What the key of rank 0's own manifest says if nothing is there after the put: a job that was formed anew
// may have committed and applied retention since. Nobody continues the timeline of `id` then.
core::save::ManifestRead WhyNothingIsThere(port::BlobStore* store, const SaveId& id);

}  // namespace gtrain::ckpt
