#include "comm/reducer/sparse_mean.h"

#include <algorithm>

#include "comm/codec/packet.h"

namespace gtrain::comm {
namespace {

// Packets go to everyone while they are together less than this part of the dense gradient.
constexpr size_t kGatherPart = 4;
constexpr double kTopKMore = 1.1;  // of k, that an approximate top-k may send

}  // namespace

bool GoesToEveryone(const CompressionOptions& options, size_t count, int ranks) {
  if (options.codec != Codec::kTopK || ranks > kReturnedMax) return false;
  const auto most = static_cast<size_t>(options.density * kTopKMore * static_cast<double>(count));
  const size_t packet = PacketBytes({options.codec, 0, count, most});
  return packet * static_cast<size_t>(ranks) < count * sizeof(float) / kGatherPart;
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
