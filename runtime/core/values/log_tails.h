// LogTails: the mirrored last output of every rank, bounded in total. PURE.
//
// Ranks report their output in pieces, each added to those before it. Text that has no room here is returned,
// to be spilled to a disk: then the older part of a tail is there, and its newest part here.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/core/values/job_shares.h"
#include "runtime/core/values/messages.h"

namespace gtrain::core {

struct TailKey {
  JobId job;
  Generation generation;
  int rank = 0;
  bool is_stderr = false;
  auto operator<=>(const TailKey&) const = default;
};

// The newest part of a tail.
struct HeldTail {
  std::string text;
  uint64_t end_offset = 0;  // of the log file, after `text`
  uint64_t spilled = 0;     // bytes before it that were handed out; 0: nothing of before matters
  uint64_t piece = 0;       // LogTail::piece of the last
  bool operator==(const HeldTail&) const = default;
};

// A part of a tail to be spilled to a disk, after the `before` bytes that were handed out of it earlier.
// Where those are not all there it begins the tail anew.
struct SpillTail {
  TailKey tail;
  uint64_t before = 0;
  uint64_t end_offset = 0;
  std::string text;
  bool operator==(const SpillTail&) const = default;
};

// The part of a tail that is on a disk: the end of the `bytes` that were handed out.
struct SpilledTail {
  std::string text;
  uint64_t bytes = 0;
  uint64_t end_offset = 0;
  bool operator==(const SpilledTail&) const = default;
};

// Loop-owned, not thread-safe. When the total is full the job that holds most makes room, with the tail that
// was not renewed for longest. A tail costs kTailCost beside its text: 4,000 ranks with two streams each
// leave 14 of 16 MiB for text, 1.8 KiB a stream, and what is before that is spilled.
class LogTails {
 public:
  static constexpr size_t kTailCost = 256;

  LogTails(size_t each_bytes_max, size_t total_bytes_max)
      : each_bytes_max_(each_bytes_max), total_bytes_max_(total_bytes_max) {}

  // Adds a piece, and returns the parts that must be spilled to make room for it.
  std::vector<SpillTail> Put(const LogTail& tail);
  const HeldTail* Find(const TailKey& key) const;
  void Forget(const JobId& job);
  size_t bytes() const { return tails_.bytes(); }

 private:
  const size_t each_bytes_max_;
  const size_t total_bytes_max_;
  JobShares<TailKey, HeldTail> tails_;
};

// The last `bytes_max` of a tail of which each part may be missing.
HeldTail Joined(const std::optional<SpilledTail>& spilled, const std::optional<HeldTail>& held,
                size_t bytes_max);

}  // namespace gtrain::core
