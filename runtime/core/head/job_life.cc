#include "runtime/core/head/job_life.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/probe.h"
#include "base/units.h"
#include "runtime/core/head/documents.h"
#include "runtime/core/head/faults.h"
#include "runtime/core/head/gang.h"
#include "runtime/core/head/over_jobs.h"
#include "runtime/core/head/recovery.h"
#include "runtime/core/head/restart_policy.h"
#include "runtime/core/head/survivor_save.h"

namespace gtrain::core {
namespace {

constexpr size_t kReasonBytesMax = 8 << 10;

// By whom gtrain does not know, since it calls what itself ends stopped.
bool IsKilled(const RankExit& exit) {
  return exit.cause == ExitCause::kSignal || exit.cause == ExitCause::kOom;
}

bool IsError(const RankExit& exit) {
  return exit.cause == ExitCause::kExited && exit.exit_code != 0 && exit.exit_code != kExitSaved;
}

}  // namespace

JobLife::JobLife(HeadContext& context, HeadModel& model, Faults& faults, Recovery& recovery, OverJobs& over)
    : context_(context),
      model_(model),
      config_(context.config()),
      faults_(faults),
      recovery_(recovery),
      over_(over) {}

Job& JobLife::AddJob(JobRecord record, spec::JobSpec spec, Instant now) {
  model_.any_job_seen = true;
  model_.job_order[record.number] = record.id;
  Job& job = model_.jobs[record.id];
  model_.live_jobs[record.number] = &job;
  job.record = std::move(record);
  job.record.goodput.since = context_.Wall(now);
  job.goodput = GoodputLedger(job.record.goodput, now);
  job.written.obsolete = recovery_.TakeSetAside(job.record.id);
  job.user_bytes = BytesOfUser(job.record.spec_text, job.record.env);
  TakeSpec(job, std::move(spec));
  job.client_seen = now;
  return job;
}

void JobLife::TakeSpec(Job& job, spec::JobSpec spec) {
  job.spec = std::move(spec);
  job.demand = DemandOf(job.spec, config_.local);
  if (job.record.size_wanted > 0)
    job.demand.max = job.demand.asked = std::clamp(job.record.size_wanted, job.demand.min, job.demand.max);
  job.location = LocationOf(job.spec);
}

void JobLife::Move(Job& job, JobState state, std::string reason) {
  reason = Shortened(std::move(reason), kReasonBytesMax);
  context_.Dirty(job);
  if (state != job.record.state) {
    GT_CHECK(CanMove(job.record.state, state));
    job.record.state = state;
  } else if (reason == job.record.reason) {
    return;
  }
  job.record.reason = std::move(reason);
  context_.Emit(job, "state", absl::StrCat(Name(state), ": ", job.record.reason),
                IsFinal(state) ? GoodputText(job, context_.step_at()) : "");
  context_.Say(absl::StrCat(job.record.id.value, " ", Name(state), ": ", job.record.reason));
}

// ---------------------------------------------------------------- revoke

void JobLife::SendRevoke(const Job& job, const NodeId& node, EndMode mode, absl::Duration grace) {
  const bool keep = job.spec.in_place && mode == EndMode::kReform;
  context_.Send(
      node, SendKind::kNow,
      Revoke{model_.epoch(), job.record.id, job.record.revoked, mode, grace, job.record.ending_reason, keep});
}

void JobLife::EndKept(const Job& job, const NodeId& node) {
  GT_PROBE("head.ends_kept_processes");
  if (IsFinal(job.record.state))
    return context_.Send(node, SendKind::kReply, ForgetJob{model_.epoch(), job.record.id});
  context_.Send(node, SendKind::kNow,
                Revoke{model_.epoch(), job.record.id, job.record.revoked, EndMode::kReform,
                       job.spec.stop_grace, "no rank goes on with the processes that wait here"});
}

void JobLife::BeginEnding(Job& job, Ending ending, EndMode mode, absl::Duration grace, std::string reason,
                          Instant now) {
  JobRecord& record = job.record;
  GT_CHECK(record.grant.has_value());
  record.revoked = record.generation;
  record.ending = ending;
  record.ending_reason = Shortened(reason, kReasonBytesMax);
  for (const NodePlace& place : record.grant->nodes) {
    if (std::find(record.unreleased.begin(), record.unreleased.end(), place.node) ==
        record.unreleased.end()) {
      record.unreleased.push_back(place.node);
    }
  }
  job.written.unreleased = false;
  for (const NodeId& node : record.unreleased) SendRevoke(job, node, mode, grace);
  // Its processes are granted another one in a few milliseconds, and a head that dies before hears all again.
  if (ending == Ending::kReform && job.ProcessesStay()) context_.WritesMayWait();
  job.start_deadline.reset();
  job.return_deadline.reset();
  job.gone_deadline = now + grace + config_.gone_margin;
  job.ended_meanwhile.clear();
  job.goodput.EndGeneration(now);
  context_.Emit(job, "revoke", absl::StrCat("generation ", record.generation.value, " is over: ", reason),
                GoodputText(job, now));
  if (ending == Ending::kReform || ending == Ending::kReplace) {
    Move(job, JobState::kReconfiguring, std::move(reason));
  } else {
    Move(job, record.state, absl::StrCat("stopping: ", reason));
  }
  ContinueEnding(job, now);
}

void JobLife::ResendEnding(Job& job, const NodeId& node, Instant now) {
  GT_PROBE("head.resends_revoke");
  // Agents remember a stop as a person's word, so nothing else is sent as one.
  const bool stopping =
      job.record.ending == Ending::kCancel || job.record.ending == Ending::kFail || IsFinal(job.record.state);
  const bool over = job.record.ending == Ending::kNone || IsFinal(job.record.state) || !job.gone_deadline;
  const absl::Duration left = over ? absl::ZeroDuration()
                                   : std::clamp(*job.gone_deadline - config_.gone_margin - now,
                                                absl::ZeroDuration(), job.spec.stop_grace);
  const EndMode mode = !stopping                      ? EndMode::kReform
                       : left == absl::ZeroDuration() ? EndMode::kStopNow
                                                      : EndMode::kStop;
  SendRevoke(job, node, mode, left);
}

void JobLife::Release(Job& job, const NodeId& node, Instant now) {
  if (std::erase(job.record.unreleased, node) > 0) {
    job.written.unreleased = false;
    context_.Dirty(job);
  }
  ContinueEnding(job, now);
  model_.schedule = true;
}

// The moment until which ranks of the ending generation may write there, if nothing but their lease stops
// them: commits fence programs with the SDK.
Instant JobLife::MayWriteUntil(const Job& job, const Node& node) const {
  const bool another = job.record.ending == Ending::kReform || job.record.ending == Ending::kReplace;
  if (!another || job.record.sdk || job.spec.overlap == spec::Overlap::kAllow ||
      config_.fence_after <= absl::ZeroDuration()) {
    return Instant();
  }
  const auto& places = job.record.grant->ranks;
  const bool may = std::any_of(places.begin(), places.end(), [&](const RankPlace& place) {
    return place.node == node.record.id && job.ExitOf(place.rank) == nullptr;
  });
  if (!may) return Instant();
  if (node.state != NodeState::kDead)  // it answers, but not this: its lease goes on
    return job.gone_deadline ? *job.gone_deadline + config_.fence_after : Instant();
  const Instant lease = node.heard_at + config_.fence_after + config_.fence_margin;
  const bool taken_away = node.record.notice.kind == NoticeKind::kLeave && node.notice_at;
  return taken_away ? std::min(lease, *node.notice_at + config_.gone_margin) : lease;
}

// Waits for every node that can still answer. Dead ones cannot; one whose time is up is left out of the
// job's next generation and counted as occupied until it answers. Where ranks without the SDK may have been
// left behind, nothing begins before their lease is over.
void JobLife::ContinueEnding(Job& job, Instant now) {
  if (job.record.ending == Ending::kNone || IsFinal(job.record.state)) return;
  const bool time_up = job.gone_deadline && *job.gone_deadline <= now;
  std::optional<Instant> fenced_at;
  std::string hostnames;
  for (const NodeId& id : job.record.unreleased) {
    const auto it = model_.nodes.find(id);
    if (it == model_.nodes.end()) continue;
    if (it->second.state != NodeState::kDead && !time_up) {
      job.fenced_at.reset();  // the time of those that can still answer counts first
      return;
    }
    const Instant until = MayWriteUntil(job, it->second);
    if (until <= now) continue;
    fenced_at = std::max(fenced_at.value_or(until), until);
    absl::StrAppend(&hostnames, hostnames.empty() ? "" : ", ", it->second.record.hostname);
  }
  const bool waits = job.fenced_at.has_value();
  job.fenced_at = fenced_at;
  if (fenced_at && !waits) AwaitFence(job, hostnames, now);
  if (fenced_at) return;
  for (const NodeId& id : job.record.unreleased) {
    const auto it = model_.nodes.find(id);
    if (it == model_.nodes.end() || it->second.state == NodeState::kDead) continue;
    GT_PROBE("head.end_unconfirmed");
    context_.Emit(
        job, "warning",
        absl::StrCat(it->second.record.hostname, " did not confirm that all processes of generation ",
                     job.record.revoked.value, " ended; it is not used meanwhile"));
  }
  FinishEnding(job, now);
}

void JobLife::AwaitFence(Job& job, const std::string& hostnames, Instant now) {
  GT_PROBE("head.awaits_fence");
  const std::string left = PrintDuration(absl::Ceil(*job.fenced_at - now, absl::Seconds(1)));
  const std::string where = Shortened(hostnames, 1 << 9);
  Move(job, job.record.state,
       absl::StrCat(job.record.ending_reason, "; for ", left, " at most ranks of generation ",
                    job.record.revoked.value, " may still run on ", where));
  job.blocked_by = {
      {.node = "",
       .constraint = absl::StrCat(
           where,
           " does not answer, and ranks that do not use gtrain's library may still write there until "
           "their lease is over"),
       .room = 0,
       .held_by = {},
       .unblocked_by =
           absl::StrCat("in at most ", left,
                        "; the node answering; or, once that machine is off, `gtrain node revoke`. "
                        "`overlap: allow` in the job file never waits")}};
}

// Says in one line which ranks ended by themselves when the head had just decided to form their generation
// anew: an agent that knows of the end calls what follows from it stopped. Where a fault is the reason,
// others fail with an error code because of it, and only signals are news.
void JobLife::SayWhoEndedMeanwhile(Job& job, Ending ending) {
  constexpr size_t kNamed = 3;
  const JobRecord& record = job.record;
  const bool fault = ending == Ending::kReform && !record.faults.empty();
  std::vector<std::string> named;
  size_t count = 0;
  for (const int rank : std::exchange(job.ended_meanwhile, {})) {
    const RankExit* exit = job.ExitOf(rank);
    if (exit == nullptr || (fault && rank == record.faults.back().rank)) continue;
    if (!IsKilled(*exit) && (fault || !IsError(*exit))) continue;
    if (++count > kNamed) continue;
    const NodeId& node = PlaceOfRank(*record.grant, rank).node;
    named.push_back(absl::StrCat("rank ", rank, " on ", model_.Hostname(node), ": ", DescribeExit(*exit)));
  }
  if (count == 0) return;
  GT_PROBE("head.says_who_ended_meanwhile");
  const std::string more = count > kNamed ? absl::StrCat("; and ", count - kNamed, " more") : "";
  context_.Emit(
      job, "warning",
      absl::StrCat(count == 1 ? "a rank ended by itself" : absl::StrCat(count, " ranks ended by themselves"),
                   " while generation ", record.generation.value,
                   " was being formed anew, which is charged to nobody: ", absl::StrJoin(named, "; "), more,
                   ". What was written before that: gtrain logs ", record.id.value, " --generation ",
                   record.generation.value));
}

void JobLife::FinishEnding(Job& job, Instant now) {
  const Ending ending = job.record.ending;
  const std::string reason = job.record.ending_reason;
  job.record.ending = Ending::kNone;
  job.gone_deadline.reset();
  job.fenced_at.reset();
  context_.Dirty(job);
  model_.schedule = model_.schedule || job.record.grant.has_value();
  model_.fresh.push_back(job.record.id);  // else its survivors would wait for the next pass over all
  switch (ending) {
    case Ending::kNone:
      return;
    case Ending::kReform:
      faults_.DecideAfterFault(job, now);
      return SayWhoEndedMeanwhile(job, ending);
    case Ending::kReplace:
      GT_PROBE("head.replaced_free_of_charge");
      return SayWhoEndedMeanwhile(job, ending);
    case Ending::kCancel:
      return Finish(job, JobState::kCancelled, reason);
    case Ending::kFail:
      return Finish(job, JobState::kFailed, reason);
  }
}

// ---------------------------------------------------------------- end

// Called before the reports of the ranks are forgotten.
void JobLife::KeepProgress(Job& job) {
  if (job.top_step) job.record.last_step = job.low_step ? job.low_step : job.top_step;
  for (const RankLive& rank : job.ranks) {
    if (!rank.status.loss && !rank.status.diverged) continue;
    job.record.last_loss = rank.status.loss;
    job.record.diverged = rank.status.diverged;
    return;
  }
}

int JobLife::ExitCodeOf(const JobRecord& record) {
  if (record.faults.empty()) return 1;
  const FaultRecord& fault = record.faults.back();
  if (fault.cause == ExitCause::kExited) return std::max(1, fault.exit_code);
  return fault.signal > 0 ? 128 + fault.signal : 1;
}

void JobLife::FinishSaved(Job& job, Ending ending, std::string reason) {
  GT_CHECK(ending == Ending::kFail || ending == Ending::kCancel);
  job.record.after_save = ending;
  job.record.after_save_reason = Shortened(std::move(reason), kReasonBytesMax);
  const bool may_be_due = SurvivorSave::MayBeDue(job) && recovery_.AwaitsHello(job);
  if ((!SurvivorSave::IsDue(job) && !may_be_due) || recovery_.AwaitsWord(job.record.id))
    return FinishAfterSave(job);
  if (ending == Ending::kFail) job.record.exit_code = ExitCodeOf(job.record);
  GT_PROBE("head.saves_before_the_end");
  job.not_before.reset();
  model_.schedule = true;
  Move(job, job.record.state, absl::StrCat("saves before it ends: ", job.record.after_save_reason));
}

void JobLife::FinishAfterSave(Job& job) {
  Finish(job, job.record.after_save == Ending::kFail ? JobState::kFailed : JobState::kCancelled,
         job.record.after_save_reason);
}

void JobLife::Finish(Job& job, JobState state, std::string reason) {
  JobRecord& record = job.record;
  switch (state) {
    case JobState::kSucceeded:
      record.exit_code = 0;
      break;
    case JobState::kCancelled:
      record.exit_code = 130;
      break;
    default:
      // Not that of what came while it saved.
      if (record.after_save != Ending::kFail || !record.exit_code) record.exit_code = ExitCodeOf(record);
  }
  record.waits_for_storage = false;
  record.ended_at = context_.Wall(context_.step_at());
  record.run_time = job.RunTime(context_.step_at());
  job.run_mark.reset();
  KeepProgress(job);
  Move(job, state, std::move(reason));
  for (const NodeId& node : record.kept)
    context_.Send(node, SendKind::kReply, ForgetJob{model_.epoch(), record.id});
  if (state == JobState::kFailed)
    context_.Do(WriteFailure{record.id, record.run_dir, FailureOf(model_, job, context_.step_at())});
  context_.Do(*ResultOf(model_, record.id, context_.step_at()));
  job.exchange.reset();
  job.kept.clear();  // they end with what is forgotten
  job.coming.clear();
  job.keep_until.reset();
  job.blocked_by.clear();
  model_.active_at = context_.step_at();
  model_.schedule = model_.schedule || record.grant.has_value();  // without one it held nothing
  if (job.kept_bytes == 0) over_.CountOver(job);
}

}  // namespace gtrain::core
