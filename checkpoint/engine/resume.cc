// "Recovery inside a run always resumes" needs no generation number here: the claim that a job leaves in the
// directory says that it passed the identity rule before, and with --fresh everything it may resume from
// carries its own epoch.
#include "checkpoint/engine/resume.h"

#include "absl/strings/str_cat.h"
#include "base/logging.h"
#include "base/status_macros.h"
#include "checkpoint/engine/catalog.h"

namespace gtrain::ckpt {
namespace {

std::string Show(const Identity& who) {
  return absl::StrCat("job \"", who.job.empty() ? "(run by hand)" : who.job, "\", job hash \"",
                      who.job_hash.empty() ? "(none)" : who.job_hash, "\"");
}

absl::Status CheckIdentity(port::BlobStore* store, const Identity& self) {
  GT_ASSIGN_OR_RETURN(const std::optional<Manifest> newest, NewestManifest(store));
  if (!newest || newest->owner.job_hash == self.job_hash) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(store->Describe(), " holds checkpoints of a different job, the newest of step ",
                   newest->id.step, " by ", Show(newest->owner), "; this is ", Show(self),
                   ". To continue from it: --resume latest (or GTRAIN_RESUME=latest); to begin anew and keep "
                   "it until newer ones "
                   "replace it: --fresh (or GTRAIN_RESUME=fresh); or choose another checkpoint directory"));
}

}  // namespace

absl::StatusOr<OwnerClaim> TakeDirectory(port::BlobStore* store, const Identity& self, bool has_identity,
                                         Resume resume) {
  GT_ASSIGN_OR_RETURN(const std::vector<OwnerClaim> owners, ListOwners(store));
  if (has_identity) {
    for (auto it = owners.rbegin(); it != owners.rend(); ++it) {
      if (it->owner.cluster != self.cluster || it->owner.job != self.job) continue;
      if (it != owners.rbegin()) {
        LogWarning("checkpoint: ", store->Describe(), " was taken over by ", Show(owners.back().owner),
                   "; this job can resume what it wrote there but commits nothing more");
      }
      return *it;
    }
  }
  if (resume == Resume::kIfSameJob) GT_RETURN_IF_ERROR(CheckIdentity(store, self));
  return ClaimOwnership(store, self);
}

std::vector<Candidate> Candidates(const Settings& settings, uint64_t own_epoch,
                                  const std::vector<SaveId>& here, const std::vector<SaveId>& elsewhere) {
  std::vector<Candidate> out;
  for (const SaveId& id : here) {
    if (id.epoch == own_epoch) out.push_back({false, id});
  }
  switch (settings.resume) {
    case Resume::kFresh:
      break;
    case Resume::kIfSameJob:
    case Resume::kLatest:
      for (const SaveId& id : here) {
        if (id.epoch < own_epoch) out.push_back({false, id});
      }
      break;
    case Resume::kStep:
      for (const SaveId& id : here) {
        if (id.epoch < own_epoch && id.step == settings.resume_step) out.push_back({false, id});
      }
      break;
    case Resume::kUri:
      for (const SaveId& id : elsewhere) {
        if (!settings.resume_manifest || id == *settings.resume_manifest) out.push_back({true, id});
      }
      break;
  }
  return out;
}

}  // namespace gtrain::ckpt
