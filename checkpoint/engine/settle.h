// Settles the saves that earlier generations of this job had begun when the new one decides from where to go
// on. Rank 0 only.
#pragma once
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "checkpoint/format/names.h"
#include "checkpoint/port/blob_store.h"

namespace gtrain::ckpt {

// Attempts of earlier generations of `self`'s owner that are neither committed nor given up, as far as the
// storage shows them: of one whose first file is still on its way an object store shows nothing. Two
// listings.
absl::StatusOr<std::vector<SaveId>> ListOpen(port::BlobStore* store, const SaveId& self);

struct SettlePatience {
  // For shards that are not there yet. Writers on this generation's machines have written theirs
  // (Checkpointer::Restore); missing ones are of machines that went away, most likely for good.
  absl::Duration shards = absl::Seconds(10);
  // Where only the commit is missing: little work, but a storage may be slow.
  absl::Duration commit = absl::Minutes(1);
};

// Each attempt of an earlier generation of `self`'s owner is committed or can never be when this returns OK:
// it waits for writers that may still be at it and then creates the abort marker at the manifest's own key.
// `alive` ends the wait with its error.
absl::Status SettleEarlier(port::BlobStore* store, const SaveId& self,
                           absl::FunctionRef<absl::Status()> alive, const SettlePatience& patience = {});

}  // namespace gtrain::ckpt
