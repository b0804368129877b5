// What `gtrain ckpt` does with stored checkpoints: look, compare, verify, copy, export, import, delete.
// Nothing here needs a running job; all of it is safe beside one.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/plan/garbage.h"
#include "checkpoint/plan/retention.h"
#include "checkpoint/port/blob_store.h"

namespace gtrain::ckpt {

// Told how many of how many bytes are done. An error it returns ends the work (Ctrl-C).
using Progress = std::function<absl::Status(uint64_t done, uint64_t total)>;

// The committed checkpoint that `which` names: "latest", a step (the newest of that step), or an attempt's
// name
// ("step-000000000120.e0002.t0001.g0005.a01"). NotFound lists the steps there are. A newest one that a job's
// retention deletes between the list and the read is looked for once more.
absl::StatusOr<Manifest> FindCheckpoint(port::BlobStore* store, absl::string_view which);

// Whether a checkpoint that FindCheckpoint found is deleted by now.
absl::StatusOr<bool> IsGone(port::BlobStore* store, const SaveId& id);

uint64_t BytesOf(const Manifest& manifest);  // of all its files

// Every byte of every file against the manifest's hashes. DataLoss names the first that differs.
absl::Status VerifyAll(port::BlobStore* store, const Manifest& manifest, const Progress& progress);

// One tensor's bytes out of verified chunks, merged if it was sharded. Memory: the tensor and a chunk.
// NotFound: no such tensor.
absl::StatusOr<std::string> LoadTensor(port::BlobStore* store, const Manifest& manifest,
                                       absl::string_view name);

struct TensorDifference {
  std::string name;
  std::string
      what;  // "only in the first", "F32[4,4] and F32[4,8]", "differs in 12 of 16 elements, at most by 0.5"
};
// Tensors that are not equal in both, sorted by name. Memory: the largest tensor, at least 64 MiB, twice.
// Reads each chunk about once where both have their tensors in the same order.
absl::StatusOr<std::vector<TensorDifference>> Compare(port::BlobStore* store_a, const Manifest& a,
                                                      port::BlobStore* store_b, const Manifest& b,
                                                      const Progress& progress);

// Every verified byte of one checkpoint into another store: a pin, so that no job that runs there deletes it,
// the files, the manifest last. Memory: a chunk, and what PutStream holds. AlreadyExists: the target has an
// attempt of this very name. After any other error it may be called again and goes on with what is there.
absl::Status CopyCheckpoint(port::BlobStore* from, const Manifest& manifest, port::BlobStore* to,
                            const Progress& progress);

// All tensors, merged if they were sharded, as one safetensors file at `path`, which must not exist; whole or
// not at all. Memory: the largest tensor, at least 64 MiB. State of single ranks is left out: `left_out` gets
// its names.
absl::Status ExportSafetensors(port::BlobStore* store, const Manifest& manifest, const std::string& path,
                               const Progress& progress, std::vector<std::string>* left_out);
// Imports a safetensors file of any program as a committed checkpoint of step 0, from which a job may start.
// Memory: its header, and what PutStream holds. FailedPrecondition names the job that the directory belongs
// to; `takeover` imports all the same, and that job commits nothing more.
absl::StatusOr<Manifest> ImportSafetensors(const std::string& path, port::BlobStore* store,
                                           bool takeover = false);

// Files that no commit refers to and no running save or copy can still need (plan/garbage.h): attempts
// without a manifest, aborted ones, unfinished puts.
struct Garbage {
  RetentionPlan plan;
  std::vector<port::BlobStore::Unfinished> unfinished;
  std::vector<std::string> small;  // probes of programs that ended while they opened the directory, leases of
                                   // owners that are no more, pins of nothing
  uint64_t bytes = 0;              // of the folders
  // These attempts have no manifest and are kept all the same.
  std::vector<SaveId> pinned;     // for somebody to finish, or to unpin
  std::vector<SaveId> in_flight;  // may be committed yet, or is not old enough
};
// `age` is kAbandonedAge except in tests. Costs a few listings, and one of each attempt without a manifest.
absl::StatusOr<Garbage> FindGarbage(port::BlobStore* store, absl::Duration age = kAbandonedAge);
absl::Status DropGarbage(port::BlobStore* store, const Garbage& garbage);

// The pin first, then the manifest, then its files.
absl::Status RemoveCheckpoint(port::BlobStore* store, const SaveId& id);

absl::Status Pin(port::BlobStore* store, const SaveId& id);
absl::Status Unpin(port::BlobStore* store, const SaveId& id);
absl::StatusOr<bool> IsPinned(port::BlobStore* store, const SaveId& id);

}  // namespace gtrain::ckpt
