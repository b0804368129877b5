// A job from submission to its end.
//
// A generation is granted by writing it into the JobRecord; StartGeneration leaves after that is durable.
// It is taken away by Revoke, which leaves at once; the record follows. Between the two, BeginEnding notes
// what shall become of the job (`ending`) and which nodes may still run its processes (`unreleased`); when
// the last of them has released it, is dead, or its time is up, FinishEnding acts on the note.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/units.h"
#include "runtime/core/head_state.h"
#include "runtime/core/restart_policy.h"

namespace gtrain::core {
namespace {

constexpr size_t kReasonBytesMax = 8 << 10;
constexpr int kPortFirst = 20'000,
              kPortCount = 10'000;  // below Linux's ephemeral range, if an agent named none

}  // namespace

void HeadState::Move(Job& job, JobState state, std::string reason) {
  reason = Shortened(std::move(reason), kReasonBytesMax);
  Dirty(job);
  if (state != job.record.state) {
    GT_CHECK(CanMove(job.record.state, state));
    job.record.state = state;
  } else if (reason == job.record.reason) {
    return;
  }
  job.record.reason = std::move(reason);
  Emit(job, "state", absl::StrCat(Name(state), ": ", job.record.reason));
  Say(absl::StrCat(job.record.id.value, " ", Name(state), ": ", job.record.reason));
}

absl::Duration HeadState::RunTime(const Job& job, Instant now) const {
  return job.run_mark ? job.record.run_time + (now - *job.run_mark) : job.record.run_time;
}

// ---------------------------------------------------------------- scheduling

// Highest priority first, then order of submission. A job that cannot be placed does not hold up later
// ones that can: the gang waits whole, the room it cannot use is used.
void HeadState::Schedule(Instant now) {
  schedule_ = false;
  std::vector<Job*> wanting;
  for (Job* job : LiveJobs()) {
    if (job->Wanting() && (!job->not_before || *job->not_before <= now)) wanting.push_back(job);
  }
  std::stable_sort(wanting.begin(), wanting.end(),
                   [](const Job* a, const Job* b) { return a->spec.priority > b->spec.priority; });
  for (Job* job : wanting) TryPlace(*job, now);
}

std::vector<plan::NodeView> HeadState::Views(const Job& wanting) const {
  std::vector<plan::NodeView> views;
  for (const auto& [id, node] : nodes_) {
    if (!node.welcomed || node.state == NodeState::kDead) continue;
    plan::NodeView view = ViewOf(node.record);
    if (node.record.unclean) view.unusable = "a process survived SIGKILL there";
    if (node.state == NodeState::kSuspect) view.unusable = "suspect: it has fallen silent";
    for (const auto& [job_id, job] : jobs_) {
      const auto& unreleased = job.record.unreleased;
      const bool lingers = std::find(unreleased.begin(), unreleased.end(), id) != unreleased.end();
      if (&job == &wanting) {
        if (lingers) view.unusable = "processes of the last generation are still being ended there";
        continue;
      }
      // A job between two generations keeps its place.
      const bool holds = job.Live() || job.record.state == JobState::kReconfiguring || lingers;
      if (holds && job.record.grant) Occupy(view, *job.record.grant, job.demand);
    }
    views.push_back(std::move(view));
  }
  return views;
}

void HeadState::TryPlace(Job& job, Instant now) {
  plan::Demand demand = job.demand;
  if (job.record.grant) {
    for (const RankPlace& place : job.record.grant->ranks) demand.previous.push_back(place.node);
  }
  const std::vector<plan::NodeView> views = Views(job);
  const plan::Placement placement = plan::Place(views, demand);
  if (placement.placed) {
    Grant(job, placement, now);
  } else {
    NotPlaced(job, placement, views);
  }
}

void HeadState::NotPlaced(Job& job, const plan::Placement& placement,
                          const std::vector<plan::NodeView>& views) {
  const plan::Placement empty = plan::Place(plan::Emptied(views), job.demand);
  std::map<NodeId, std::vector<std::string>> holders;
  for (const auto& [id, other] : jobs_) {
    if (&other == &job || !other.record.grant) continue;
    if (!other.Live() && other.record.unreleased.empty() && other.record.state != JobState::kReconfiguring)
      continue;
    for (const NodePlace& place : other.record.grant->nodes) holders[place.node].push_back(id.value);
  }
  job.blocked_by = Explain(placement, empty, holders);
  if (empty.placed && job.record.generation.value == 0) {
    return Move(job, JobState::kQueued, absl::StrCat("waits for room: ", placement.reason));
  }
  int alive = 0;
  for (const auto& [id, node] : nodes_) alive += node.Usable() ? 1 : 0;
  if (job.record.generation.value == 0 && config_.expected_nodes && alive >= *config_.expected_nodes) {
    return Finish(job, JobState::kFailed, absl::StrCat("can never fit this cluster: ", empty.reason));
  }
  const char* safe = job.record.generation.value > 0 ? "; its state is safe and it resumes by itself" : "";
  Move(job, JobState::kWaiting, absl::StrCat(placement.reason, safe));
}

// ---------------------------------------------------------------- grant

// From rank 0's node: a port it found free, that no other live job there has and this job did not just use.
int HeadState::PickPort(const Job& job, const NodeId& node) {
  std::set<int> taken;
  for (const auto& [id, other] : jobs_) {
    if (other.record.grant && (other.Live() || &other == &job)) taken.insert(other.record.grant->master_port);
  }
  for (const int port : nodes_.at(node).free_ports) {
    if (!taken.contains(port)) return port;
  }
  int port = 0;
  do {
    port = kPortFirst + static_cast<int>(rng_.Below(kPortCount));
  } while (taken.contains(port));
  return port;
}

void HeadState::Grant(Job& job, const plan::Placement& placement, Instant now) {
  JobRecord& record = job.record;
  if (record.grant) {
    job.past[record.generation] = *record.grant;
    if (job.past.size() > 16) job.past.erase(job.past.begin());
  }
  const bool resumes = record.generation.value > 0 && !record.faults.empty() &&
                       record.faults.back().kind != FaultKind::kAddressInUse;
  GenerationGrant grant;
  grant.job = record.id;
  grant.generation = record.generation.Next();
  grant.timeline = record.timeline.value == 0 || resumes ? record.timeline.Next() : record.timeline;
  grant.restart_count = record.restarts;
  grant.resume = job.checkpoint ? "latest" : record.resume;
  grant.ranks = ToRankPlaces(placement);
  grant.world_size = static_cast<int>(grant.ranks.size());
  for (const NodeId& id : placement.nodes) {
    const NodeRecord& node = nodes_.at(id).record;
    grant.nodes.push_back({id, node.address, node.hostname});
    if (std::find(record.kept.begin(), record.kept.end(), id) == record.kept.end()) record.kept.push_back(id);
  }
  grant.master_address = grant.nodes[0].address;
  grant.master_port = PickPort(job, grant.nodes[0].node);
  record.generation = grant.generation;
  record.timeline = grant.timeline;
  record.grant = std::move(grant);
  record.exits.clear();
  job.blocked_by.clear();
  job.not_before.reset();
  job.placement_reason = placement.reason;
  const size_t got = job.demand.count_nodes ? record.grant->nodes.size() : record.grant->ranks.size();
  if (static_cast<int>(got) < job.demand.max) {
    absl::StrAppend(&job.placement_reason, "; it keeps this size until it is re-formed");
  }
  ResetLive(job, now);
  if (!job.run_mark) job.run_mark = now;
  for (const std::string& warning : placement.warnings) Emit(job, "warning", warning);
  Emit(job, "grant",
       absl::StrCat("generation ", record.generation.value, ", timeline ", record.timeline.value, ": ",
                    placement.reason));
  if (record.state == JobState::kReconfiguring) {
    Move(job, JobState::kReconfiguring,
         absl::StrCat("generation ", record.generation.value, " starts: ", placement.reason));
  } else {
    Move(job, JobState::kStarting, placement.reason);
  }
  for (const NodePlace& place : record.grant->nodes) SendGrant(job, place.node);
}

void HeadState::SendGrant(const Job& job, const NodeId& node) {
  GenerationGrant grant = *job.record.grant;
  grant.spec_text = job.record.spec_text;
  grant.client_env = job.record.env;
  grant.run_dir = job.record.run_dir;
  Send(node, SendKind::kGrant, StartGeneration{epoch(), std::move(grant)});
}

// What is known of a generation only while it lives.
void HeadState::ResetLive(Job& job, Instant now) {
  const GenerationGrant& grant = *job.record.grant;
  job.ranks.assign(grant.ranks.size(), RankLive{});
  for (size_t i = 0; i < job.ranks.size(); ++i) {
    job.ranks[i].status.job = grant.job;
    job.ranks[i].status.generation = grant.generation;
    job.ranks[i].status.rank = static_cast<int>(i);
  }
  job.exchange.emplace(grant.world_size, config_.exchange_bytes_max);
  job.any_started = job.checkpointed = job.stall_reported = false;
  job.top_step.reset();
  job.low_step.reset();
  job.steps_per_second = 0;
  job.rate_from.reset();
  job.progress_at = now;
  // A setup script runs before the ranks and may install things.
  job.start_deadline = now + (job.spec.setup.empty() ? config_.start_timeout : job.spec.progress.startup);
  job.gone_deadline.reset();
}

// ---------------------------------------------------------------- revoke

void HeadState::SendRevoke(const Job& job, const NodeId& node, EndMode mode, absl::Duration grace) {
  Send(node, SendKind::kNow,
       Revoke{epoch(), job.record.id, job.record.revoked, mode, grace, job.record.ending_reason});
}

void HeadState::BeginEnding(Job& job, Ending ending, EndMode mode, absl::Duration grace, std::string reason,
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
  for (const NodeId& node : record.unreleased) SendRevoke(job, node, mode, grace);
  job.start_deadline.reset();
  job.gone_deadline = now + grace + config_.gone_margin;
  Emit(job, "revoke", absl::StrCat("generation ", record.generation.value, " is over: ", reason));
  if (ending == Ending::kReform || ending == Ending::kReplace) {
    Move(job, JobState::kReconfiguring, std::move(reason));
  } else {
    Move(job, record.state, absl::StrCat("stopping: ", reason));
  }
  ContinueEnding(job, now);
}

// Waits for every node that can still answer. Dead ones cannot; one whose time is up is left out of the
// job's next generation and counted as occupied until it answers.
void HeadState::ContinueEnding(Job& job, Instant now) {
  if (job.record.ending == Ending::kNone || IsFinal(job.record.state)) return;
  const bool time_up = job.gone_deadline && *job.gone_deadline <= now;
  for (const NodeId& id : job.record.unreleased) {
    const auto it = nodes_.find(id);
    if (it == nodes_.end() || it->second.state == NodeState::kDead) continue;
    if (!time_up) return;
    Emit(job, "warning",
         absl::StrCat(it->second.record.hostname, " did not confirm that all processes of generation ",
                      job.record.revoked.value, " ended; it is not used meanwhile"));
  }
  FinishEnding(job, now);
}

void HeadState::FinishEnding(Job& job, Instant now) {
  const Ending ending = job.record.ending;
  const std::string reason = job.record.ending_reason;
  job.record.ending = Ending::kNone;
  job.gone_deadline.reset();
  Dirty(job);
  schedule_ = true;
  switch (ending) {
    case Ending::kNone:
      return;
    case Ending::kReform:
      return DecideAfterFault(job, now);
    case Ending::kReplace:
      return;
    case Ending::kCancel:
      return Finish(job, JobState::kCancelled, reason);
    case Ending::kFail:
      return Finish(job, JobState::kFailed, reason);
  }
}

void HeadState::DecideAfterFault(Job& job, Instant now) {
  std::vector<PastFault> past;
  for (size_t i = 0; i < job.record.faults.size(); ++i)
    past.push_back({&job.record.faults[i], job.fault_times[i]});
  const FaultRecord& fault = job.record.faults.back();
  const RestartVerdict verdict = DecideRestart(job.spec.restart, past, now, rng_);
  if (!verdict.restart) {
    return Finish(job, JobState::kFailed, absl::StrCat(fault.message, "; ", verdict.reason));
  }
  if (fault.kind != FaultKind::kAddressInUse && fault.kind != FaultKind::kSaved) ++job.record.restarts;
  std::string again;
  if (verdict.delay > absl::ZeroDuration()) {
    job.not_before = now + verdict.delay;
    again = absl::StrCat(", again in ",
                         absl::FormatDuration(absl::Trunc(verdict.delay, absl::Milliseconds(100))));
  }
  Move(job, JobState::kReconfiguring, absl::StrCat(fault.message, "; ", verdict.reason, again));
}

// ---------------------------------------------------------------- end and timers

void HeadState::Finish(Job& job, JobState state, std::string reason) {
  JobRecord& record = job.record;
  switch (state) {
    case JobState::kSucceeded:
      record.exit_code = 0;
      break;
    case JobState::kCancelled:
      record.exit_code = 130;
      break;
    default: {
      record.exit_code = 1;
      if (!record.faults.empty() && record.faults.back().cause == ExitCause::kExited) {
        record.exit_code = std::max(1, record.faults.back().exit_code);
      } else if (!record.faults.empty() && record.faults.back().signal > 0) {
        record.exit_code = 128 + record.faults.back().signal;
      }
    }
  }
  Move(job, state, std::move(reason));
  for (const NodeId& node : record.kept) Send(node, SendKind::kReply, ForgetJob{epoch(), record.id});
  if (state == JobState::kFailed) out_.push_back(WriteFailure{record.id, record.run_dir, FailureJson(job)});
  job.exchange.reset();
  job.blocked_by.clear();
  job.run_mark.reset();
  active_at_ = step_at_;
  schedule_ = true;
}

void HeadState::JobTimers(Job& job, Instant now) {
  if (job.gone_deadline && *job.gone_deadline <= now) ContinueEnding(job, now);
  if (IsFinal(job.record.state)) return;
  if (job.not_before && *job.not_before <= now && job.Wanting()) {
    job.not_before.reset();
    schedule_ = true;
  }
  if (job.Live() && job.start_deadline && *job.start_deadline <= now) {
    FaultRecord fault;
    fault.kind = FaultKind::kInfrastructure;
    fault.cause = ExitCause::kStartFailed;
    for (const RankPlace& place : job.record.grant->ranks) {
      if (job.ranks[place.rank].started || job.ExitOf(place.rank) != nullptr) continue;
      fault.rank = place.rank;
      fault.node = place.node;
      break;
    }
    fault.hostname = Hostname(fault.node);
    fault.message =
        absl::StrCat("rank ", fault.rank, " on ", fault.hostname, " had not started when its time was up");
    return Fail(job, std::move(fault), now);
  }
  if (job.Live() && job.spec.time_limit && RunTime(job, now) >= *job.spec.time_limit) {
    return BeginEnding(job, Ending::kFail, EndMode::kStop, job.spec.stop_grace,
                       absl::StrCat("limits.time of ", PrintDuration(*job.spec.time_limit), " is over"), now);
  }
  if (job.Live() && job.record.end_with_client && now - job.client_seen >= config_.client_lease) {
    return BeginEnding(job, Ending::kCancel, EndMode::kStop, job.spec.stop_grace,
                       "the client it should end with has gone silent", now);
  }
  CheckStall(job, now);
}

std::optional<Instant> HeadState::JobDeadline(const Job& job) const {
  std::optional<Instant> next;
  const auto sooner = [&](std::optional<Instant> other) {
    if (other) next = std::min(next.value_or(*other), *other);
  };
  sooner(job.gone_deadline);
  sooner(job.Wanting() ? job.not_before : std::nullopt);
  if (!job.Live()) return next;
  sooner(job.start_deadline);
  if (job.spec.time_limit && job.run_mark)
    sooner(*job.run_mark + (*job.spec.time_limit - job.record.run_time));
  if (job.record.end_with_client) sooner(job.client_seen + config_.client_lease);
  if (job.record.state == JobState::kRunning && job.progress_at && !job.stall_reported) {
    const spec::Progress& progress = job.spec.progress;
    if (job.low_step || !progress.step.empty() || progress.on_stall == spec::OnStall::kKill) {
      sooner(*job.progress_at + (job.low_step ? progress.stall : progress.startup));
    }
  }
  return next;
}

}  // namespace gtrain::core
