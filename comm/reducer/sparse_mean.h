// How the mean of top-k gradients travels among n ranks of k entries each, 8 bytes an entry. PURE.
//
//   every packet to everyone   2 collectives; a rank receives n k entries, and everybody has the exact sum
//   two stages                 4 collectives; a rank sends k entries to the owners of their shards and gets
//                              at most kReturnedMax k entries back, or one byte an element if that is less
//
// So bytes a rank grow with n up to kReturnedMax ranks, and are O(k) beyond. The sum of n packets has up to
// n k entries: an owner that returned only k of them would select 1 % of a mean once more, which at equal
// noise trains 2 to 3 times slower than the exact sum (docs/design/comm.md has the measured table). What it
// does not return is carried over in its residual. Memory a rank: the packets of one step, and of two stages
// n compressors of 1 / n of the elements.
#pragma once
#include <cstddef>

#include "gtrain/compression.h"

namespace gtrain::comm {

// Ranks whose packets go to everyone, at most; and times k entries that owners return, at most.
inline constexpr int kReturnedMax = 16;

inline constexpr double kEntryBytes = 8;             // index and value
inline constexpr double kInt8Bytes = 1 + 4.0 / 256;  // an element, with its part of a scale

// Whether every top-k packet of `count` elements goes to everyone. Behind a warm-up: what is held back by an
// owner arrives later, so the way follows from the density that lasts.
bool GoesToEveryone(const CompressionOptions& options, size_t count, int ranks);

// How the owner of a shard compresses its mean, which `ranks` ranks sent with `senders`: without momentum,
// which is about gradients.
CompressionOptions OwnerOptions(const CompressionOptions& senders, int ranks);

}  // namespace gtrain::comm
