// Limits of a save, checked when state is registered and not after hours of training and an upload.
//
// Ceilings, with chunks of 4 MiB: a part of a manifest (64 MiB of text, 64 ranks) describes 6.4 TiB. So a
// rank that is as large as the others of its part may have 102 GiB of state, one rank alone 6.4 TiB (if the
// storage takes a file of that size), and a checkpoint 6.4 TiB for every 64 ranks: 409 TiB of 4,096 ranks,
// 10,000 TiB of 99,999.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "checkpoint/plan/save_plan.h"

namespace gtrain {

// Byte entries and what PerRankRule::kKeep carries, of one rank in one save.
inline constexpr size_t kByteEntriesMax = size_t{64} << 20;

}  // namespace gtrain

namespace gtrain::ckpt {

// Checks whether `rank` can save `registered`: the header and the length of its file, the part of the
// manifest that describes it, and the root. `file_bytes_max` is the largest file that the storage takes. The
// other ranks of the part are taken to have as much state of their own as this one. State whose size may
// change from save to save counts with its bound, kByteEntriesMax; boxes are known (Registration::Freeze).
// ResourceExhausted names the limit and says what to do; every sharding in `registered` is possible in this
// world. Costs what planning 64 ranks' files costs, no requests.
absl::Status CheckLimits(const std::vector<Registered>& registered, int rank, int world_size,
                         uint64_t file_bytes_max);

}  // namespace gtrain::ckpt
