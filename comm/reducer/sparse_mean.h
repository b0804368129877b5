// How the mean of top-k gradients travels among n ranks of k entries each, 8 bytes an entry. PURE.
//
//   every packet to everyone   2 collectives; a rank receives n k entries, and everybody has the exact sum
//   two stages                 4 collectives; a rank sends k entries to the owners of their shards and gets
//                              at most kReturnedMax k entries back, or one byte an element if that is less
//
// So bytes a rank grow with n up to kReturnedMax ranks, and are O(k) beyond, as long as every rank has a
// shard of its own. A small bucket has fewer shards than ranks, but each rank still sends a slot to all: 64
// bytes or so a rank, up to the cost of the dense gradient, which then travels instead. The sum of n packets
// has up to n k entries: an owner that returned only k of them would select 1 % of a mean once more, which at
// equal noise trains 2 to 3 times slower than the exact sum (docs/design/comm.md has the measured table). The
// entries that it does not return are carried over in its residual. While the density of DGC falls to that of
// the job, an owner returns one byte an element: the packets of many ranks contain nearly all elements.
// Memory a rank: the packets of one step, and in two stages n compressors of 1 / n of the elements.
#pragma once
#include <cstddef>
#include <cstdint>

#include "gtrain/compression.h"

namespace gtrain::comm {

// Ranks whose packets go to everyone, at most.
inline constexpr int kGatherRanksMax = 16;
// Times k entries that owners return, at most: on so many ranks it is all there is.
inline constexpr int kReturnedMax = 48;

// Bytes of a slot for packets of at most `bytes`: they lie in slots of one length.
inline size_t SlotOf(size_t bytes) { return (bytes + 63) / 64 * 64; }

inline constexpr double kEntryBytes = 8;             // index and value
inline constexpr double kInt8Bytes = 1 + 4.0 / 256;  // an element, with its part of a scale

// Bytes that a rank sends and receives in a ring all-reduce of float32, but for the factor 1 - 1 / ranks.
inline uint64_t DenseBytes(size_t count) { return 2 * sizeof(float) * count; }

// Elements of a shard, of which the last ones may have fewer or none: whole blocks of scales, and of top-k at
// least so many that their share of k is 1, as less would be rounded up to it.
size_t ShardSize(const CompressionOptions& options, size_t count, int ranks);

// Whether compressing `count` elements makes them travel as fewer bytes than float32. Always for DGC, whose
// momentum is in its compressors.
bool PaysCompressed(const CompressionOptions& options, size_t count, int ranks);

// Whether every top-k packet of `count` elements goes to everyone. Behind a warm-up: what is held back by an
// owner arrives later, so the way follows from the density that lasts.
bool GoesToEveryone(const CompressionOptions& options, size_t count, int ranks);

// How the owner of a shard compresses its mean, which `ranks` ranks sent with `senders`: without momentum,
// which is about gradients.
CompressionOptions OwnerOptions(const CompressionOptions& senders, int ranks);

}  // namespace gtrain::comm
