// One step: notice our own pauses, handle the event, then let waiting jobs try, then turn every job
// that changed into one Persist. Persist comes last on purpose: Outbox applies the writes of a step to
// all of its promises, so their place does not matter, and each job is written once.
#include "runtime/core/head/head_state.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/overloaded.h"
#include "base/probe.h"
#include "runtime/core/head/documents.h"
#include "runtime/core/values/authority.h"

namespace gtrain::core {
namespace {

void Sooner(std::optional<Instant>& next, std::optional<Instant> other) {
  if (other) next = std::min(next.value_or(*other), *other);
}

constexpr absl::Duration kFirstJobPatience = absl::Seconds(60);  // a local cluster that nobody used yet

}  // namespace

HeadState::HeadState(HeadConfig config, Rng rng)
    : context_(std::move(config), rng),
      model_(context_.config()),
      placer_(model_, context_.config().topology),
      progress_(context_, model_),
      records_(context_, model_, recovery_),
      over_(context_, model_, records_),
      answers_(context_, model_),
      polls_(context_, model_),
      copies_(context_, model_, recovery_),
      life_(context_, model_, faults_, recovery_, over_),
      faults_(context_, model_, life_, sizing_, leaves_, newcomers_),
      directories_(context_, model_, life_),
      grants_(context_, model_, life_, faults_, directories_, copies_, placer_),
      links_(context_, model_, faults_, ranks_),
      leaves_(context_, model_, placer_, life_, faults_, sizing_),
      newcomers_(context_, model_, placer_, life_, faults_),
      sizing_(context_, model_, placer_, life_, faults_, links_),
      save_(context_, model_, placer_, grants_, life_),
      queries_(context_, model_, stalls_),
      stalls_(context_, model_, faults_, queries_),
      ranks_(context_, model_, life_, faults_, progress_, stalls_, sizing_, leaves_, newcomers_, recovery_),
      timers_(context_, model_, life_, grants_, faults_, links_, leaves_, newcomers_, ranks_, stalls_, polls_,
              sizing_, save_),
      scheduler_(context_, model_, placer_, grants_, life_, timers_, directories_, sizing_, recovery_, save_),
      reconciler_(context_, model_, recovery_, life_, grants_, faults_, newcomers_, ranks_, leaves_, copies_,
                  save_),
      recovery_(context_, model_, membership_, reconciler_, life_, grants_, faults_, ranks_, copies_, over_,
                answers_),
      relays_(context_, model_),
      membership_(context_, model_, recovery_, reconciler_, life_, faults_, ranks_, links_, leaves_, relays_),
      requests_(context_, model_, answers_, queries_, polls_, life_, sizing_, directories_, membership_,
                over_) {}

absl::Status HeadState::Load(StoredRecords& stored, Instant now) {
  const ClusterId& cluster = context_.config().cluster;
  if (stored.cluster) {
    if (stored.cluster->cluster != cluster) {
      return absl::FailedPreconditionError(
          absl::StrCat("the state belongs to cluster ", stored.cluster->cluster.value, ", the keys to ",
                       cluster.value, ": point the head at the state directory of its own cluster"));
    }
    model_.cluster = *std::move(stored.cluster);
  }
  for (NodeRecord& record : stored.nodes) membership_.AddKnown(std::move(record), now);
  for (RequestRecord& request : stored.requests) answers_.Load(std::move(request));
  if (absl::Status status = records_.LoadJobs(stored.jobs); !status.ok()) return status;
  for (auto& [id, node] : model_.nodes) membership_.RestoreNotices(node, now);
  for (CheckpointRecord& checkpoint : stored.checkpoints) {
    if (Job* job = model_.FindJob(checkpoint.job)) job->checkpoint = std::move(checkpoint);
  }
  return absl::OkStatus();
}

absl::StatusOr<StepResult> HeadState::Recover(StoredRecords stored, Instant now, absl::Time wall) {
  context_.ReadWall(wall, now);
  context_.Begin(now);
  membership_.Awake(now);
  model_.active_at = now;
  model_.cluster.cluster = context_.config().cluster;
  if (absl::Status status = Load(stored, now); !status.ok()) return status;
  ClusterRecord& cluster = model_.cluster;
  if (cluster.superseded > cluster.epoch) {
    return absl::FailedPreconditionError(absl::StrCat("a newer head of this cluster (epoch ",
                                                      cluster.superseded.value,
                                                      ") has served its agents, and the "
                                                      "records here are of epoch ",
                                                      cluster.epoch.value,
                                                      ": start that head instead, or make this one the newer "
                                                      "one with gtrain head restore or gtrain head recover"));
  }
  cluster.epoch = cluster.epoch.Next();
  recovery_.Begin(now);
  context_.Write(cluster);
  for (const auto& [number, id] : model_.job_order) recovery_.Adopt(model_.jobs.at(id), now);
  for (Job* job : model_.LiveJobs()) leaves_.FindLeave(*job, now);
  over_.DropOldJobs();
  model_.schedule = true;
  context_.Say(absl::StrCat(
      "head epoch ", cluster.epoch.value, ", ", model_.jobs.size(), " jobs and ", model_.nodes.size(),
      " nodes from before",
      stored.set_aside.empty() ? "" : absl::StrCat("; ", stored.set_aside.size(), " records set aside")));
  return Flush(now);
}

// Nobody could answer a head that stood still, and messages sent meanwhile may be lost with their
// connections: no rank, agent or client is late because of it (fault H12).
void HeadState::TakeOff(absl::Duration slept, Instant now) {
  for (auto& [id, job] : model_.jobs) {
    if (job.start_deadline) *job.start_deadline = *job.start_deadline + slept;
    if (job.return_deadline) *job.return_deadline = *job.return_deadline + slept;
    if (job.running_since) *job.running_since = std::min(now, *job.running_since + slept);
    for (WaitingRank& one : job.waiting) one.since = std::min(now, one.since + slept);
    if (job.gone_deadline) *job.gone_deadline = *job.gone_deadline + slept;
    if (job.progress_at) *job.progress_at = std::min(now, *job.progress_at + slept);
    job.client_seen = std::min(now, job.client_seen + slept);
    for (auto& [step, at] : job.rate_over) at = std::min(now, at + slept);
  }
}

StepResult HeadState::Step(const HeadEvent& event, Instant now) {
  ++context_.counters().steps;
  context_.Begin(now);
  if (membership_.Awake(now)) {
    GT_PROBE("head.own_pause");
    ++context_.counters().pauses_survived;
  }
  if (model_.stopped) return {};
  const bool slept = membership_.slept() > absl::ZeroDuration();
  if (slept) TakeOff(membership_.slept(), now);
  const int polls = polls_.open();
  recovery_.RecoveryTimers(now);
  OnEvent(event, now);
  const bool schedules = scheduler_.owes_pass();
  if (schedules && recovery_.Settled(now)) scheduler_.Schedule(now);
  const bool looks = sizing_.LooksDue(now) && recovery_.Settled(now);
  if (looks) sizing_.LookAround(now);
  polls_.AnswerPolls(now);
  CheckIdle(now);
  KeepDeadline(event, schedules || looks || sizing_.owes_looks() || model_.cluster.recovering ||
                          polls != polls_.open() || context_.changed() || slept);
  return Flush(now);
}

void HeadState::OnEvent(const HeadEvent& event, Instant now) {
  if (const auto* message = std::get_if<PeerMessage>(&event)) {
    OnMessage(*message, now);
  } else if (const auto* gone = std::get_if<PeerGone>(&event)) {
    membership_.OnPeerGone(*gone, now);
  } else if (const auto* heard = std::get_if<ChildrenHeard>(&event)) {
    membership_.OnChildrenHeard(*heard, now);
  } else if (const auto* made = std::get_if<PlanMade>(&event)) {
    scheduler_.OnPlanMade(made->work);
  } else if (const auto* room = std::get_if<StoreRoom>(&event)) {
    OnStoreRoom(*room);
  } else {
    OnTick(now);
  }
}

void HeadState::OnStoreRoom(const StoreRoom& room) {
  if (room.low != model_.store_low.has_value())
    context_.Say(room.low ? room.text : "the store's disk has room again");
  model_.store_low = room.low ? std::optional<std::string>(room.text) : std::nullopt;
  model_.store_full = room.full;
}

// With 2,000 agents a look at all jobs and nodes after each of their heartbeats was two fifths of what a head
// did. A heartbeat that `changed` nothing else touches only the jobs whose ranks it tells of.
void HeadState::KeepDeadline(const HeadEvent& event, bool changed) {
  const auto* message = std::get_if<PeerMessage>(&event);
  const auto* beat = message == nullptr ? nullptr : std::get_if<AgentHeartbeat>(&message->message);
  const bool tail = message != nullptr && std::holds_alternative<LogTail>(message->message);
  const bool quiet = tail || std::holds_alternative<ChildrenHeard>(event);
  if (changed || !first_deadline_ || (beat == nullptr && !quiet)) return first_deadline_.reset();
  if (beat == nullptr) return;
  for (const RankStatus& status : beat->changed) {
    const Job* job = model_.FindJob(status.job);
    if (job != nullptr && !IsFinal(job->record.state)) Sooner(*first_deadline_, timers_.NextDeadline(*job));
  }
}

void HeadState::OnMessage(const PeerMessage& event, Instant now) {
  if (const auto* request = std::get_if<ClientRequest>(&event.message))
    return requests_.OnRequest(event, *request, now);
  if (!MaySend(event.peer.role, event.message)) {
    ++context_.counters().denied;
    return context_.Audit(event, "message", "", absl::PermissionDeniedError("not for this key"), now);
  }
  if (std::holds_alternative<AgentJoin>(event.message))
    return context_.Do(ServiceRequest{event.peer, event.route, event.address, event.message});
  if (const auto* hello = std::get_if<AgentHello>(&event.message))
    return membership_.OnHello(event, *hello, now);
  if (Node* node = membership_.OnHeard(event, now)) OnAgentMessage(*node, event.message, now);
}

void HeadState::OnAgentMessage(Node& node, const Message& message, Instant now) {
  const NodeId& id = node.record.id;
  const Overloaded hear{[](const AgentHello&) {},  // it came before OnHeard
                        [&](const AgentHeartbeat& m) { membership_.OnHeartbeat(node, m, now); },
                        [&](const GenerationDescribed& m) { recovery_.OnDescribed(node, m, now); },
                        [&](const RanksStarted& m) { ranks_.OnStarted(id, m, now); },
                        [&](const RankExited& m) { ranks_.OnExited(id, m.exit, now); },
                        [&](const GenerationGone& m) { ranks_.OnGone(node, m, now); },
                        [&](const ExchangePart& m) { ranks_.OnExchange(id, m); },
                        [&](const CheckpointReport& m) { ranks_.OnCheckpoint(id, m); },
                        [&](const NoticeSeen& m) { membership_.OnNoticeSeen(node, m, now); },
                        [&](const LinkDown& m) { links_.OnLinkDown(id, m, now); },
                        [&](const AgentNote& m) { ranks_.OnNote(id, m); },
                        [&](const AgentAnswer& m) { queries_.OnAnswer(id, m); },
                        [&](const RelayReady& m) { relays_.OnReady(node, m, now); },
                        [](const RelayedUp&) {},  // the service has taken it apart
                        [&](const LogTail& m) { OnTail(id, m); }};
  std::visit(
      [&](const auto& m) {
        // A message of agents without a handler does not compile; others do not come here (MaySend).
        if constexpr (kSenderOf<std::decay_t<decltype(m)>> == Sender::kAgent) hear(m);
      },
      message);
}

void HeadState::OnTail(const NodeId& id, const LogTail& tail) {
  if (ranks_.CurrentJob(id, tail.job, tail.generation) == nullptr) return;
  for (SpillTail& leaves : model_.tails.Put(tail)) context_.Do(std::move(leaves));
}

void HeadState::OnTick(Instant now) {
  membership_.CheckSilence(now);
  membership_.EndQuarantines(now);
  relays_.Plan(now);
  for (Job* job : model_.LiveJobs()) timers_.Run(*job, now);
  queries_.ExpireQueries(now);
}

absl::Duration HeadState::IdlePatience() const {
  const absl::Duration linger = context_.config().idle_linger;
  return model_.any_job_seen ? linger : std::max(linger, kFirstJobPatience);
}

// Not with a full disk: how the last jobs ended is not stored yet, and people ask why.
void HeadState::CheckIdle(Instant now) {
  if (model_.store_full) return;
  if (!context_.config().exit_when_idle && !model_.shutdown_when_idle) return;
  if (!model_.LiveJobs().empty() || !polls_.empty() || !queries_.empty()) return;
  const absl::Duration patience = model_.shutdown_when_idle ? absl::ZeroDuration() : IdlePatience();
  if (now - model_.active_at < patience) return;
  const std::string reason = model_.shutdown_when_idle ? "shutdown was asked for and no job is left"
                                                       : "the local cluster ends: no job is left";
  for (const auto& [id, node] : model_.nodes) {
    if (node.welcomed) context_.Send(id, SendKind::kReply, AgentShutdown{epoch(), reason});
  }
  context_.Do(StopHead{reason});
  model_.stopped = true;
  context_.Say(reason);
}

StepResult HeadState::Flush(Instant now) {
  records_.WriteDirtyJobs(now);
  return context_.TakeStep();
}

std::optional<Instant> HeadState::NextDeadline() const {
  if (model_.stopped) return std::nullopt;
  if (!first_deadline_) first_deadline_ = FirstDeadline();
  if (context_.config().check_deadlines) {
    const std::optional<Instant> first = FirstDeadline();
    GT_CHECK(!first || (*first_deadline_ && **first_deadline_ <= *first));
  }
  std::optional<Instant> next = *first_deadline_;
  Sooner(next, membership_.NextDeadline());
  Sooner(next, polls_.NextDeadline());
  return next;
}

// The first deadline of all but polls and the failure detector.
std::optional<Instant> HeadState::FirstDeadline() const {
  std::optional<Instant> next;
  Sooner(next, recovery_.NextDeadline());
  Sooner(next, relays_.NextDeadline());
  Sooner(next, scheduler_.NextDeadline());
  Sooner(next, sizing_.NextDeadline());
  bool live = false;
  for (const auto& [number, job] : model_.live_jobs) {
    if (IsFinal(job->record.state)) continue;
    live = true;
    Sooner(next, timers_.NextDeadline(*job));
  }
  for (const NodeId& id : model_.quarantined) {
    const auto node = model_.nodes.find(id);
    if (node != model_.nodes.end()) Sooner(next, node->second.quarantined_until);
  }
  Sooner(next, queries_.NextDeadline());
  if (context_.config().exit_when_idle && !model_.store_full && !live && polls_.empty() && queries_.empty())
    Sooner(next, model_.active_at + IdlePatience());
  return next;
}

// ---------------------------------------------------------------- for whoever looks at it

HeadSnapshot HeadState::Snapshot() const {
  HeadSnapshot snapshot;
  snapshot.epoch = model_.cluster.epoch;
  for (const auto& [number, id] : model_.job_order) {
    const JobRecord& record = model_.jobs.at(id).record;
    HeadSnapshot::Job job{record.id,       record.state, record.reason,  record.generation, record.revoked,
                          record.timeline, {},           record.restarts};
    if (record.grant) {
      for (const RankPlace& place : record.grant->ranks) job.rank_nodes.push_back(place.node);
    }
    snapshot.jobs.push_back(std::move(job));
  }
  for (const auto& [id, node] : model_.nodes) {
    snapshot.nodes.push_back({id, node.record.hostname, node.state, node.Leaving(),
                              node.Leaving() || node.quarantined_until || node.record.unclean});
  }
  return snapshot;
}

const JobRecord* HeadState::RecordOf(const JobId& job) const {
  const Job* found = model_.FindJob(job);
  return found == nullptr ? nullptr : &found->record;
}

std::vector<std::pair<JobId, std::string>> HeadState::Finished() const {
  std::vector<std::pair<JobId, std::string>> finished;
  for (const auto& [number, id] : model_.job_order) {
    const JobRecord& record = model_.jobs.at(id).record;
    if (IsFinal(record.state) && record.ended_at != absl::InfinitePast())
      finished.push_back({id, record.run_dir});
  }
  return finished;
}

const std::string* HeadState::RouteOf(const NodeId& node) const {
  const Node* found = model_.FindNode(node);
  return found == nullptr || found->route.empty() ? nullptr : &found->route;
}

std::optional<WriteResult> HeadState::ResultOf(const JobId& job) const {
  return core::ResultOf(model_, job, context_.step_at());
}

}  // namespace gtrain::core
