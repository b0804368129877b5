// Which checkpoints go after a commit. Nothing is deleted that a reader could still be asked to resume from.
#pragma once
#include <optional>
#include <vector>

#include "checkpoint/format/names.h"

namespace gtrain::ckpt {

struct Retained {
  SaveId id;
  bool finite = true;
};

struct StoredCheckpoints {
  SaveId just_committed;            // read back and verified
  std::vector<Retained> committed;  // with a readable manifest; holds just_committed
  std::vector<SaveId> aborted;      // an abort marker stands under the manifest's key
  std::vector<SaveId> damaged;      // a manifest that cannot be used
  std::vector<SaveId> folders;      // attempts with shards or parts of them
  std::vector<SaveId> pinned;       // by a person: never deleted
  std::optional<SaveId> resumed;    // what this run was resumed from
  std::optional<SaveId> verified;   // the newest one that was verified by reading it
};

struct RetentionPlan {
  std::vector<SaveId> manifests;  // deleted first, oldest first
  std::vector<SaveId> folders;    // then these
};

// Kept are: saves that are newer than `resumed` and of an earlier life of the directory (they were passed
// over, for whatever reason, and may be good), the one that was `verified` last, the one just committed, the
// newest `keep` (at least 1) in the order of SaveId, the newest whose numbers are all finite (fault C14), and
// pinned ones. An attempt without a manifest is deleted once a newer save is committed: attempts that may
// still be committed must not be among `folders` (plan/garbage.h).
RetentionPlan PlanRetention(const StoredCheckpoints& stored, int keep);

}  // namespace gtrain::ckpt
