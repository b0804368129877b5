#include "runtime/core/head/job_timers.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/probe.h"
#include "base/units.h"
#include "runtime/core/head/faults.h"
#include "runtime/core/head/grants.h"
#include "runtime/core/head/job_life.h"
#include "runtime/core/head/leaves.h"
#include "runtime/core/head/links.h"
#include "runtime/core/head/newcomers.h"
#include "runtime/core/head/polls.h"
#include "runtime/core/head/rank_news.h"
#include "runtime/core/head/sizing.h"
#include "runtime/core/head/stalls.h"
#include "runtime/core/head/survivor_save.h"

namespace gtrain::core {

JobTimers::JobTimers(HeadContext& context, HeadModel& model, JobLife& life, Grants& grants, Faults& faults,
                     Links& links, Leaves& leaves, Newcomers& newcomers, RankNews& ranks, Stalls& stalls,
                     Polls& polls, Sizing& sizing, SurvivorSave& save)
    : model_(model),
      config_(context.config()),
      life_(life),
      grants_(grants),
      faults_(faults),
      links_(links),
      leaves_(leaves),
      newcomers_(newcomers),
      ranks_(ranks),
      stalls_(stalls),
      polls_(polls),
      sizing_(sizing),
      save_(save) {}

void JobTimers::Run(Job& job, Instant now) {
  const std::optional<Instant> ends_at = job.fenced_at ? job.fenced_at : job.gone_deadline;
  if (ends_at && *ends_at <= now) life_.ContinueEnding(job, now);
  if (IsFinal(job.record.state)) return;
  links_.LinkStep(job, now);
  leaves_.LeaveStep(job, now);
  if (job.left_at && *job.left_at <= now) {
    job.left_at.reset();
    ranks_.SayWhoLeft(job, nullptr);
  }
  if (job.Live() && job.cause_at && *job.cause_at <= now) return faults_.FailBy75(job, now);
  LetWaitingGo(job, now);
  if (job.not_before && *job.not_before <= now && job.Wanting()) {
    job.not_before.reset();
    model_.schedule = true;
  }
  if (job.Live() && job.start_deadline && *job.start_deadline <= now) return FailLateStart(job, now);
  FailHungProcesses(job, now);
  save_.Step(job, now);
  newcomers_.Consider(job, now);
  sizing_.GrowInPlace(job, now);
  if (EndIfItsTimeIsUp(job, now)) return;
  stalls_.CheckStalls(job, now);
}

void JobTimers::FailLateStart(Job& job, Instant now) {
  GT_PROBE("head.start_timeout");
  FaultRecord fault;
  fault.kind = FaultKind::kInfrastructure;
  fault.cause = ExitCause::kStartFailed;
  for (const RankPlace& place : job.record.grant->ranks) {
    if (job.ranks[place.rank].started || job.ExitOf(place.rank) != nullptr) continue;
    fault.rank = place.rank;
    fault.node = place.node;
    break;
  }
  fault.hostname = model_.Hostname(fault.node);
  fault.message =
      absl::StrCat("rank ", fault.rank, " on ", fault.hostname, " had not started when its time was up");
  faults_.Fail(job, std::move(fault), now);
}

void JobTimers::LetWaitingGo(Job& job, Instant now) {
  if (!job.keep_until || now < *job.keep_until) return;
  grants_.LetKeptGo(job, {});
  model_.schedule = true;
}

// The library of a process that goes on answers for it, also when its program hangs. Such a process is ended
// with this generation, and the others go on.
void JobTimers::FailHungProcesses(Job& job, Instant now) {
  if (!job.Live() || !job.return_deadline || now < *job.return_deadline) return;
  job.return_deadline.reset();
  const RankPlace* first = nullptr;
  bool unheard = false;
  for (const RankPlace& place : job.record.grant->ranks) {
    const bool joined = job.ranks[place.rank].status.state == RankState::kJoined;
    if (place.process.generation.value == 0 || joined || job.ExitOf(place.rank) != nullptr) continue;
    const auto node = model_.nodes.find(place.node);
    if (node == model_.nodes.end() || now - node->second.heard_at > config_.heartbeat_interval * 3) {
      unheard = true;  // it may have joined, and the failure detector judges its node
      continue;
    }
    job.hung.insert(place.process);
    if (first == nullptr) first = &place;
  }
  if (unheard) {
    job.hung.clear();
    job.return_deadline = now + config_.return_timeout;
    return;
  }
  if (first == nullptr) return;
  GT_PROBE("head.process_did_not_return");
  FaultRecord fault;
  fault.kind = FaultKind::kCrash;
  fault.cause = ExitCause::kStopped;
  fault.rank = first->rank;
  fault.node = first->node;
  fault.hostname = model_.Hostname(fault.node);
  fault.message =
      absl::StrCat("rank ", fault.rank, " on ", fault.hostname,
                   " went on from the generation before and has not joined this one: its program hangs",
                   job.hung.size() > 1 ? absl::StrCat(" (and ", job.hung.size() - 1, " more)") : "");
  faults_.Fail(job, std::move(fault), now);
}

bool JobTimers::EndIfItsTimeIsUp(Job& job, Instant now) {
  if ((!job.Live() && !job.Wanting()) || job.record.after_save != Ending::kNone) return false;
  Ending ending = Ending::kNone;
  std::string reason;
  if (job.spec.time_limit && job.RunTime(now) >= *job.spec.time_limit) {
    ending = Ending::kFail;
    reason = absl::StrCat("limits.time of ", PrintDuration(*job.spec.time_limit), " is over");
  } else if (job.record.end_with_client && !polls_.ClientWaits(job) &&
             now - job.client_seen >= config_.client_lease) {
    ending = Ending::kCancel;
    reason = "the client it should end with has gone silent";
  } else {
    return false;
  }
  if (job.Live()) {
    life_.BeginEnding(job, ending, EndMode::kStop, job.spec.stop_grace, std::move(reason), now);
  } else {
    GT_PROBE("head.time_up_between_generations");
    life_.FinishSaved(job, ending, std::move(reason));
  }
  return true;
}

std::optional<Instant> JobTimers::NextDeadline(const Job& job) const {
  std::optional<Instant> next;
  const auto sooner = [&](std::optional<Instant> other) {
    if (other) next = std::min(next.value_or(*other), *other);
  };
  sooner(job.fenced_at ? job.fenced_at : job.gone_deadline);
  sooner(job.Wanting() ? job.not_before : std::nullopt);
  sooner(job.keep_until);
  for (const Instant until : job.avoided_until) sooner(until);
  if (!job.Live() && !job.Wanting()) return next;
  const bool ends = job.record.after_save != Ending::kNone;
  if (job.spec.time_limit && job.run_mark && !ends)
    sooner(*job.run_mark + (*job.spec.time_limit - job.record.run_time));
  if (job.record.end_with_client && !ends && !polls_.ClientWaits(job))
    sooner(job.client_seen + config_.client_lease);
  if (!job.Live()) return next;
  sooner(job.start_deadline);
  sooner(job.return_deadline);
  sooner(leaves_.NextDeadline(job));
  sooner(save_.NextDeadline(job));
  sooner(newcomers_.NextDeadline(job));
  sooner(sizing_.GrowsInPlaceAt(job));
  sooner(job.links_at);
  sooner(job.left_at);
  sooner(job.cause_at);
  sooner(stalls_.NextDeadline(job));
  return next;
}

}  // namespace gtrain::core
