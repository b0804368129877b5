// From what a job may resume: the owner claim, the identity rule and the order of candidates. Rank 0 only.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/engine/settings.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/port/blob_store.h"

namespace gtrain::ckpt {

// Takes the directory for `self` or finds the claim this job made in an earlier generation.
// FailedPrecondition that shows both jobs: the newest checkpoint is of another job hash and nobody said
// latest or fresh. `has_identity`: false outside gtrain, where every start is a run of its own.
absl::StatusOr<OwnerClaim> TakeDirectory(port::BlobStore* store, const Identity& self, bool has_identity,
                                         Resume resume);

struct Candidate {
  bool elsewhere = false;  // in Settings::resume_uri, not in the job's own directory
  SaveId id;
  bool operator==(const Candidate&) const = default;
};

// What to try, in order. First what this owner wrote, then what the settings allow of earlier ones. `here`
// and `elsewhere` are newest first.
std::vector<Candidate> Candidates(const Settings& settings, uint64_t own_epoch,
                                  const std::vector<SaveId>& here, const std::vector<SaveId>& elsewhere);

}  // namespace gtrain::ckpt
