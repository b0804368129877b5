// What people do with checkpoints that lie there: look, compare, verify, copy, export, import, delete.
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
#include "checkpoint/plan/retention.h"
#include "checkpoint/port/blob_store.h"

namespace gtrain::ckpt {

// Told how many of how many bytes are done. An error it returns ends the work (Ctrl-C).
using Progress = std::function<absl::Status(uint64_t done, uint64_t total)>;

// The committed checkpoint that `which` names: "latest", a step (the newest of that step), or an attempt's
// name
// ("step-000000000120.e0002.t0001.g0005.a01"). NotFound lists the steps there are.
absl::StatusOr<Manifest> FindCheckpoint(port::BlobStore* store, absl::string_view which);

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
// Tensors that are not equal in both. Memory: the largest tensor twice.
absl::StatusOr<std::vector<TensorDifference>> Compare(port::BlobStore* store_a, const Manifest& a,
                                                      port::BlobStore* store_b, const Manifest& b,
                                                      const Progress& progress);

// Every verified byte of one checkpoint into another store, the manifest last. Memory: the largest file.
// AlreadyExists: the target has an attempt of this very name.
absl::Status CopyCheckpoint(port::BlobStore* from, const Manifest& manifest, port::BlobStore* to,
                            const Progress& progress);

// All tensors, merged if they were sharded, as one safetensors file at `path`, which must not exist; whole or
// not at all. Memory: the largest tensor, at least 64 MiB. State of single ranks is left out: `left_out` gets
// its names.
absl::Status ExportSafetensors(port::BlobStore* store, const Manifest& manifest, const std::string& path,
                               const Progress& progress, std::vector<std::string>* left_out);
// A safetensors file of any program as a committed checkpoint of step 0, from which a job may start. Memory:
// the file.
absl::StatusOr<Manifest> ImportSafetensors(const std::string& path, port::BlobStore* store);

// What no commit refers to and no running save can still need: attempts without a manifest older than the
// newest commit, aborted ones, unfinished puts.
struct Garbage {
  RetentionPlan plan;
  std::vector<port::BlobStore::Unfinished> unfinished;
  std::vector<std::string> probes;  // of programs that ended while they opened the directory, a day old
  uint64_t bytes = 0;               // of the folders
};
absl::StatusOr<Garbage> FindGarbage(port::BlobStore* store, absl::Time now);
absl::Status DropGarbage(port::BlobStore* store, const Garbage& garbage);

// The pin first, then the manifest, then its files.
absl::Status RemoveCheckpoint(port::BlobStore* store, const SaveId& id);

absl::Status Pin(port::BlobStore* store, const SaveId& id);
absl::Status Unpin(port::BlobStore* store, const SaveId& id);
absl::StatusOr<bool> IsPinned(port::BlobStore* store, const SaveId& id);

}  // namespace gtrain::ckpt
