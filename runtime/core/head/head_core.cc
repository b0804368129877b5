// One step: notice our own pauses, handle the event, then let waiting jobs try, then turn every job
// that changed into one Persist. Persist comes last on purpose: Outbox applies the writes of a step to
// all of its promises, so their place does not matter, and each job is written once.
#include "runtime/core/head/head_core.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/probe.h"
#include "runtime/core/head/head_state.h"
#include "runtime/core/head/restart_policy.h"
#include "runtime/core/values/authority.h"

namespace gtrain::core {
namespace {

void Sooner(std::optional<Instant>& next, std::optional<Instant> other) {
  if (other) next = std::min(next.value_or(*other), *other);
}

constexpr absl::Duration kFirstJobPatience = absl::Seconds(60);  // a local cluster that nobody used yet

}  // namespace

// ---------------------------------------------------------------- HeadCore

HeadCore::HeadCore(HeadConfig config, Rng rng)
    : state_(std::make_unique<HeadState>(std::move(config), rng)) {}
HeadCore::~HeadCore() = default;

absl::StatusOr<StepResult> HeadCore::Recover(StoredRecords stored, Instant now, absl::Time wall) {
  return state_->Recover(std::move(stored), now, wall);
}
StepResult HeadCore::Step(const HeadEvent& event, Instant now) { return state_->Step(event, now); }
std::optional<Instant> HeadCore::NextDeadline() const { return state_->NextDeadline(); }
HeadSnapshot HeadCore::Snapshot() const { return state_->Snapshot(); }
const JobRecord* HeadCore::RecordOf(const JobId& job) const { return state_->RecordOf(job); }
std::vector<std::pair<JobId, std::string>> HeadCore::Finished() const { return state_->Finished(); }
std::optional<WriteResult> HeadCore::ResultOf(const JobId& job) const { return state_->ResultOf(job); }
HeadEpoch HeadCore::epoch() const { return state_->epoch(); }
const std::string* HeadCore::RouteOf(const NodeId& node) const { return state_->RouteOf(node); }
const HeadCounters& HeadCore::counters() const { return state_->counters(); }

// ---------------------------------------------------------------- HeadState

bool Job::HoldsNode(const NodeId& node) const {
  if (!record.grant) return false;
  return std::any_of(record.grant->nodes.begin(), record.grant->nodes.end(),
                     [&](const NodePlace& place) { return place.node == node; });
}

const RankExit* Job::ExitOf(int rank) const {
  if (static_cast<size_t>(rank) < ranks.size())
    return ranks[rank].exit < 0 ? nullptr : &record.exits[static_cast<size_t>(ranks[rank].exit)];
  for (const RankExit& exit : record.exits) {  // of a job that was over before this head started
    if (exit.rank == rank) return &exit;
  }
  return nullptr;
}

void Job::CountStep(const RankLive& rank, int count) {
  if (!rank.status.step || rank.exit >= 0) return;
  const auto it = steps.try_emplace(*rank.status.step).first;
  it->second += count;
  if (it->second == 0) steps.erase(it);
}

void Job::SetStatus(RankLive& rank, const RankStatus& status) {
  CountStep(rank, -1);
  if (status.step && rank.status.step && *status.step < *rank.status.step)
    began_anew += static_cast<int>(!std::exchange(rank.began_anew, true));
  rank.status = status;
  CountStep(rank, 1);
}

void Job::SetStarted(RankLive& rank) {
  if (!rank.started && rank.exit < 0) --not_started;
  rank.started = any_started = true;
}

void Job::SetExit(RankLive& rank, RankExit exit) {
  CountStep(rank, -1);
  if (!rank.started) --not_started;
  if (std::exchange(rank.idle_since, std::nullopt)) --idle;
  if (std::exchange(rank.began_anew, false)) --began_anew;
  rank.exit = static_cast<int>(record.exits.size());
  rank.status.state = RankState::kExited;
  record.exits.push_back(std::move(exit));
}

std::string Shortened(std::string text, size_t bytes) {
  if (text.size() <= bytes) return text;
  while (bytes > 0 && (static_cast<unsigned char>(text[bytes]) & 0xC0) == 0x80) --bytes;
  return text.substr(0, bytes);
}

HeadState::HeadState(HeadConfig config, Rng rng)
    : config_(std::move(config)),
      rng_(rng),
      detector_({config_.heartbeat_interval, config_.suspect_after, config_.dead_after}),
      tails_(config_.tail_bytes_max, config_.tails_bytes_max) {
  GT_CHECK(config_.parse_job != nullptr);
  if (config_.local && !config_.expected_nodes) config_.expected_nodes = 1;
}

absl::Status HeadState::Load(StoredRecords& stored, Instant now) {
  if (stored.cluster) {
    if (stored.cluster->cluster != config_.cluster) {
      return absl::FailedPreconditionError(
          absl::StrCat("the state belongs to cluster ", stored.cluster->cluster.value, ", the keys to ",
                       config_.cluster.value, ": point the head at the state directory of its own cluster"));
    }
    cluster_ = *std::move(stored.cluster);
  }
  for (NodeRecord& record : stored.nodes) {
    const NodeId id = record.id;
    Node& node = nodes_[id];
    node.record = std::move(record);
    node.revision = ++revisions_;
    node.heard_at = now;
    detector_.Expect(id, now, std::max(absl::ZeroDuration(), config_.rejoin_window - config_.dead_after));
  }
  for (RequestRecord& request : stored.requests) {
    const std::string key = KeyOf(request);
    request_order_[request.number] = key;
    requests_of_key_[request.client_key].insert(request.number);
    requests_[key] = std::move(request);
  }
  if (absl::Status status = LoadJobs(stored.jobs); !status.ok()) return status;
  for (auto& [id, node] : nodes_) RestoreNotices(node, now);
  for (CheckpointRecord& checkpoint : stored.checkpoints) {
    if (Job* job = FindJob(checkpoint.job)) job->checkpoint = std::move(checkpoint);
  }
  return absl::OkStatus();
}

// What passed between two heads. A clock that was not set yet, or was set back, says nothing.
absl::Duration HeadState::Since(absl::Time then, Instant now) const {
  const absl::Time built = absl::FromUnixSeconds(1'600'000'000);  // no cluster is older than its program
  if (then < built || then > Wall(now)) return absl::ZeroDuration();
  return Wall(now) - then;
}

absl::StatusOr<StepResult> HeadState::Recover(StoredRecords stored, Instant now, absl::Time wall) {
  wall_ = wall;
  wall_read_at_ = now;
  detector_.Awake(now);
  active_at_ = step_at_ = now;
  cluster_.cluster = config_.cluster;
  if (absl::Status status = Load(stored, now); !status.ok()) return status;
  if (cluster_.superseded > cluster_.epoch) {
    return absl::FailedPreconditionError(absl::StrCat("a newer head of this cluster (epoch ",
                                                      cluster_.superseded.value,
                                                      ") has served its agents, and the "
                                                      "records here are of epoch ",
                                                      cluster_.epoch.value,
                                                      ": start that head instead, or make this one the newer "
                                                      "one with gtrain head restore or gtrain head recover"));
  }
  cluster_.epoch = cluster_.epoch.Next();
  settle_at_ = now + config_.rejoin_window;
  recover_until_ = now + config_.recovery_window;
  Write(cluster_);
  for (const auto& [number, id] : job_order_) Adopt(jobs_.at(id), now);
  for (Job* job : LiveJobs()) FindLeave(*job, now);
  DropOldJobs();
  schedule_ = true;
  Say(absl::StrCat(
      "head epoch ", cluster_.epoch.value, ", ", jobs_.size(), " jobs and ", nodes_.size(),
      " nodes from before",
      stored.set_aside.empty() ? "" : absl::StrCat("; ", stored.set_aside.size(), " records set aside")));
  return Flush(now);
}

// A job found in the store. Running ranks are left alone: agents tell what lives in their hellos.
void HeadState::Adopt(Job& job, Instant now) {
  any_job_seen_ = true;
  job.client_seen = now;
  for (const FaultRecord& fault : job.record.faults) job.fault_times.push_back(now - Since(fault.at, now));
  job.record.event_sequence += 1000;  // numbers that were given out but not yet stored are not used twice
  job.user_bytes = BytesOfUser(job.record.spec_text, job.record.env);
  if (IsFinal(job.record.state)) return CountOver(job);
  live_jobs_[job.record.number] = &job;
  absl::StatusOr<spec::JobSpec> spec = config_.parse_job(job.record.spec_text);
  if (!spec.ok()) {
    job.record.revoked = job.record.generation;
    Finish(job, JobState::kFailed,
           absl::StrCat("its job file can no longer be read by this version: ", spec.status().message()));
    return;
  }
  TakeSpec(job, *std::move(spec));
  if (job.record.grant) {
    ResetLive(job, now);
    ExpectNodes(*job.record.grant, now);
  }
  job.avoided_until.assign(job.record.avoided.size(), now + config_.avoid_for);
  if (job.record.generation.value > 0) {
    job.record.run_time += Since(job.record.run_time_at, now);
    job.run_mark = now;
  }
  if (job.record.waits_for_storage && !job.record.faults.empty())
    WaitForStorage(job, StorageBackoff(job.record.faults.back().tries, rng_), now);
  if (job.record.state == JobState::kRunning) {
    for (RankLive& rank : job.ranks) job.SetStarted(rank);
    job.start_deadline.reset();
  }
  if (job.start_deadline) *job.start_deadline = *job.start_deadline + config_.rejoin_window;
  if (job.record.ending != Ending::kNone) {
    GT_PROBE("head.recovered_while_ending");
    job.gone_deadline = now + config_.rejoin_window + job.spec.stop_grace + config_.gone_margin;
  }
  Emit(job, "note",
       absl::StrCat("the head restarted (epoch ", cluster_.epoch.value, "); ranks were not disturbed"));
}

// Nobody could answer a head that stood still, and what was said meanwhile may be lost with its connections:
// no rank, agent or client is late because of it (fault H12).
void HeadState::TakeOff(absl::Duration slept, Instant now) {
  for (auto& [id, job] : jobs_) {
    if (job.start_deadline) *job.start_deadline = *job.start_deadline + slept;
    if (job.gone_deadline) *job.gone_deadline = *job.gone_deadline + slept;
    if (job.progress_at) *job.progress_at = std::min(now, *job.progress_at + slept);
    job.client_seen = std::min(now, job.client_seen + slept);
  }
}

StepResult HeadState::Step(const HeadEvent& event, Instant now) {
  ++counters_.steps;
  step_at_ = now;
  if (detector_.Awake(now)) {
    GT_PROBE("head.own_pause");
    ++counters_.pauses_survived;
  }
  if (stopped_) return {};
  if (detector_.slept() > absl::ZeroDuration()) TakeOff(detector_.slept(), now);
  const int polls = polls_of_user_.all();
  RecoveryTimers(now);
  if (const auto* message = std::get_if<PeerMessage>(&event)) {
    OnMessage(*message, now);
  } else if (const auto* gone = std::get_if<PeerGone>(&event)) {
    const auto it = nodes_.find(NodeId(gone->peer.key_id));
    if (gone->peer.role == Role::kNode && it != nodes_.end() && it->second.route == gone->route) {
      GT_PROBE("head.peer_gone");
      it->second.missed = true;
      detector_.Suspect(it->first, now);
      for (const FailureDetector::Change& change : detector_.Advance(now)) OnSilence(change, now);
    }
  } else if (const auto* room = std::get_if<StoreRoom>(&event)) {
    if (room->low != store_low_.has_value()) Say(room->low ? room->text : "the store's disk has room again");
    store_low_ = room->low ? std::optional<std::string>(room->text) : std::nullopt;
    store_full_ = room->full;
  } else {
    OnTick(now);
  }
  const bool schedules = schedule_ || !fresh_.empty();
  if (schedules && Settled(now)) Schedule(now);
  const bool looks = looks_owed_ > 0 && (!next_look_ || now >= *next_look_) && Settled(now);
  if (looks) LookAround(now);
  AnswerPolls(now);
  CheckIdle(now);
  KeepDeadline(event, schedules || looks || looks_owed_ > 0 || cluster_.recovering ||
                          polls != polls_of_user_.all() || !dirty_jobs_.empty() || !writes_.empty() ||
                          detector_.slept() > absl::ZeroDuration());
  return Flush(now);
}

// With 2,000 agents a look at all jobs and nodes after each of their heartbeats was two fifths of what a head
// did. A heartbeat that `changed` nothing else touches only the jobs whose ranks it tells of.
void HeadState::KeepDeadline(const HeadEvent& event, bool changed) {
  const auto* message = std::get_if<PeerMessage>(&event);
  const auto* beat = message == nullptr ? nullptr : std::get_if<AgentHeartbeat>(&message->message);
  const bool tail = message != nullptr && std::holds_alternative<LogTail>(message->message);
  if (changed || !first_deadline_ || (beat == nullptr && !tail)) return first_deadline_.reset();
  if (beat == nullptr) return;
  for (const RankStatus& status : beat->changed) {
    const Job* job = FindJob(status.job);
    if (job != nullptr && !IsFinal(job->record.state)) Sooner(*first_deadline_, JobDeadline(*job));
  }
}

void HeadState::OnMessage(const PeerMessage& event, Instant now) {
  if (const auto* request = std::get_if<ClientRequest>(&event.message))
    return OnRequest(event, *request, now);
  if (!MaySend(event.peer.role, event.message)) {
    ++counters_.denied;
    return Audit(event, "message", "", absl::PermissionDeniedError("not for this key"), now);
  }
  if (std::holds_alternative<AgentJoin>(event.message)) {
    out_.push_back(ServiceRequest{event.peer, event.route, event.address, event.message});
    return;
  }
  if (const auto* hello = std::get_if<AgentHello>(&event.message)) return OnHello(event, *hello, now);
  const NodeId id(event.peer.key_id);
  const auto it = nodes_.find(id);
  if (it == nodes_.end() || !it->second.welcomed || it->second.route != event.route) {
    GT_PROBE("head.message_of_old_connection");
    // A late message of an old connection, or one from before this head's time. The agent says hello on
    // every new connection, so there is nothing to answer.
    ++counters_.stale_dropped;
    return;
  }
  Node& node = it->second;
  detector_.Heard(id, now);
  node.heard_at = now;
  if (node.rival) RefuseRival(node);
  if (node.state != NodeState::kAlive) Returned(node, now);
  if (const auto* m = std::get_if<AgentHeartbeat>(&event.message)) return OnHeartbeat(node, *m, now);
  if (const auto* m = std::get_if<GenerationDescribed>(&event.message)) return OnDescribed(node, *m, now);
  if (const auto* m = std::get_if<RanksStarted>(&event.message)) return OnStarted(id, *m, now);
  if (const auto* m = std::get_if<RankExited>(&event.message)) return OnExited(id, m->exit, now);
  if (const auto* m = std::get_if<GenerationGone>(&event.message)) return OnGone(node, *m, now);
  if (const auto* m = std::get_if<ExchangePart>(&event.message)) return OnExchange(id, *m);
  if (const auto* m = std::get_if<CheckpointReport>(&event.message)) return OnCheckpoint(id, *m);
  if (const auto* m = std::get_if<NoticeSeen>(&event.message)) return OnNoticeSeen(node, *m, now);
  if (const auto* m = std::get_if<LinkDown>(&event.message)) return OnLinkDown(id, *m, now);
  if (const auto* m = std::get_if<AgentNote>(&event.message)) return OnNote(id, *m);
  if (const auto* m = std::get_if<AgentAnswer>(&event.message)) return OnAnswer(id, *m);
  if (const auto* m = std::get_if<LogTail>(&event.message)) {
    if (CurrentJob(id, m->job, m->generation) == nullptr) return;
    for (SpillTail& leaves : tails_.Put(*m)) out_.push_back(std::move(leaves));
  }
}

void HeadState::OnTick(Instant now) {
  for (const FailureDetector::Change& change : detector_.Advance(now)) OnSilence(change, now);
  EndQuarantines(now);
  for (Job* job : LiveJobs()) JobTimers(*job, now);
  ExpireQueries(now);
}

// Not with a full disk: how the last jobs ended is not stored yet, and people ask why.
void HeadState::CheckIdle(Instant now) {
  if (store_full_) return;
  if (!config_.exit_when_idle && !shutdown_when_idle_) return;
  if (!LiveJobs().empty() || !polls_.empty() || !queries_.empty()) return;
  const absl::Duration patience = shutdown_when_idle_ ? absl::ZeroDuration()
                                  : any_job_seen_     ? config_.idle_linger
                                                      : std::max(config_.idle_linger, kFirstJobPatience);
  if (now - active_at_ < patience) return;
  const std::string reason = shutdown_when_idle_ ? "shutdown was asked for and no job is left"
                                                 : "the local cluster ends: no job is left";
  for (const auto& [id, node] : nodes_) {
    if (node.welcomed) Send(id, SendKind::kReply, AgentShutdown{epoch(), reason});
  }
  out_.push_back(StopHead{reason});
  stopped_ = true;
  Say(reason);
}

StepResult HeadState::Flush(Instant now) {
  for (const JobId& id : dirty_jobs_) {
    const auto it = jobs_.find(id);
    if (it == jobs_.end()) continue;
    Job& job = it->second;
    job.record.run_time = RunTime(job, now);
    job.record.run_time_at = job.run_mark ? Wall(now) : absl::InfinitePast();
    if (job.run_mark) job.run_mark = now;
    WriteJob(job);
  }
  dirty_jobs_.clear();
  if (!writes_.empty() || !audit_.empty()) {
    out_.push_back(Persist{std::exchange(writes_, {}), std::exchange(audit_, {})});
  }
  StepResult result{std::move(out_), std::move(why_)};
  out_.clear();
  why_.clear();
  return result;
}

std::optional<Instant> HeadState::NextDeadline() const {
  if (stopped_) return std::nullopt;
  if (!first_deadline_) first_deadline_ = FirstDeadline();
  if (config_.check_deadlines) {
    const std::optional<Instant> first = FirstDeadline();
    GT_CHECK(!first || (*first_deadline_ && **first_deadline_ <= *first));
  }
  std::optional<Instant> next = *first_deadline_;
  Sooner(next, detector_.NextDeadline());
  if (!poll_deadlines_.empty()) Sooner(next, poll_deadlines_.begin()->first);
  return next;
}

// Of all but polls and the failure detector.
std::optional<Instant> HeadState::FirstDeadline() const {
  std::optional<Instant> next;
  if (cluster_.recovering) Sooner(next, schedule_ || !unsettled_.empty() ? settle_at_ : recover_until_);
  if (schedule_ && next_pass_) Sooner(next, *next_pass_);
  if (looks_owed_ > 0 && next_look_) Sooner(next, *next_look_);
  bool live = false;
  for (const auto& [number, job] : live_jobs_) {
    if (IsFinal(job->record.state)) continue;
    live = true;
    Sooner(next, JobDeadline(*job));
  }
  for (const auto& [id, node] : nodes_) Sooner(next, node.quarantined_until);
  for (const auto& [id, query] : queries_) Sooner(next, query.deadline);
  if (config_.exit_when_idle && !store_full_ && !live && polls_.empty() && queries_.empty()) {
    Sooner(next, active_at_ + (any_job_seen_ ? config_.idle_linger
                                             : std::max(config_.idle_linger, kFirstJobPatience)));
  }
  return next;
}

HeadSnapshot HeadState::Snapshot() const {
  HeadSnapshot snapshot;
  snapshot.epoch = cluster_.epoch;
  for (const auto& [number, id] : job_order_) {
    const JobRecord& record = jobs_.at(id).record;
    HeadSnapshot::Job job{record.id,       record.state, record.reason,  record.generation, record.revoked,
                          record.timeline, {},           record.restarts};
    if (record.grant) {
      for (const RankPlace& place : record.grant->ranks) job.rank_nodes.push_back(place.node);
    }
    snapshot.jobs.push_back(std::move(job));
  }
  for (const auto& [id, node] : nodes_) {
    snapshot.nodes.push_back({id, node.record.hostname, node.state, node.Leaving()});
  }
  return snapshot;
}

const JobRecord* HeadState::RecordOf(const JobId& job) const {
  const Job* found = FindJob(job);
  return found == nullptr ? nullptr : &found->record;
}

std::vector<std::pair<JobId, std::string>> HeadState::Finished() const {
  std::vector<std::pair<JobId, std::string>> finished;
  for (const auto& [number, id] : job_order_) {
    const JobRecord& record = jobs_.at(id).record;
    if (IsFinal(record.state) && record.ended_at != absl::InfinitePast())
      finished.push_back({id, record.run_dir});
  }
  return finished;
}

const std::string* HeadState::RouteOf(const NodeId& node) const {
  const auto it = nodes_.find(node);
  return it == nodes_.end() || it->second.route.empty() ? nullptr : &it->second.route;
}

void HeadState::Say(const std::string& why) {
  if (!why_.empty()) why_ += "; ";
  why_ += why;
}

Job& HeadState::AddJob(JobRecord record, spec::JobSpec spec, Instant now) {
  any_job_seen_ = true;
  job_order_[record.number] = record.id;
  Job& job = jobs_[record.id];
  live_jobs_[record.number] = &job;
  job.record = std::move(record);
  // Nothing of what was set aside may lie beside the records of the job that is taken up in its stead.
  if (const auto aside = set_aside_.find(job.record.id); aside != set_aside_.end())
    job.written.obsolete = std::exchange(aside->second, {});
  job.user_bytes = BytesOfUser(job.record.spec_text, job.record.env);
  TakeSpec(job, std::move(spec));
  job.client_seen = now;
  return job;
}

size_t BytesOfUser(const std::string& spec_text, const std::map<std::string, std::string>& env) {
  size_t bytes = spec_text.size();
  for (const auto& [name, value] : env) bytes += name.size() + value.size();
  return bytes;
}

void HeadState::TakeSpec(Job& job, spec::JobSpec spec) {
  job.spec = std::move(spec);
  job.demand = DemandOf(job.spec, config_.local);
  if (job.record.size_wanted > 0)
    job.demand.max = job.demand.asked = std::clamp(job.record.size_wanted, job.demand.min, job.demand.max);
  job.location = LocationOf(job.spec);
}

void HeadState::Emit(Job& job, const std::string& kind, std::string text) {
  EmitEvent event{
      job.record.id,   job.record.run_dir, ++job.record.event_sequence, job.record.generation, kind,
      std::move(text), Wall(step_at_)};
  job.events.push_back(std::make_shared<const EmitEvent>(event));
  news_.insert(job.record.id);
  if (static_cast<int>(job.events.size()) > config_.events_kept_max) job.events.pop_front();
  out_.push_back(std::move(event));
}

void HeadState::Send(const NodeId& node, SendKind kind, Message message) {
  out_.push_back(SendToNode{node, kind, std::move(message)});
}

Job* HeadState::FindJob(const JobId& id) {
  const auto it = jobs_.find(id);
  return it == jobs_.end() ? nullptr : &it->second;
}
const Job* HeadState::FindJob(const JobId& id) const {
  const auto it = jobs_.find(id);
  return it == jobs_.end() ? nullptr : &it->second;
}

std::vector<Job*> HeadState::LiveJobs() {
  std::vector<Job*> live;
  std::erase_if(live_jobs_, [](const auto& item) { return IsFinal(item.second->record.state); });
  for (const auto& [number, job] : live_jobs_) live.push_back(job);
  return live;
}

}  // namespace gtrain::core
