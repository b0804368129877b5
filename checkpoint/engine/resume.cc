// "Recovery inside a run always resumes" needs no generation number here: the claim that a job leaves in the
// directory says that it passed the identity rule before, and with --fresh everything it may resume from
// carries its own epoch.
#include "checkpoint/engine/resume.h"

#include <algorithm>
#include <variant>

#include "absl/strings/str_cat.h"
#include "base/logging.h"
#include "base/status_macros.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/storage_error.h"
#include "checkpoint/store/open_store.h"

namespace gtrain::ckpt {
namespace {

std::string Show(const Identity& who) {
  return absl::StrCat("job \"", who.job.empty() ? "(run by hand)" : who.job, "\", job hash \"",
                      who.job_hash.empty() ? "(none)" : who.job_hash, "\"");
}

// Returns whether the newest owner is at work. For a job of this cluster the head knows that, and said so in
// the grant; for any other the lease tells.
absl::StatusOr<std::optional<std::string>> HolderOf(port::BlobStore* store, const OwnerClaim& claim,
                                                    const Settings& settings, const LivenessCheck& check) {
  const bool of_this_cluster =
      !claim.owner.cluster.empty() && claim.owner.cluster == settings.identity.cluster;
  if (!of_this_cluster || !settings.live_jobs) return WhoHolds(store, claim, check);
  if (!settings.live_jobs->contains(claim.owner.job)) return std::nullopt;
  return std::optional<std::string>("which is not over, says the head");
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

// The claim that this job made in an earlier generation; nullopt: none. FailedPrecondition: it has lost the
// directory since.
absl::StatusOr<std::optional<OwnerClaim>> FindOwn(port::BlobStore* store,
                                                  const std::vector<OwnerClaim>& owners, const Identity& self,
                                                  bool has_identity) {
  for (auto it = owners.rbegin(); has_identity && it != owners.rend(); ++it) {
    if (it->owner.cluster != self.cluster || it->owner.job != self.job) continue;
    if (it == owners.rbegin()) return *it;
    return absl::FailedPreconditionError(absl::StrCat(
        store->Describe(), " was taken over by ", DescribeOwner(owners.back().owner), "; this job, ",
        DescribeOwner(self),
        ", saves nothing more there. Launch it again to continue: with --takeover if the other one "
        "still runs"));
  }
  return std::nullopt;
}

// OK: the newest owner may be followed.
absl::Status JudgeOwner(port::BlobStore* store, const std::vector<OwnerClaim>& owners,
                        const Settings& settings, const LivenessCheck& check, std::string* taken_from) {
  if (owners.empty()) return absl::OkStatus();
  GT_ASSIGN_OR_RETURN(const std::optional<std::string> holder,
                      HolderOf(store, owners.back(), settings, check));
  if (holder && !settings.takeover) {
    return absl::FailedPreconditionError(absl::StrCat(
        store->Describe(), " is in use: it belongs to ", DescribeOwner(owners.back().owner), ", ", *holder,
        ". To look at its checkpoints open it read-only; to train on your own choose another checkpoint "
        "directory; to take it away from there: --takeover (or GTRAIN_TAKEOVER=1)"));
  }
  if (holder) *taken_from = absl::StrCat(DescribeOwner(owners.back().owner), ", ", *holder);
  return absl::OkStatus();
}

// Whether somebody claims `epoch` within the time that it takes to put a claim after a lease.
absl::StatusOr<bool> AwaitClaim(port::BlobStore* store, uint64_t epoch, const LivenessCheck& check) {
  constexpr absl::Duration kClaimWithin = absl::Seconds(5), kLook = absl::Milliseconds(50);
  const RealClock clock;
  const Instant deadline = clock.Now() + kClaimWithin;
  StopFlag never;
  while (true) {
    const absl::Status claim = store->Size(OwnerKey(epoch)).status();
    if (!absl::IsNotFound(claim)) return claim.ok() ? absl::StatusOr<bool>(true) : claim;
    if (clock.Now() >= deadline) return false;
    GT_RETURN_IF_ERROR(check.alive());
    (void)never.Await(kLook);
  }
}

}  // namespace

absl::StatusOr<OwnerClaim> TakeDirectory(port::BlobStore* store, const Settings& settings, bool has_identity,
                                         const LivenessCheck& check, std::string* taken_from,
                                         absl::FunctionRef<absl::Status(uint64_t, bool)> hold,
                                         absl::FunctionRef<void()> let_go) {
  constexpr int kTriesMax = 20;
  bool fresh = true;
  for (int i = 0; i < kTriesMax; ++i) {
    taken_from->clear();
    std::vector<OwnerClaim> owners;
    GT_ASSIGN_OR_RETURN(const uint64_t epoch, NextEpoch(store, &owners));
    GT_ASSIGN_OR_RETURN(const std::optional<OwnerClaim> own,
                        FindOwn(store, owners, settings.identity, has_identity));
    if (own) {
      GT_RETURN_IF_ERROR(hold(own->epoch, false));
      return *own;
    }
    GT_RETURN_IF_ERROR(JudgeOwner(store, owners, settings, check, taken_from));
    // A job that resumes from another place has not said what to do with the checkpoints here, and retention
    // would delete them.
    const bool says_nothing =
        settings.resume == Resume::kIfSameJob ||
        (settings.resume == Resume::kUri && !SamePlace(settings.resume_uri, settings.uri));
    if (says_nothing) GT_RETURN_IF_ERROR(CheckIdentity(store, settings.identity));
    const absl::Status held = hold(epoch, fresh);
    if (absl::IsAlreadyExists(held)) {
      // Somebody is about to claim it, or died there; then it is taken from the dead.
      GT_ASSIGN_OR_RETURN(const bool claimed, AwaitClaim(store, epoch, check));
      fresh = claimed;
      continue;
    }
    GT_RETURN_IF_ERROR(held);
    absl::StatusOr<OwnerClaim> claim = ClaimOwnership(store, settings.identity, epoch);
    if (!absl::IsAlreadyExists(claim.status())) return claim;
    let_go();  // the other one is judged next: nothing of ours may look like its lease
    fresh = true;
  }
  return absl::AbortedError(absl::StrCat("other jobs keep taking ", store->Describe(), " first"));
}

absl::Status CheckStillOwned(port::BlobStore* store, const Identity& self, bool has_identity) {
  GT_ASSIGN_OR_RETURN(const std::vector<OwnerClaim> owners, ListOwners(store));
  return FindOwn(store, owners, self, has_identity).status();
}

absl::StatusOr<bool> HasClaimOf(port::BlobStore* store, const Identity& self, bool has_identity) {
  GT_ASSIGN_OR_RETURN(const std::vector<OwnerClaim> owners, ListOwners(store));
  GT_ASSIGN_OR_RETURN(const std::optional<OwnerClaim> own, FindOwn(store, owners, self, has_identity));
  return own.has_value();
}

absl::Status FindNewest(port::BlobStore* store, const SaveId& newest, absl::Duration patience,
                        absl::FunctionRef<absl::Status()> alive) {
  constexpr absl::Duration kLook = absl::Milliseconds(100);
  const RealClock clock;
  const Instant deadline = clock.Now() + patience;
  StopFlag never;
  while (true) {
    const absl::Status there = store->Size(ManifestKey(newest)).status();
    if (!absl::IsNotFound(there)) return there;
    // Retention of a later commit may have taken it before the head heard of that commit.
    GT_ASSIGN_OR_RETURN(const std::vector<SaveId> ids, ListManifests(store));
    for (const SaveId& id : ids) {
      if (id.epoch != newest.epoch || id <= newest) continue;
      const auto read = ReadManifest(store, id);
      if (read.ok() && std::holds_alternative<Manifest>(*read)) return absl::OkStatus();
    }
    if (clock.Now() >= deadline) break;
    GT_RETURN_IF_ERROR(alive());
    (void)never.Await(kLook);
  }
  return StorageError(absl::UnavailableError(absl::StrCat(
      "the newest checkpoint of this job, ", ManifestKey(newest), ", is not in ", store->Describe(),
      ": is the file system mounted, is it the right bucket? Nothing is begun anew while it is missing. If "
      "it was "
      "deleted on purpose: stop the job and launch it again")));
}

std::vector<Candidate> Candidates(const Settings& settings, uint64_t own_epoch,
                                  const std::vector<SaveId>& here, const std::vector<SaveId>& elsewhere) {
  std::vector<Candidate> out;
  for (const SaveId& id : here) {
    if (id.epoch == own_epoch) out.push_back({false, id});
  }
  const std::optional<SaveId>& newest = settings.newest;
  if (newest && newest->epoch == own_epoch) {  // a listing may be stale (fault S7)
    const auto newer = [&](const Candidate& c) { return c.id > *newest; };
    const auto place = std::partition_point(out.begin(), out.end(), newer);
    if (place == out.end() || place->id != *newest) out.insert(place, {false, *newest});
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

bool IsForeign(const Settings& settings, uint64_t own_epoch, bool committed_own, const Candidate& candidate,
               const Manifest& manifest) {
  const bool own = !candidate.elsewhere && candidate.id.epoch == own_epoch;
  if (own || manifest.owner.job_hash == settings.identity.job_hash) return false;
  return committed_own || settings.resume == Resume::kIfSameJob;
}

}  // namespace gtrain::ckpt
