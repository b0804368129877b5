// Decides from what a job may resume: the owner claim, the identity rule and the order of candidates. Rank 0
// only.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/engine/lease.h"
#include "checkpoint/engine/settings.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/port/blob_store.h"

namespace gtrain::ckpt {

// Takes the directory for `settings.identity` or finds the claim this job made in an earlier generation.
// `has_identity`: false outside gtrain, where every start is a run of its own. `taken_from`, if not empty
// then, names the owner that lived and lost the directory, for people. FailedPrecondition: another owner
// lives and nobody said takeover; this job lost the directory to a later one, which it never takes back by
// itself; or the newest checkpoint is of another job hash and nobody said latest or fresh. Each says who,
// since when, and what to do.
//
// `hold` is called with the epoch before a claim of it is put, and with `fresh` when nobody may have held a
// lease of it: AlreadyExists says that somebody has. Then that one is waited for and judged like any owner.
// `let_go` is called when the claim then went to somebody else.
absl::StatusOr<OwnerClaim> TakeDirectory(
    port::BlobStore* store, const Settings& settings, bool has_identity, const LivenessCheck& check,
    std::string* taken_from,
    absl::FunctionRef<absl::Status(uint64_t epoch, bool fresh)> hold = [](uint64_t,
                                                                          bool) { return absl::OkStatus(); },
    absl::FunctionRef<void()> let_go = [] {});

// FailedPrecondition, as TakeDirectory says it, when this job owned the directory and a later owner has it
// now.
absl::Status CheckStillOwned(port::BlobStore* store, const Identity& self, bool has_identity);
// Whether the newest owner is this job. Errors as of CheckStillOwned.
absl::StatusOr<bool> HasClaimOf(port::BlobStore* store, const Identity& self, bool has_identity);

// The newest checkpoint that the head knows is there, or something newer of its owner that is committed too.
// Else a storage error (IsStorageError) that names it: a directory that is not mounted looks like an empty
// one (fault S7). Blocks up to `patience` for a file system whose clients see late what others wrote.
absl::Status FindNewest(port::BlobStore* store, const SaveId& newest, absl::Duration patience,
                        absl::FunctionRef<absl::Status()> alive);

struct Candidate {
  bool elsewhere = false;  // in Settings::resume_uri, not in the job's own directory
  SaveId id;
  bool operator==(const Candidate&) const = default;
};

// Returns the checkpoints to try, in order: first those that this owner wrote, `settings.newest` among them
// whether or not it was listed, then those earlier ones that the settings allow. `here` and `elsewhere` are
// newest first. The caller drops checkpoints of another job once this one has committed something
// (IsForeign).
std::vector<Candidate> Candidates(const Settings& settings, uint64_t own_epoch,
                                  const std::vector<SaveId>& here, const std::vector<SaveId>& elsewhere);

// Whether `settings` forbid to resume from `manifest`, found as `candidate`, because another job wrote it.
// Before this job has committed anything --resume allows it; afterwards nothing does, since what it would
// replace is this run's own progress.
bool IsForeign(const Settings& settings, uint64_t own_epoch, bool committed_own, const Candidate& candidate,
               const Manifest& manifest);

}  // namespace gtrain::ckpt
