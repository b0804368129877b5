// Sizes of texts are of the writers' own output where that is cheap, the root, and else counted: a hash takes
// a line of its own.
#include "checkpoint/plan/limits.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/units.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/shares.h"

namespace gtrain::ckpt {
namespace {

constexpr uint64_t kChunkTextBytes = 40;       // a hash, indented, with quotes and comma
constexpr uint64_t kFileTextBytes = 400;       // the rest of a file's entry
constexpr uint64_t kPerRankTextBytes = 24;     // a length
constexpr uint64_t kSmallTextBytes = 8 << 10;  // all else in a part or a root

absl::Status TooLarge(const std::string& what, uint64_t bytes, uint64_t bytes_max, const char* remedy) {
  return absl::ResourceExhaustedError(absl::StrCat("this state cannot be saved: ", what, " would have ",
                                                   PrintBytes(bytes), ", over the limit of ",
                                                   PrintBytes(bytes_max), ": ", remedy));
}

}  // namespace

absl::Status CheckLimits(const std::vector<Registered>& registered, int rank, int world_size,
                         uint64_t file_bytes_max) {
  const ShardPlan mine = PlanShard(registered, rank, world_size);
  if (mine.header.size() > kHeaderBytesMax) {
    return TooLarge(absl::StrCat("the header of the file of rank ", rank, ", which names ",
                                 mine.pieces.size(), " tensors,"),
                    mine.header.size(), kHeaderBytesMax, "register fewer, larger tensors");
  }
  const uint64_t file_max = std::min(file_bytes_max, kFileBytesMax);
  const uint64_t tail = HasTail(registered) ? kByteEntriesMax : 0;  // what each save may have on top
  if (mine.file_bytes() + tail > file_max) {
    return TooLarge(absl::StrCat("the file of rank ", rank), mine.file_bytes() + tail, file_max,
                    "the storage takes no larger file; shard the state over more ranks (AddSharded)");
  }
  Manifest root{.world_size = world_size};
  uint64_t own = tail;  // bytes of this rank alone
  for (const Registered& r : registered) {
    root.tensors.push_back(r.tensor);
    if (r.tensor.layout == Layout::kPerRank) own += r.bytes;
  }
  absl::StatusOr<Shares> shares = Shares::Make(root.tensors, world_size);
  GT_CHECK(shares.ok());
  const int first = PartOf(rank) * kPartRanks, last = std::min(first + kPartRanks, world_size);
  uint64_t part_bytes = kSmallTextBytes;
  for (int r = first; r < last; ++r) {
    const uint64_t file_bytes = mine.header.size() + shares->DataBytes(r) + own;
    part_bytes += kFileTextBytes + (file_bytes / kChunkBytes + 1) * kChunkTextBytes +
                  mine.per_rank.size() * kPerRankTextBytes;
  }
  if (part_bytes > kPartBytesMax) {
    return TooLarge(absl::StrCat("the part of the manifest that describes ranks ", first, " to ", last - 1),
                    part_bytes, kPartBytesMax,
                    "64 ranks may have 6.4 TiB together; shard the state over more ranks (AddSharded)");
  }
  root.parts.assign(static_cast<size_t>(PartCount(world_size)), {.bytes = 1, .xxh3 = std::string(32, '0')});
  root.files.resize(static_cast<size_t>(world_size));
  const uint64_t root_bytes = Print(root).size() + root.parts.size() * 64 + kSmallTextBytes;
  if (root_bytes > kManifestBytesMax) {
    return TooLarge(absl::StrCat("the manifest, which names ", root.tensors.size(), " tensors,"), root_bytes,
                    kManifestBytesMax, "register fewer, larger tensors");
  }
  return absl::OkStatus();
}

}  // namespace gtrain::ckpt
