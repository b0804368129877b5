// What a rank tells the writer outside its process: once how to save what lies in their shared memory, and
// with each save what differs. Values only.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/format/manifest.h"

namespace gtrain::ckpt {

// The part of a rank's save besides its share of the tensors.
struct SaveTail {
  std::vector<uint64_t> per_rank;  // bytes of each kPerRank tensor, in their order
  std::vector<KeptBlob> kept;      // ascending
  bool operator==(const SaveTail&) const = default;
};
inline constexpr size_t kTailTextBytesMax = 4 << 20;

// The order of a rank to the writer outside its process, given once: how to save what lies in their shared
// memory.
struct SaveOrder {
  std::string location;  // of the store; an absolute path, or a URI
  Identity owner;
  uint64_t epoch = 1;
  int rank = 0;
  int world_size = 1;
  int keep = 3;
  int shard_tries = 1;
  uint64_t commit_timeout_ms = 0;
  std::vector<GlobalTensor> tensors;  // as registered
  std::vector<uint64_t> bytes;        // this rank's, of each
  bool has_tail = false;              // each save has a SaveTail, which says the bytes of kPerRank tensors
  bool operator==(const SaveOrder&) const = default;
};

std::string Print(const SaveOrder& order);
std::string Print(const SaveTail& tail);

// DataLoss for anything hostile or damaged, and when the tensors cannot be saved in its world.
absl::StatusOr<SaveOrder> ParseSaveOrder(absl::string_view text);
// Likewise; DataLoss as well when it is not a tail of `order`, which is that of the same rank.
absl::StatusOr<SaveTail> ParseSaveTail(absl::string_view text, const SaveOrder& order);

}  // namespace gtrain::ckpt
