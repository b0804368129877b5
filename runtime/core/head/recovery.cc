// A head with records that are lost or older than the cluster (faults H8, H9): the agents hold newer
// generations than the head knows. Only after a person's `gtrain head restore` or `recover`, and for a
// bounded time, it asks them to describe what they hold and believes them.
//
//   until settle_at_      no node is judged by what it does not hold and nothing is granted: the agent that
//                         holds the newer generation may not have spoken yet
//   until recover_until_  a job this head has never heard of, or a newer generation of one it knows, is taken
//                         up as it runs; afterwards such a job is ended, as always
//
// The description of an agent counts only with the seal of its grant, by which a head of this cluster proves
// that it granted this to these nodes: a node under foreign control would otherwise run anything on all the
// others. A grant without a seal (of a version before them) waits, its job with it, until an administrator
// says `gtrain head recover --accept-unsealed` or the time is over.
//
// A newer generation of a job that this head has granted anew meanwhile cannot be kept: both are revoked.
#include "runtime/core/head/recovery.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/probe.h"
#include "nlohmann/json.hpp"
#include "runtime/core/head/copies.h"
#include "runtime/core/head/faults.h"
#include "runtime/core/head/grants.h"
#include "runtime/core/head/job_life.h"
#include "runtime/core/head/membership.h"
#include "runtime/core/head/over_jobs.h"
#include "runtime/core/head/rank_news.h"
#include "runtime/core/head/reconciler.h"
#include "runtime/core/head/remembered_answers.h"
#include "runtime/core/head/restart_policy.h"

namespace gtrain::core {
namespace {

constexpr uint64_t kGenerationsSkipped = 1'000'000;  // nobody's word moves a job further
constexpr size_t kUnprovenMax = 10'000;
constexpr uint64_t kEventsSkipped = 1'000'000;  // numbers a lost head may have given out

// "name-17" -> 17.
uint64_t NumberOf(const JobId& id) {
  uint64_t number = 0;
  const size_t dash = id.value.rfind('-');
  if (dash == std::string::npos || !absl::SimpleAtoi(id.value.substr(dash + 1), &number)) return 0;
  return number;
}

bool Consistent(const NodeId& node, const GenerationDescribed& described) {
  const GenerationGrant& grant = described.grant;
  if (described.held.job != grant.job || described.held.generation != grant.generation) return false;
  if (grant.ranks.size() != static_cast<size_t>(grant.world_size) || grant.nodes.empty()) return false;
  if (grant.generation.value == 0) return false;  // none was ever granted
  const auto has = [&](const NodeId& id) {
    return std::any_of(grant.nodes.begin(), grant.nodes.end(),
                       [&](const NodePlace& place) { return place.node == id; });
  };
  int next = 0;
  const auto in_order = [&](const RankPlace& place) { return place.rank == next++ && has(place.node); };
  return has(node) && std::ranges::all_of(grant.ranks, in_order) &&
         std::ranges::all_of(grant.waiting, in_order);
}

}  // namespace

Recovery::Recovery(HeadContext& context, HeadModel& model, Membership& membership, Reconciler& reconciler,
                   JobLife& life, Grants& grants, Faults& faults, RankNews& ranks, Copies& copies,
                   OverJobs& over, RememberedAnswers& answers)
    : context_(context),
      model_(model),
      config_(context.config()),
      membership_(membership),
      reconciler_(reconciler),
      life_(life),
      grants_(grants),
      faults_(faults),
      ranks_(ranks),
      copies_(copies),
      over_(over),
      answers_(answers) {}

// ---------------------------------------------------------------- the start

void Recovery::Begin(Instant now) {
  settle_at_ = now + config_.rejoin_window;
  recover_until_ = now + config_.recovery_window;
}

// A job found in the store. Running ranks are left alone: agents tell what lives in their hellos.
void Recovery::Adopt(Job& job, Instant now) {
  model_.any_job_seen = true;
  job.client_seen = now;
  for (const FaultRecord& fault : job.record.faults)
    job.fault_times.push_back(now - context_.Since(fault.at, now));
  job.record.event_sequence += 1000;  // numbers that were given out but not yet stored are not used twice
  job.user_bytes = BytesOfUser(job.record.spec_text, job.record.env);
  job.goodput = GoodputLedger(job.record.goodput, now);
  if (IsFinal(job.record.state)) return over_.CountOver(job);
  model_.live_jobs[job.record.number] = &job;
  absl::StatusOr<spec::JobSpec> spec = config_.parse_job(job.record.spec_text);
  if (!spec.ok()) {
    job.record.revoked = job.record.generation;
    life_.Finish(
        job, JobState::kFailed,
        absl::StrCat("its job file can no longer be read by this version: ", spec.status().message()));
    return;
  }
  life_.TakeSpec(job, *std::move(spec));
  if (job.record.grant) {
    grants_.ResetLive(job, now);
    job.checkpointed = job.checkpoint && job.checkpoint->generation == job.record.generation;
    ExpectNodes(*job.record.grant, now);
  }
  job.avoided_until.assign(job.record.avoided.size(), now + config_.avoid_for);
  if (job.record.generation.value > 0) {
    job.record.run_time += context_.Since(job.record.run_time_at, now);
    job.run_mark = now;
  }
  ContinueGoodput(job, now);
  if (job.record.waits_for_storage && !job.record.faults.empty())
    faults_.WaitForStorage(job, StorageBackoff(job.record.faults.back().tries, context_.rng()), now);
  if (job.record.state == JobState::kRunning) {
    for (RankLive& rank : job.ranks) job.SetStarted(rank);
    job.start_deadline.reset();
    job.running_since = now;
  }
  if (job.start_deadline) *job.start_deadline = *job.start_deadline + config_.rejoin_window;
  if (job.return_deadline) *job.return_deadline = *job.return_deadline + config_.rejoin_window;
  if (job.record.ending != Ending::kNone) {
    GT_PROBE("head.recovered_while_ending");
    job.gone_deadline = now + config_.rejoin_window + job.spec.stop_grace + config_.gone_margin;
  }
  context_.Emit(
      job, "note",
      absl::StrCat("the head restarted (epoch ", model_.cluster.epoch.value, "); ranks were not disturbed"));
}

// The time since the record was written went into what the record says.
void Recovery::ContinueGoodput(Job& job, Instant now) {
  GoodputRecord& stored = job.record.goodput;
  if (stored.since == absl::InfinitePast())
    stored.since = context_.Wall(now);  // an older head counted nothing
  job.goodput = GoodputLedger(stored, now - context_.Since(stored.at, now));
  job.goodput.SetPlaces(PlacesOf(job));
  job.goodput.Advance(now);
}

// Nothing of what was set aside may lie beside the records of the job that is taken up in its stead.
std::vector<std::string> Recovery::TakeSetAside(const JobId& job) {
  const auto aside = set_aside_.find(job);
  return aside == set_aside_.end() ? std::vector<std::string>() : std::exchange(aside->second, {});
}

// ---------------------------------------------------------------- newer heads

// An equal epoch with another proof is that of a copy of these records.
bool Recovery::Outranked(const AgentHello& hello) const {
  if (!config_.proves_epoch || hello.epoch < model_.epoch()) return false;
  if (hello.epoch == model_.epoch() && hello.epoch_proof == config_.prove_epoch(model_.epoch())) return false;
  return config_.proves_epoch(hello.epoch, hello.epoch_proof);
}

// A head of a higher epoch serves this cluster: whatever we decide could contradict it.
void Recovery::StepDown(const AgentHello& hello) {
  model_.cluster.superseded = std::max(hello.epoch, model_.epoch().Next());
  context_.Write(model_.cluster);
  const std::string reason = absl::StrCat(
      hello.epoch > model_.epoch() ? "a newer head (epoch "
                                   : "another head with a copy of these records (epoch ",
      hello.epoch.value, ") has served ", hello.hostname, ", and this one is of epoch ", model_.epoch().value,
      ": it steps down. If this is the head that shall serve, stop the other one and run gtrain "
      "head restore or gtrain head recover here");
  context_.Do(StopHead{reason, true});
  model_.stopped = true;
  context_.Say(reason);
}

// ---------------------------------------------------------------- what agents hold

bool Recovery::Settled(Instant now) const { return !model_.cluster.recovering || now >= settle_at_; }

bool Recovery::TakesUp(const JobId& job) const {
  return model_.cluster.recovering || set_aside_.contains(job);
}

bool Recovery::AwaitsDescription(const HeldGeneration& held) const {
  if (!TakesUp(held.job)) return false;
  const Job* job = model_.FindJob(held.job);
  if (job == nullptr) return true;
  return !IsFinal(job->record.state) && held.generation > job->record.generation;
}

void Recovery::OnDescribed(Node& node, const GenerationDescribed& described, Instant now) {
  const NodeId& id = node.record.id;
  const HeldGeneration& held = described.held;
  if (!Consistent(id, described)) {
    ++context_.counters().stale_dropped;
    return;
  }
  Job* job = model_.FindJob(held.job);
  if (!TakesUp(held.job) || (job != nullptr && IsFinal(job->record.state))) {
    if (job == nullptr || IsFinal(job->record.state)) reconciler_.EndForgotten(id, held, job != nullptr);
    return;
  }
  // A generation that agrees with the records, or is over, needs no proof.
  const bool news = job == nullptr || held.generation > job->record.generation;
  if (news && !Proven(described.seal)) return AwaitWord(node, described);
  if (job == nullptr) {
    job = TakeJob(described, now);
    if (job == nullptr) return;
  } else if (held.generation < job->record.generation) {
    if (held.generation <= job->record.revoked) life_.ResendEnding(*job, id, now);
    return;
  } else if (held.generation > job->record.generation) {
    if (job->granted_here) return RevokeStray(*job, id, held, now);
    TakeGeneration(*job, described, now);
  }
  reconciler_.ReconcileJob(*job, node, {&held}, nullptr, false, now);
  if (described.grant.newest && Proven(described.seal)) ranks_.TakeNewest(*job, *described.grant.newest);
  if (described.checkpoint) ranks_.OnCheckpoint(id, *described.checkpoint);
}

bool Recovery::Proven(const GrantSeal& seal) const {
  if (!config_.proves_grant) return true;
  return seal.bytes.empty() ? model_.cluster.accept_unsealed : config_.proves_grant(seal);
}

// Its ranks go on, and nothing else is granted to the job, until somebody says whether to believe it.
void Recovery::AwaitWord(const Node& node, const GenerationDescribed& described) {
  const HeldGeneration& held = described.held;
  if (!described.seal.bytes.empty()) {
    GT_PROBE("head.forged_grant");
    context_.Say(absl::StrCat(
        node.record.hostname, " holds generation ", held.generation.value, " of ", held.job.value,
        " with a grant that no head of this cluster has made: it is ended. Look into that machine"));
    return reconciler_.EndForgotten(node.record.id, held, model_.FindJob(held.job) != nullptr);
  }
  GT_PROBE("head.unsealed_grant");
  if (unproven_.size() < kUnprovenMax) unproven_[{held.job, node.record.id}] = held;
  if (Job* job = model_.FindJob(held.job)) {
    job->blocked_by = {
        {.node = node.record.id.value,
         .constraint = absl::StrCat(node.record.hostname, " holds generation ", held.generation.value,
                                    ", whose grant proves nothing"),
         .room = 0,
         .held_by = {},
         .unblocked_by =
             "`gtrain head recover --accept-unsealed` on the stopped head, or the end of the hour "
             "in which it takes up what agents hold"}};
  }
  context_.Say(absl::StrCat(
      node.record.hostname, " holds generation ", held.generation.value, " of ", held.job.value,
      ", granted by a version that proved no grants: it runs on and is not taken up. If you trust "
      "that machine, stop this head, say gtrain head recover --accept-unsealed, and start it again"));
}

std::optional<NodeId> Recovery::AwaitsHello(const Job& job) const {
  if (!job.spec.in_place || !job.record.grant || job.granted_here || job.Live()) return std::nullopt;
  for (const NodePlace& place : job.record.grant->nodes) {
    const auto node = model_.nodes.find(place.node);
    if (node != model_.nodes.end() && !node->second.welcomed && node->second.state != NodeState::kDead)
      return place.node;
  }
  return std::nullopt;
}

bool Recovery::AwaitsWord(const JobId& job) const {
  const auto it = unproven_.lower_bound({job, NodeId()});
  return it != unproven_.end() && it->first.first == job;
}

// A job the lost head had: everything but its past.
Job* Recovery::TakeJob(const GenerationDescribed& described, Instant now) {
  const GenerationGrant& grant = described.grant;
  absl::StatusOr<spec::JobSpec> spec = config_.parse_job(grant.spec_text);
  if (!spec.ok()) {
    context_.Say(absl::StrCat(grant.job.value, " cannot be taken up: ", spec.status().message()));
    return nullptr;
  }
  JobRecord record;
  record.id = grant.job;
  record.number = NumberOf(grant.job);
  if (record.number == 0 || model_.job_order.contains(record.number))
    record.number = model_.cluster.next_job++;
  model_.cluster.next_job = std::max(model_.cluster.next_job, record.number + 1);
  record.name = spec->name;
  record.client_key = grant.client_key;
  record.owner = grant.owner.empty() ? grant.client_key : grant.owner;
  record.request_id = grant.request_id;
  record.end_with_client = grant.end_with_client;
  record.event_sequence = kEventsSkipped;
  Job& job = life_.AddJob(std::move(record), *std::move(spec), now);
  TakeGeneration(job, described, now);
  if (!grant.client_key.empty() && !grant.request_id.empty()) {
    ClientReply reply{.id = grant.request_id};
    reply.json = nlohmann::json({{"job", grant.job.value}, {"run_dir", grant.run_dir}})
                     .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    answers_.Remember(Peer{Role::kUser, grant.client_key}, reply);
  }
  context_.Write(model_.cluster);
  return &job;
}

void Recovery::TakeGeneration(Job& job, const GenerationDescribed& described, Instant now) {
  JobRecord& record = job.record;
  GenerationGrant grant = described.grant;
  std::erase_if(unproven_, [&](const auto& item) {
    return item.first.first == record.id && item.second.generation <= grant.generation;
  });
  record.spec_text = std::exchange(grant.spec_text, "");
  record.env = std::exchange(grant.client_env, {});
  job.user_bytes = BytesOfUser(record.spec_text, record.env);
  record.run_dir = std::exchange(grant.run_dir, "");
  record.resume = grant.resume;
  record.takeover = grant.takeover;
  record.waits_for_storage = false;
  grant.client_key = grant.request_id = grant.owner = grant.near_secret = "";
  grant.end_with_client = false;
  grant.live_jobs.clear();
  record.restarts = std::max(record.restarts, grant.restart_count);
  record.generation = grant.generation;
  // Whatever came before was revoked before this was granted.
  record.revoked = std::max({record.revoked, Generation{grant.generation.value - 1}});
  record.timeline = grant.timeline;
  record.ending = Ending::kNone;
  record.ending_reason.clear();
  record.exits.clear();
  record.unreleased.clear();
  job.written.submission = job.written.unreleased = false;
  Keep(record, grant);
  record.grant = std::move(grant);
  const bool running = std::any_of(described.held.live.begin(), described.held.live.end(),
                                   [](const RankStatus& rank) { return rank.state != RankState::kStarting; });
  record.state = running ? JobState::kRunning : JobState::kStarting;
  record.reason = "taken up as its agents describe it: the head's records were lost or older";
  grants_.ResetLive(job, now);
  job.not_before.reset();
  job.blocked_by.clear();
  if (running) {
    for (RankLive& rank : job.ranks) job.SetStarted(rank);
    job.start_deadline.reset();
  }
  job.run_mark = now;
  ExpectNodes(*record.grant, now);
  for (const NodePlace& place : record.grant->holders) copies_.TellHolder(job, place.node);
  context_.Dirty(job);
  context_.Emit(job, "state", absl::StrCat(Name(record.state), ": ", record.reason));
  context_.Say(absl::StrCat(record.id.value, " is taken up in generation ", record.generation.value));
}

void Recovery::ExpectNodes(const GenerationGrant& grant, Instant now) {
  for (const NodePlace& place : grant.nodes) {
    if (model_.nodes.contains(place.node)) continue;
    Node& node = model_.AddNode(place.node);
    node.record.id = place.node;
    node.record.hostname = place.hostname;
    node.record.address = place.address;
    node.heard_at = now;
    membership_.Expect(place.node, now);
  }
}

void Recovery::RevokeStray(Job& job, const NodeId& node, const HeldGeneration& held, Instant now) {
  JobRecord& record = job.record;
  record.generation = held.generation;
  if (!job.Unreleased(node)) record.unreleased.push_back(node);
  job.written.unreleased = false;
  context_.Dirty(job);
  const std::string reason = absl::StrCat("generation ", held.generation.value,
                                          " was found on a node after the head had granted the job anew");
  if (record.grant && record.ending == Ending::kNone &&
      record.revoked < Generation{held.generation.value - 1} &&
      (record.state == JobState::kStarting || record.state == JobState::kRunning ||
       record.state == JobState::kReconfiguring)) {
    return life_.BeginEnding(job, Ending::kReplace, EndMode::kReform, config_.reform_grace, reason, now);
  }
  record.revoked = held.generation;
  record.ending_reason = reason;
  life_.SendRevoke(job, node, EndMode::kReform, config_.reform_grace);
}

void Recovery::OnGone(const NodeId& node, const GenerationGone& gone) {
  const auto held = unproven_.find({gone.job, node});
  if (held != unproven_.end() && held->second.generation <= gone.generation) unproven_.erase(held);
}

void Recovery::ForgetNode(const NodeId& node) {
  std::erase_if(unproven_, [&](const auto& item) { return item.first.second == node; });
}

std::optional<Instant> Recovery::NextDeadline() const {
  if (!model_.cluster.recovering) return std::nullopt;
  return model_.schedule || !unsettled_.empty() ? settle_at_ : recover_until_;
}

void Recovery::RecoveryTimers(Instant now) {
  if (!model_.cluster.recovering) return;
  if (now >= settle_at_) {
    for (const auto& [job_id, node_id] : std::exchange(unsettled_, {})) {
      Job* job = model_.FindJob(job_id);
      const auto node = model_.nodes.find(node_id);
      if (job == nullptr || IsFinal(job->record.state) || node == model_.nodes.end()) continue;
      reconciler_.ReconcileJob(*job, node->second, {}, nullptr, false, now);
      model_.schedule = true;
    }
  }
  if (now < recover_until_) return;
  model_.cluster.recovering = model_.cluster.accept_unsealed = false;
  for (const auto& [key, held] : std::exchange(unproven_, {})) {
    const auto& [job_id, node_id] = key;
    Job* job = model_.FindJob(job_id);
    const bool over = job == nullptr || IsFinal(job->record.state);
    if (over || held.generation.value > job->record.generation.value + kGenerationsSkipped) {
      reconciler_.EndForgotten(node_id, held, job != nullptr);
    } else if (held.generation > job->record.generation) {
      RevokeStray(*job, node_id, held, now);  // what comes next is newer than what was there
    }
    model_.schedule = true;
  }
  context_.Write(model_.cluster);
  context_.Say("the time to take up what agents hold is over");
}

}  // namespace gtrain::core
