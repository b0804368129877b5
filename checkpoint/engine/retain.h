// Deleting from a checkpoint directory: what stands there, and the order in which it goes.
#pragma once
#include <map>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/plan/retention.h"
#include "checkpoint/plan/save_core.h"
#include "checkpoint/port/blob_store.h"

namespace gtrain::ckpt {

// Everything of the directory as retention sees it after `newest` was committed. `finite_of` spares reading
// manifests again: those it knows are taken from there, the others added. An error of the storage is never
// taken for a damaged manifest.
absl::StatusOr<StoredCheckpoints> ListStored(port::BlobStore* store, const SaveId& newest,
                                             std::map<SaveId, bool>* finite_of);

// Which files may lie beside the shards of a committed attempt.
struct BesideShards {
  bool indices = false;
  bool parts = false;
};

// Deletes manifests first, then the folders (fault C2). Attempts in `whole` have the shards of `world_size`
// ranks and the files that it names, no more; the others are listed.
absl::Status DeletePlanned(port::BlobStore* store, const RetentionPlan& plan,
                           const std::map<SaveId, BesideShards>& whole = {}, int world_size = 0);

// The retention of one writer. Listing costs an object store more than all the rest, so most commits use the
// manifests that were listed for the commit itself and the names of the files that this writer made. Attempts
// without a manifest are found when everything is listed: the first time and now and then. Where few deletes
// cost as much as many, small checkpoints are deleted kTogether at once. Not thread-safe; `store` must
// outlive it.
class Retention {
 public:
  Retention(port::BlobStore* store, int keep, int world_size)
      : store_(store), keep_(keep), world_size_(world_size) {}
  // Called after `id` was committed by this writer and read back. `before` is the result of ListManifests
  // shortly before, `bytes` the size of the shards of `id`, `beside` the other files that may be in the
  // storage. After an error some checkpoints that should be deleted stay until the next time.
  absl::Status Apply(const SaveId& id, bool finite, uint64_t bytes, BesideShards beside,
                     std::vector<SaveId> before);
  static constexpr size_t kTogether = 4;
  static constexpr uint64_t kWaitingBytesMax = 64 << 20;  // of what should be gone already

  // Says from which checkpoint the run was resumed. Checkpoints that are newer and of an earlier life were
  // passed over, so nobody knows yet whether they are good. They stay until something newer is resumed or a
  // person removes them.
  void Resumed(const SaveId& id) {
    resumed_ = id;
    if (!verified_ || *verified_ < id) verified_ = id;  // every byte of it was read
  }

  // Says that every rank's writer has read its shard of `id` back: `id` stays until a newer one was read
  // back.
  void Verified(const SaveId& id) {
    if (!verified_ || *verified_ < id) verified_ = id;
  }

  // Says that this writer left files without a manifest.
  void ListNextTime() { unlisted_left_ = 0; }

 private:
  absl::StatusOr<StoredCheckpoints> LookAtAll(const SaveId& id);
  absl::StatusOr<StoredCheckpoints> LookAtManifests(const SaveId& id, uint64_t bytes,
                                                    std::vector<SaveId> there);

  port::BlobStore* const store_;
  const int keep_;
  const int world_size_;
  std::optional<SaveId> resumed_;
  std::optional<SaveId> verified_;        // the newest that every rank's writer has read back
  int unlisted_left_ = 0;                 // how often we may do without listing
  std::map<SaveId, BesideShards> whole_;  // committed by us
  std::map<SaveId, bool> finite_of_;      // manifests read before: they never change
};

// Explains why rank 0's own manifest is not there after the put: a job that was formed anew may have
// committed and applied retention since. Nobody continues the timeline of `id` then.
ckpt::save::ManifestRead WhyNothingIsThere(port::BlobStore* store, const SaveId& id);

}  // namespace gtrain::ckpt
