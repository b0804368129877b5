// The copy of registered memory into the buffer of a save, done by whoever helps.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace gtrain::ckpt {

// Thread-safe but for Begin, which is called only while nothing is being copied.
class Snapshot {
 public:
  struct Source {
    const char* from;
    uint64_t bytes;
  };
  // They go one after the other.
  explicit Snapshot(const std::vector<Source>& sources) { SetSources(sources); }

  // Others from now on. Only while nothing is being copied.
  void SetSources(const std::vector<Source>& sources);

  // From now on Finish copies to `to`.
  void Begin(char* to);
  // Copies together with the other threads that are in here; returns when all is copied.
  void Finish();
  uint64_t bytes() const { return bytes_; }

 private:
  // Some of the sources, one after the other: what one thread copies at a time.
  struct Block {
    size_t first, last;
    uint64_t offset;  // of the first, in the buffer
  };
  void CopyBlock(const Block& block, char* to) const;

  uint64_t bytes_ = 0;
  std::vector<Source> sources_;
  std::vector<Block> blocks_;
  Mutex mu_;
  char* to_ ABSL_GUARDED_BY(mu_) = nullptr;
  size_t taken_ ABSL_GUARDED_BY(mu_) = 0;
  size_t copied_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace gtrain::ckpt
