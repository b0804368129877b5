// Whose a checkpoint directory is, as far as the head can know: two jobs of this cluster that save to one
// would take it from each other, so the second one is refused before anything of it starts. What a program by
// hand or another cluster does is seen by the ranks themselves, in the directory's owner file.
//
// Directories are compared by name: the head may not see the file system of the nodes. A symbolic link is
// another name, and the ranks find out.
#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/path.h"
#include "base/probe.h"
#include "base/units.h"
#include "runtime/core/head_state.h"

namespace gtrain::core {
namespace {

// One name for each directory; empty: the job saves nowhere, perhaps because it only reads.
std::string LocationOf(const spec::JobSpec& spec) {
  absl::string_view uri = spec.checkpoint.uri;
  if (uri.empty() || spec.checkpoint.read_only) return "";
  std::string location(uri);
  if (!absl::StrContains(uri, "://") || absl::ConsumePrefix(&uri, "file://")) {
    location = JoinPath(spec.workdir, uri);
  }
  while (location.size() > 1 && location.back() == '/' && !absl::EndsWith(location, "://"))
    location.pop_back();
  return location;
}

}  // namespace

// At most as many as live jobs, once a submit.
std::vector<Job*> HeadState::OthersIn(const std::string& location, const JobId& but) {
  std::vector<Job*> others = LiveJobs();
  std::erase_if(others, [&](const Job* job) {
    return location.empty() || job->record.id == but || LocationOf(job->spec) != location;
  });
  return others;
}

absl::Status HeadState::CheckDirectory(const spec::JobSpec& spec, Instant now) {
  const std::string location = LocationOf(spec);
  const std::vector<Job*> others = OthersIn(location, JobId());
  if (others.empty()) return absl::OkStatus();
  GT_PROBE("head.directory_in_use");
  const JobRecord& owner = others.back()->record;
  const absl::Duration age =
      std::max(absl::Seconds(1), absl::Floor(RunTime(*others.back(), now), absl::Seconds(1)));
  const std::string since = owner.generation.value == 0
                                ? "not started yet"
                                : absl::StrCat("started ", absl::FormatDuration(age), " ago");
  return absl::FailedPreconditionError(absl::StrCat(
      "job ", owner.id.value, " of ", owner.owner, " saves its checkpoints to ", location,
      " and is not over (", Name(owner.state), ", ", since, "). Look at it with `gtrain attach ",
      owner.id.value, "`, end it with `gtrain stop ", owner.id.value,
      "`, name another checkpoint.uri, or take the directory from it with `gtrain launch --takeover`"));
}

void HeadState::SayWhoTakesOver(Job& taker) {
  const std::string location = LocationOf(taker.spec);
  std::vector<std::string> losers;
  for (Job* loser : OthersIn(location, taker.record.id)) {
    GT_PROBE("head.directory_taken_over");
    losers.push_back(loser->record.id.value);
    Emit(*loser, "owner",
         absl::StrCat(
             "job ", taker.record.id.value, " of ", taker.record.owner, " takes over ", location,
             " (--takeover): this job can commit no more checkpoints there once that one has started"));
    Dirty(*loser);
  }
  if (!losers.empty())
    Emit(taker, "owner", absl::StrCat("takes over ", location, " from ", absl::StrJoin(losers, ", ")));
}

std::vector<JobId> HeadState::LiveJobsToTell(const Job& job) const {
  // The job itself is always among them: a list says that the head knows, also that there is no other.
  std::vector<JobId> ids = {job.record.id};
  for (auto it = job_order_.rbegin(); it != job_order_.rend() && ids.size() < kLiveJobsToldMax; ++it) {
    const Job& other = jobs_.at(it->second);
    if (&other == &job || IsFinal(other.record.state) || LocationOf(other.spec).empty()) continue;
    ids.push_back(it->second);
  }
  return ids;
}

}  // namespace gtrain::core
