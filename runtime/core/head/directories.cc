// The owner of a checkpoint directory, as far as the head can know: two jobs of this cluster that save to one
// would take it from each other, so the second one is refused before anything of it starts. Programs outside
// gtrain and other clusters are seen by the ranks themselves, in the directory's owner file.
//
// Directories are compared by name: the head may not see the file system of the nodes. A symbolic link is
// another name, and the ranks find out. Where the job file names none, the program may save to a directory of
// its own choice: the same job file chooses the same again.
#include "runtime/core/head/directories.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/probe.h"
#include "base/units.h"
#include "runtime/core/head/job_life.h"
#include "runtime/core/values/authority.h"

namespace gtrain::core {
namespace {

// Whether two jobs are equal but for the places of their secrets: on the local cluster each launch has its
// own place.
bool SameJob(const spec::JobSpec& one, const spec::JobSpec& other) {
  if (one == other) return true;
  if (one.secrets.empty() || one.secrets.size() != other.secrets.size()) return false;
  spec::JobSpec with_places = one;
  for (auto& [name, reference] : with_places.secrets) {
    const auto there = other.secrets.find(name);
    if (there == other.secrets.end()) return false;
    reference = there->second;
  }
  return with_places == other;
}

// Finds a live job of the same file and owner that was seen to save, though its file does not say where. A
// user who only runs one program twice at once, with nothing saved, is not kept from it.
const Job* TwinThatSaves(const std::vector<Job*>& live, const spec::JobSpec& spec, const std::string& owner) {
  if (!spec.checkpoint.uri.empty() || spec.checkpoint.read_only) return nullptr;
  const auto twin = std::ranges::find_if(live, [&](const Job* job) {
    return job->checkpoint && !job->checkpoint->manifest.empty() && job->record.owner == owner &&
           SameJob(job->spec, spec);
  });
  return twin == live.end() ? nullptr : *twin;
}

}  // namespace

Directories::Directories(HeadContext& context, HeadModel& model, JobLife& life)
    : context_(context), model_(model), life_(life) {}

// Finds the other live jobs that save to `location`. Looks at every live job, once a submit.
std::vector<Job*> Directories::OthersIn(const std::string& location, const JobId& but) {
  std::vector<Job*> others = model_.LiveJobs();
  std::erase_if(others, [&](const Job* job) {
    return location.empty() || job->record.id == but || job->location != location;
  });
  return others;
}

// A directory that another user's job would use is not its own before that job has run: the first to start
// has it, and the other one is checked again when it could start.
absl::Status Directories::CheckDirectory(const spec::JobSpec& spec, const std::string& owner_of_new,
                                         Instant now) {
  const std::string location = LocationOf(spec);
  std::vector<Job*> others = OthersIn(location, JobId());
  std::erase_if(others, [&](const Job* job) {
    return job->record.owner != owner_of_new && job->record.generation == Generation();
  });
  const Job* holder = others.empty() ? TwinThatSaves(model_.LiveJobs(), spec, owner_of_new) : others.back();
  if (holder == nullptr) return absl::OkStatus();
  GT_PROBE("head.directory_in_use");
  return DirectoryInUse(*holder, owner_of_new, now);
}

// The refusal offers only what the owner of the new job may do with the other one.
absl::Status Directories::DirectoryInUse(const Job& other, const std::string& owner_of_new,
                                         Instant now) const {
  const JobRecord& owner = other.record;
  const std::string location =
      other.location.empty() ? "a folder that its program chose, as this launch of the same job file would,"
                             : other.location;
  const absl::Duration age = std::max(absl::Seconds(1), absl::Floor(other.RunTime(now), absl::Seconds(1)));
  const std::string since = owner.generation.value == 0
                                ? "not started yet"
                                : absl::StrCat("started ", absl::FormatDuration(age), " ago");
  const std::string what =
      absl::StrCat("job ", owner.id.value, " of ", owner.owner, " saves its checkpoints to ", location,
                   " and is not over (", Name(owner.state), ", ", since, "). ");
  if (owner.owner != owner_of_new) {
    return absl::FailedPreconditionError(absl::StrCat(what, "Name another checkpoint.uri, or ask ",
                                                      owner.owner, " or an administrator to stop it"));
  }
  return absl::FailedPreconditionError(absl::StrCat(
      what, "Look at it with `gtrain attach ", owner.id.value, "`, end it with `gtrain stop ", owner.id.value,
      "`, name another checkpoint.uri, or take the directory from it with `gtrain launch --takeover`"));
}

absl::Status Directories::MayTakeOver(const Peer& peer, const spec::JobSpec& spec) {
  if (peer.role == Role::kAdmin) return absl::OkStatus();
  for (const Job* job : OthersIn(LocationOf(spec), JobId())) {
    const JobRecord& other = job->record;
    if (other.owner == OwnerName(peer) || other.generation == Generation()) continue;
    GT_PROBE("head.takeover_refused");
    return absl::PermissionDeniedError(
        absl::StrCat("job ", other.id.value, " belongs to ", other.owner, " and saves to ", LocationOf(spec),
                     ": --takeover is for its owner and for administrators. Name another checkpoint.uri"));
  }
  return absl::OkStatus();
}

// Called before a job's first generation. False: another user's job runs there by now, and this one is over.
// A --takeover is checked again, too: it was allowed when no job ran there.
bool Directories::DirectoryIsFree(Job& job, Instant now) {
  if (job.record.generation != Generation()) return true;
  for (const Job* other : OthersIn(job.location, job.record.id)) {
    if (other->record.owner == job.record.owner || other->record.generation == Generation()) continue;
    if (job.record.takeover && !job.record.takeover_own) continue;
    GT_PROBE("head.directory_in_use_at_start");
    life_.Finish(job, JobState::kFailed,
                 std::string(DirectoryInUse(*other, job.record.owner, now).message()));
    return false;
  }
  if (job.record.takeover) SayWhoTakesOver(job, /*since_its_submit=*/true);
  return true;
}

void Directories::SayWhoTakesOver(Job& taker, bool since_its_submit) {
  const std::string& location = taker.location;
  std::vector<std::string> losers;
  for (Job* loser : OthersIn(location, taker.record.id)) {
    if (since_its_submit && loser->record.number < taker.record.number) continue;
    GT_PROBE("head.directory_taken_over");
    losers.push_back(loser->record.id.value);
    context_.Emit(
        *loser, "owner",
        absl::StrCat(
            "job ", taker.record.id.value, " of ", taker.record.owner, " takes over ", location,
            " (--takeover): this job can commit no more checkpoints there once that one has started"));
    context_.Dirty(*loser);
  }
  if (!losers.empty())
    context_.Emit(taker, "owner",
                  absl::StrCat("takes over ", location, " from ", absl::StrJoin(losers, ", ")));
}

std::vector<JobId> Directories::LiveJobsToTell(const Job& job) const {
  // The job itself is always among them: a list says that the head knows, also that there is no other.
  std::vector<JobId> ids = {job.record.id};
  for (auto it = model_.job_order.rbegin(); it != model_.job_order.rend() && ids.size() < kLiveJobsToldMax;
       ++it) {
    const Job& other = model_.jobs.at(it->second);
    if (&other == &job || IsFinal(other.record.state) || other.spec.checkpoint.read_only) continue;
    ids.push_back(it->second);
  }
  return ids;
}

}  // namespace gtrain::core
