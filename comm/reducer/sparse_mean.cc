#include "comm/reducer/sparse_mean.h"

#include <algorithm>
#include <cmath>

#include "comm/codec/kernels.h"
#include "comm/codec/packet.h"

namespace gtrain::comm {
namespace {

// Packets go to everyone while they are together less than this part of the dense gradient.
constexpr size_t kGatherPart = 4;
constexpr double kTopKMore = 1.1;  // of k, that an approximate top-k may send

size_t RoundUp(size_t value, size_t to) { return (value + to - 1) / to * to; }

// Options that nobody has looked at may say anything.
double DensityOf(const CompressionOptions& options) {
  return options.density > 0 ? std::min(options.density, 1.0) : 1;
}

size_t BytesOf(const CompressionOptions& options, size_t count) {
  const double most = std::ceil(DensityOf(options) * kTopKMore * static_cast<double>(count));
  const size_t entries = options.codec == Codec::kTopK ? std::min(static_cast<size_t>(most), count) : count;
  return PacketBytes({options.codec, 0, count, entries});
}

}  // namespace

size_t ShardSize(const CompressionOptions& options, size_t count, int ranks) {
  const size_t each =
      RoundUp((count + static_cast<size_t>(ranks) - 1) / static_cast<size_t>(ranks), kScaleBlock);
  if (options.codec != Codec::kTopK) return each;
  const double fewest = std::min(1 / DensityOf(options), static_cast<double>(count));
  return std::max(each, RoundUp(static_cast<size_t>(fewest), kScaleBlock));
}

bool PaysCompressed(const CompressionOptions& options, size_t count, int ranks) {
  if (options.momentum > 0 || GoesToEveryone(options, count, ranks)) return true;
  const size_t shard = ShardSize(options, count, ranks);
  const CompressionOptions owner = OwnerOptions(options, ranks);
  const size_t slots = SlotOf(BytesOf(options, shard)) + SlotOf(BytesOf(owner, shard));
  return slots * static_cast<size_t>(ranks) < DenseBytes(count);
}

bool GoesToEveryone(const CompressionOptions& options, size_t count, int ranks) {
  if (options.codec != Codec::kTopK || ranks > kGatherRanksMax) return false;
  return BytesOf(options, count) * static_cast<size_t>(ranks) < count * sizeof(float) / kGatherPart;
}

CompressionOptions OwnerOptions(const CompressionOptions& senders, int ranks) {
  CompressionOptions owner = senders;
  owner.momentum = 0;
  if (senders.codec != Codec::kTopK) return owner;
  owner.density *= std::min(ranks, kReturnedMax);
  if (owner.density * kEntryBytes < kInt8Bytes) return owner;
  owner.codec = Codec::kInt8;
  owner.warmup_steps = 0;
  return owner;
}

}  // namespace gtrain::comm
