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

// What may lie beside the shards of a committed attempt.
struct BesideShards {
  bool indices = false;
  bool parts = false;
};

// Manifests first, then the folders (fault C2). Of attempts in `whole` are the shards of `world_size` ranks
// there and what it says, no more; the others are listed.
absl::Status DeletePlanned(port::BlobStore* store, const RetentionPlan& plan,
                           const std::map<SaveId, BesideShards>& whole = {}, int world_size = 0);

// The retention of one writer. Listing costs an object store more than all the rest, so most commits go by
// the manifests that were listed for the commit itself and by the names of what this writer made. What has no
// manifest is found when everything is listed: the first time and now and then. Where few deletes cost as
// much as many, small checkpoints go kTogether at once. Not thread-safe; `store` must outlive it.
class Retention {
 public:
  Retention(port::BlobStore* store, int keep, int world_size)
      : store_(store), keep_(keep), world_size_(world_size) {}
  // After `id` was committed by this writer and read back; `before`: what ListManifests said shortly before.
  // `bytes`: of its shards; `beside`: what else may be in the storage. After an error some of what should go
  // stays until the next time.
  absl::Status Apply(const SaveId& id, bool finite, uint64_t bytes, BesideShards beside,
                     std::vector<SaveId> before);
  static constexpr size_t kTogether = 4;
  static constexpr uint64_t kWaitingBytesMax = 64 << 20;  // of what should be gone already

  // What the run was resumed from: checkpoints that are newer and of an earlier life were passed over, so
  // nobody knows yet what they are worth. They stay until something newer is resumed or a person removes
  // them.
  void Resumed(const SaveId& id) {
    resumed_ = id;
    if (!verified_ || *verified_ < id) verified_ = id;  // every byte of it was read
  }

  // Every rank's writer has read its shard of it back: it stays until a newer one was.
  void Verified(const SaveId& id) {
    if (!verified_ || *verified_ < id) verified_ = id;
  }

  // This writer left something there without a manifest.
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

// What the key of rank 0's own manifest says if nothing is there after the put: a job that was formed anew
// may have committed and applied retention since. Nobody continues the timeline of `id` then.
ckpt::save::ManifestRead WhyNothingIsThere(port::BlobStore* store, const SaveId& id);

}  // namespace gtrain::ckpt
