// The newest save of an earlier generation whose upload has not ended, when near tiers hold all of it: a
// generation that takes it from there waits neither for the upload nor for the memory that it is made from.
#pragma once
#include <optional>

#include "absl/status/statusor.h"
#include "checkpoint/engine/near.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/names.h"
#include "checkpoint/port/blob_store.h"

namespace gtrain::ckpt {

// Builds the manifest that this save will have once it is committed, from what its writers left beside the
// copies; `self` is of this generation, `owner` of this job. nullopt: there is none that may be resumed from,
// which is so when
//
// - it is of another owner or was made for another directory: tiers know jobs by their ids alone, and in each
//   cluster they are counted from 1;
// - anything newer of this owner is committed, given up, or open in the storage (ListOpen);
// - its timeline is not below `self`'s. A save that shows nowhere yet may still be committed when this
//   generation has gone on; of an earlier timeline it can never stand before what this one commits;
// - a shard or its description is missing.
//
// Rank 0 only. Asks each tier which attempts it has, then each for its files of one of them, then reads a
// small file for each rank of that save: with 1,000 machines of 8 ranks 10,000 requests, 16 at a time; and
// three listings of the storage when there is such an attempt. Errors are the storage's; a tier that does not
// answer has nothing.
absl::StatusOr<std::optional<Manifest>> FindUncommitted(port::BlobStore* store, const NearTiers& tiers,
                                                        const SaveId& self, const Identity& owner);

}  // namespace gtrain::ckpt
