// The copy of registered memory into the buffer of a save, made by all threads that help, and the hashes of
// the copy.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "base/mutex.h"
#include "checkpoint/format/hash.h"

namespace gtrain::ckpt {

// Thread-safe but for Begin and SetSources, which are called only while nothing is being copied.
class Snapshot {
 public:
  struct Source {
    const char* from;
    uint64_t bytes;
  };
  // The sources go one after the other behind `header`, as they will in the file.
  Snapshot(absl::string_view header, const std::vector<Source>& sources) { SetSources(header, sources); }

  // Others from now on. Only while nothing is being copied.
  void SetSources(absl::string_view header, const std::vector<Source>& sources);

  // From now on Finish copies to `to`.
  void Begin(char* to);
  // Copies together with the other threads that are in here; returns when all is copied.
  void Finish();
  uint64_t bytes() const { return bytes_; }
  // The hash of each chunk of the file, header included, as it was read from the sources by the copy that
  // Finish ended. The writer hashes the copy again: a difference means that something wrote to it, or to the
  // source meanwhile.
  const std::vector<HashBytes>& hashes() const { return hashes_; }

 private:
  // Some of the sources, or parts of them, one after the other: a chunk of the file.
  struct Chunk {
    size_t first, last;
    uint64_t offset;  // of the first, in the buffer
  };
  void CopyChunk(size_t index, char* to);

  std::string header_;
  uint64_t bytes_ = 0;
  std::vector<Source> sources_;
  std::vector<Chunk> chunks_;
  std::vector<HashBytes> hashes_;  // each written by the thread that copies its chunk
  Mutex mu_;
  char* to_ ABSL_GUARDED_BY(mu_) = nullptr;
  size_t taken_ ABSL_GUARDED_BY(mu_) = 0;
  size_t copied_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace gtrain::ckpt
