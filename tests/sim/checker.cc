#include "tests/sim/checker.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/probe.h"
#include "nlohmann/json.hpp"
#include "runtime/core/head/restart_policy.h"
#include "runtime/core/values/job_records.h"
#include "runtime/core/values/job_state.h"
#include "tests/sim/machine.h"

namespace gtrain::sim {
namespace {

constexpr int64_t kSlack = 3 * kSec;  // how far truth and the head's own measure of silence may differ

uint64_t HashOf(const core::GenerationGrant& grant) {
  std::string text = absl::StrCat(grant.timeline.value, "|", grant.master_port);
  for (const auto* ranks : {&grant.ranks, &grant.waiting}) {
    absl::StrAppend(&text, "||", ranks->size());
    for (const core::RankPlace& rank : *ranks) {
      absl::StrAppend(&text, "|", rank.node.value);
      if (rank.process.generation.value == 0) continue;
      absl::StrAppend(&text, " ", rank.process.generation.value, "/", rank.process.rank);
    }
  }
  return std::hash<std::string>()(text);
}

// The answer of a head whose disk is full (head_process.cc).
bool NotStored(const core::ClientReply& reply) {
  return reply.code == static_cast<int>(absl::StatusCode::kAborted) &&
         absl::StrContains(reply.error, "not stored");
}

int64_t Ns(absl::Duration duration) { return absl::ToInt64Nanoseconds(duration); }

}  // namespace

Checker::Checker(Kernel& kernel, Disk& disk) : kernel_(kernel), disk_(disk) {
  disk_.on_durable = [this](const std::vector<core::RecordWrite>& writes) { Durable(writes); };
}

const core::JobRecord* Checker::Record(const JobId& job) const {
  const auto it = disk_.jobs().find(job);
  return it == disk_.jobs().end() ? nullptr : &it->second;
}

// ---------------------------------------------------------------- the head

// INV-3: every acknowledged change is there again. INV-6: epochs only grow.
void Checker::HeadServes(const core::HeadCore& core, int64_t awake) {
  head_served_awake_ = awake;
  if (core.epoch().value <= epoch_) {
    kernel_.Fail("INV-6",
                 absl::StrCat("a head serves with epoch ", core.epoch().value, " after epoch ", epoch_));
  }
  epoch_ = core.epoch().value;
  written_ = disk_.durable();
  for (auto& [job, truth] : jobs_) truth.revoke_left.clear();
  for (auto& [generation, truth] : generations_) {
    if (truth.content != 0) continue;
    truth.decided_awake.reset();  // its head died before it was on disk, or this one sends it
    const core::JobRecord* record = Record(generation.first);
    if (record == nullptr || record->generation.value < generation.second) truth.placed_awake.reset();
  }
  for (const auto& [id, reply] : acknowledged_) {
    const Asked& asked = asked_[id];
    const auto record = disk_.durable().find(core::KeyOf(core::RequestRecord{asked.client_key, id}));
    if (record == disk_.durable().end() || std::get<core::RequestRecord>(record->second).reply != reply) {
      kernel_.Fail("INV-3",
                   absl::StrCat("the acknowledged answer to request ", id, " is gone after a restart"));
    }
    if (asked.submit && Record(asked.job) == nullptr) {
      kernel_.Fail("INV-3", absl::StrCat("the accepted job ", asked.job.value, " is gone after a restart"));
    }
  }
  const core::HeadSnapshot snapshot = core.Snapshot();
  for (const core::HeadSnapshot::Job& job : snapshot.jobs) {
    const core::JobRecord* record = Record(job.id);
    if (record == nullptr || record->generation != job.generation || record->revoked != job.revoked) {
      kernel_.Fail("INV-3",
                   absl::StrCat("the head's state of ", job.id.value, " is not what its disk holds"));
    }
  }
}

void Checker::HeadHears(const core::PeerMessage& event, int64_t awake) {
  if (const auto* request = std::get_if<core::ClientRequest>(&event.message)) {
    Asked& asked = asked_[request->id];
    asked.client_key = event.peer.key_id;
    asked.submit = std::holds_alternative<core::ClientSubmit>(request->body);
    if (const auto* stop = std::get_if<core::ClientStop>(&request->body)) {
      asked.stop = true;
      asked.job = stop->job;
      jobs_[stop->job].stop_heard = true;
    }
    if (const auto* scale = std::get_if<core::ClientScale>(&request->body))
      jobs_[scale->job].scale_heard = true;
    if (const auto* drain = std::get_if<core::ClientDrainNode>(&request->body)) {
      NodeTruth& node = nodes_[node_called(drain->node)];
      node.drained = !drain->undo;
      node.heard_leave = node.heard_leave && !drain->undo;
    }
    return;
  }
  if (event.peer.role != core::Role::kNode) return;
  NodeTruth& node = nodes_[NodeId(event.peer.key_id)];
  if (const auto* seen = std::get_if<core::NoticeSeen>(&event.message)) {
    node.heard_leave = seen->notice.kind == core::NoticeKind::kLeave && node.announced_until.has_value();
    node.leaves_at = kernel_.now() + absl::ToInt64Nanoseconds(seen->notice.left);
  }
  if (const auto* hello = std::get_if<core::AgentHello>(&event.message)) {
    if (absl::StartsWith(hello->boot_id, "clone")) {
      node.clone_heard = true;
      node.clone_routes[event.route] = true;
      return;
    }
    if (node.incarnation != hello->incarnation) {
      node.incarnation = hello->incarnation;
      node.renewed_awake = awake;
    }
  }
  if (!node.clone_routes.contains(event.route)) node.heard_awake = awake;
  if (const auto* exited = std::get_if<core::RankExited>(&event.message)) NeverStarted(exited->exit);
  if (const auto* hello = std::get_if<core::AgentHello>(&event.message)) {
    for (const core::HeldGeneration& held : hello->held) {
      for (const core::RankExit& exit : held.exited) NeverStarted(exit);
    }
  }
}

// No process ended, so only the agent can say so.
void Checker::NeverStarted(const core::RankExit& exit) {
  if (exit.cause == core::ExitCause::kAddressInUse || exit.cause == core::ExitCause::kStartFailed) {
    generations_[{exit.job, exit.generation.value}].bad_end = true;
  }
}

// INV-3: what a step writes of a job is all that it changed of it.
void Checker::CheckWritten(const core::HeadCore& head, const core::Persist& persist) {
  for (const core::RecordWrite& write : persist.writes) {
    if (write.record) {
      written_.insert_or_assign(write.key, *write.record);
    } else {
      written_.erase(write.key);
    }
  }
  for (const core::RecordWrite& write : persist.writes) {
    const auto* status = write.record ? std::get_if<core::JobStatusRecord>(&*write.record) : nullptr;
    if (status == nullptr) continue;
    const absl::StatusOr<core::JobRecord> joined = core::JoinJob(core::GatherJob(written_, status->job));
    if (!joined.ok() || *joined != *head.RecordOf(status->job)) {
      kernel_.Fail("INV-3",
                   absl::StrCat("the head's state of ", status->job.value, " is not what it writes: ",
                                joined.ok() ? "they differ" : std::string(joined.status().message())));
    }
  }
}

// INV-8: what the head keeps in memory is bounded.
void Checker::HeadDecided(const core::HeadCore& head, const core::StepResult& result, int64_t awake) {
  for (const core::Effect& effect : result.effects) {
    if (const auto* persist = std::get_if<core::Persist>(&effect)) CheckWritten(head, *persist);
    const auto* send = std::get_if<core::SendToNode>(&effect);
    const auto* start = send == nullptr ? nullptr : std::get_if<core::StartGeneration>(&*send->message);
    if (start == nullptr) continue;
    GenerationTruth& truth = generations_[{start->grant.job, start->grant.generation.value}];
    if (!truth.decided_awake) CheckNewest(start->grant);
    if (!truth.decided_awake) truth.decided_awake = awake;
    if (!truth.placed_awake) CheckPlacement(head, start->grant);
    if (!truth.placed_awake) CheckMemory(head, start->grant);
    if (!truth.placed_awake) truth.placed_awake = awake;
  }
  constexpr size_t kEffectsMax = 20'000;
  if (result.effects.size() > kEffectsMax) {
    kernel_.Fail("INV-8", absl::StrCat("one step of the head made ", result.effects.size(), " effects"));
  }
}

// INV-5: nothing new is placed on a machine that the head knows to be leaving.
void Checker::CheckPlacement(const core::HeadCore& head, const core::GenerationGrant& grant) {
  for (const core::HeadSnapshot::Node& node : head.Snapshot().nodes) {
    const bool used = std::any_of(grant.nodes.begin(), grant.nodes.end(),
                                  [&](const core::NodePlace& place) { return place.node == node.id; });
    const bool starts = std::ranges::any_of(grant.ranks, [&](const core::RankPlace& place) {
      return place.node == node.id && place.process.generation.value == 0;
    });
    if (used && starts && node.leaving) {
      kernel_.Fail("INV-5", absl::StrCat(G(grant.job, grant.generation.value), " is placed on ",
                                         node.hostname, ", which is leaving"));
    }
  }
}

// INV-18: processes that have what was trained, and are where the head may hear of them, are not left for
// ones that have nothing. Of a mesh only whole copies count, and of these INV-14 knows more.
void Checker::CheckMemory(const core::HeadCore& head, const core::GenerationGrant& grant) {
  const core::JobRecord* record = head.RecordOf(grant.job);  // what it knows by now
  const spec::JobSpec* spec = SpecOf(grant.job);
  if (record == nullptr || spec == nullptr || !spec->in_place || !spec->mesh.empty() || !node_on) return;
  if (std::ranges::any_of(grant.ranks,
                          [](const core::RankPlace& place) { return place.process.generation.value != 0; }))
    return;
  const core::HeadSnapshot snapshot = head.Snapshot();
  for (const auto& [pid, process] : kept_) {
    const NodeId& id = node_on(process->machine);
    const auto node = std::ranges::find(snapshot.nodes, id, &core::HeadSnapshot::Node::id);
    const bool member = !process->waits && process->generation + 1 == grant.generation.value;
    const bool well = !process->hung && !process->deaf && !process->stopped && process->exited;
    const bool there = node != snapshot.nodes.end() && node->state != core::NodeState::kDead &&
                       !node->barred && !shares_key(process->machine);
    // The head has not been told in time what waits there.
    const bool untold = std::ranges::count(record->unreleased, id) > 0;
    const bool avoided = untold || std::ranges::count(record->avoided, id, &core::AvoidedNode::node) > 0;
    // Of a stall the head says whose it is, rightly or not, and that one does not go on.
    const bool blamed = !record->faults.empty() && record->faults.back().rank == process->rank &&
                        record->faults.back().generation.value == process->generation;
    if (process->job != grant.job || !member || !well || !there || avoided || blamed) continue;
    return kernel_.Fail("INV-18", absl::StrCat(G(grant.job, grant.generation.value),
                                               " begins with new "
                                               "processes alone, and process ",
                                               pid, " waits on ", node->hostname, " with what was trained"));
  }
}

// INV-4: a grant names the newest checkpoint that the head has on disk, or one that is newer still.
void Checker::CheckNewest(const core::GenerationGrant& grant) {
  const auto stored = disk_.durable().find(absl::StrCat("checkpoint/", grant.job.value));
  if (stored == disk_.durable().end()) return;
  const auto& known = std::get<core::CheckpointRecord>(stored->second);
  if (known.manifest.empty()) return;
  ++kernel_.counts["grant names a checkpoint"];
  if (!grant.newest ||
      std::pair(grant.newest->timeline, grant.newest->step) < std::pair(known.timeline, known.step)) {
    kernel_.Fail("INV-4", absl::StrCat("the grant of ", G(grant.job, grant.generation.value),
                                       " does not name the newest checkpoint, ", known.manifest));
  }
}

void Checker::HeadSends(const core::SendToNode& send, int64_t awake) {
  if (const auto* start = std::get_if<core::StartGeneration>(&*send.message))
    return CheckGrant(send.node, *start);
  if (const auto* revoke = std::get_if<core::Revoke>(&*send.message))
    return CheckRevoke(send.node, *revoke, awake);
  if (const auto* forget = std::get_if<core::ForgetJob>(&*send.message)) {
    const core::JobRecord* record = Record(forget->job);
    if (record != nullptr && !core::IsFinal(record->state)) {
      kernel_.Fail("INV-7", absl::StrCat("a node is told to forget ", forget->job.value, ", which is ",
                                         core::Name(record->state)));
    }
  }
  if (const auto* welcome = std::get_if<core::AgentWelcome>(&*send.message)) {
    const auto cluster = disk_.durable().find("cluster");
    if (cluster == disk_.durable().end() ||
        std::get<core::ClusterRecord>(cluster->second).epoch < welcome->epoch) {
      kernel_.Fail("INV-6", "a welcome with an epoch that is not durable");
    }
  }
}

// INV-1 and INV-2: a grant leaves after it is durable, says the same each time, follows the revoke of the one
// before, and never follows its own.
void Checker::CheckGrant(const NodeId& node, const core::StartGeneration& start) {
  const core::GenerationGrant& grant = start.grant;
  const uint64_t g = grant.generation.value;
  const core::JobRecord* record = Record(grant.job);
  if (record == nullptr || record->generation.value < g) {
    return kernel_.Fail("INV-1",
                        absl::StrCat("the grant of ", G(grant.job, g), " leaves before it is durable"));
  }
  JobTruth& job = jobs_[grant.job];
  if (job.revoke_left.contains(node) && job.revoke_left[node] >= g) {
    kernel_.Fail("INV-1", absl::StrCat("the grant of ", G(grant.job, g), " leaves to ", node.value,
                                       " after a revoke of g", job.revoke_left[node]));
  }
  if (job.final_state) {
    kernel_.Fail("INV-1", absl::StrCat(G(grant.job, g), " is granted although the job is ",
                                       core::Name(*job.final_state)));
  }
  if (record->generation.value == g && record->revoked.value + 1 != g && record->revoked.value < g) {
    kernel_.Fail("INV-1", absl::StrCat(G(grant.job, g), " is granted while only g", record->revoked.value,
                                       " is revoked"));
  }
  const auto [it, fresh] = generations_.try_emplace({grant.job, g});
  GenerationTruth& truth = it->second;
  const uint64_t content = HashOf(grant);
  if (truth.content != 0 && truth.content != content) {
    kernel_.Fail("INV-1", absl::StrCat(G(grant.job, g), " is granted twice with different places"));
  }
  if (truth.content != 0) return;
  CheckProcesses(grant);
  truth.content = content;
  truth.grant = grant;
  truth.granted_at = truth.stepped_at = kernel_.now();
  const bool saves = record->after_save != core::Ending::kNone;
  if (job.stop_acknowledged_at && g > *job.stop_acknowledged_at && !saves) {
    kernel_.Fail("INV-3",
                 absl::StrCat(G(grant.job, g), " is granted after the stop of the job was acknowledged"));
  }
  truth.saves = saves || IsTooFew(grant);
  if (truth.saves) CheckTooFew(grant);
  if (record->generation.value != g) return;
  CheckBudgets(*record);
  CheckRoom(*record);
}

bool Checker::IsTooFew(const core::GenerationGrant& grant) const {
  const spec::JobSpec* spec = SpecOf(grant.job);
  if (spec == nullptr) return false;
  if (!spec->nodes) return spec->ranks && grant.world_size < spec->ranks->min;
  std::set<NodeId> nodes;
  for (const core::RankPlace& place : grant.ranks) nodes.insert(place.node);
  return std::ssize(nodes) < spec->nodes->min;
}

// INV-17: what has fewer ranks than its job asks for is there to save, so it starts nothing and is made once.
void Checker::CheckTooFew(const core::GenerationGrant& grant) {
  GT_PROBE("check.too_few_save");
  const auto is_new = [](const core::RankPlace& place) { return place.process.generation.value == 0; };
  const std::string what = absl::StrCat(G(grant.job, grant.generation.value), ", with ", grant.world_size,
                                        " ranks, which are too few or are to end, ");
  if (std::ranges::any_of(grant.ranks, is_new) || std::ranges::any_of(grant.waiting, is_new))
    return kernel_.Fail("INV-17", what + "starts processes");
  const auto before = generations_.find({grant.job, grant.generation.value - 1});
  if (before != generations_.end() && before->second.saves &&
      grant.world_size >= before->second.grant.world_size)
    kernel_.Fail("INV-17", what + "follows another one that has lost nobody");
}

// INV-2: a process goes on only where it is, as one rank, of a job that lets it.
void Checker::CheckProcesses(const core::GenerationGrant& grant) {
  std::set<core::ProcessId> named;
  for (size_t i = 0; i < grant.ranks.size() + grant.waiting.size(); ++i) {
    const core::RankPlace& place = core::PlaceOfRank(grant, static_cast<int>(i));
    const core::ProcessId& process = place.process;
    if (process.generation.value == 0) continue;
    GT_PROBE("check.grant_names_a_process");
    const auto born = generations_.find({grant.job, process.generation.value});
    const bool known = born != generations_.end() && process.rank >= 0 &&
                       static_cast<size_t>(process.rank) <
                           born->second.grant.ranks.size() + born->second.grant.waiting.size() &&
                       process.generation < grant.generation;
    const std::string what = absl::StrCat("the grant of ", G(grant.job, grant.generation.value),
                                          " names process ", process.generation.value, "/", process.rank);
    if (!known) return kernel_.Fail("INV-2", what + ", which never was");
    if (core::PlaceOfRank(born->second.grant, process.rank).node != place.node)
      return kernel_.Fail("INV-2", absl::StrCat(what, " on ", place.node.value, ", where it is not"));
    if (!named.insert(process).second) return kernel_.Fail("INV-2", what + " twice");
    const spec::JobSpec* spec = SpecOf(grant.job);
    if (spec != nullptr && !spec->in_place) kernel_.Fail("INV-2", what + ", and the job restarts");
  }
}

const spec::JobSpec* Checker::SpecOf(const JobId& job) const {
  const core::JobRecord* record = Record(job);
  return record == nullptr || !spec_of ? nullptr : spec_of(record->spec_text);
}

// INV-5: restarts stay within the budgets the job file gives, and a job whose budgets are not spent goes on.
// A fault behind which a higher step is committed than behind all before is the first that counts.
void Checker::CheckBudgets(const core::JobRecord& record) {
  const spec::JobSpec* spec = spec_of(record.spec_text);
  if (spec == nullptr) return;
  int crashes = 0, ooms = 0, losses = 0;
  int64_t highest = -1;
  for (const core::FaultRecord& fault : record.faults) {
    if (fault.committed.value_or(-1) > highest) {
      highest = *fault.committed;
      crashes = ooms = losses = 0;
    }
    crashes += fault.kind == core::FaultKind::kCrash;
    ooms += fault.kind == core::FaultKind::kOom;
    losses += fault.kind == core::FaultKind::kInfrastructure;
  }
  const bool spent =
      crashes > spec->restart.budget || ooms > spec->restart.oom || losses > core::kInfrastructureBudget;
  // Once it is decided that it fails its ranks may save, and what happens to them then counts no more.
  const bool fails = record.after_save == core::Ending::kFail;
  if (fails && (core::IsFinal(record.state) || std::exchange(jobs_[record.id].judged, true))) return;
  const bool over = fails || core::IsFinal(record.state);
  const std::string& why = fails ? record.after_save_reason : record.reason;
  const bool says_spent = (fails || record.state == core::JobState::kFailed) &&
                          why.find("restart budget spent") != std::string::npos;
  if (over ? spent || !says_spent : !spent) return;
  kernel_.Fail("INV-5", absl::StrCat(record.id.value, over ? " fails" : " runs again", " after ", crashes,
                                     " crashes, ", ooms, " ooms, ", losses, " losses"));
}

// INV-13, of a job that has always asked for as many ranks.
void Checker::CheckGoodput(const core::JobRecord& record) {
  const core::GoodputRecord& goodput = record.goodput;
  std::optional<int>& wanted = jobs_[record.id].wanted;
  const int ranks = record.grant ? record.grant->world_size : 0;
  if (wanted.value_or(goodput.wanted) != goodput.wanted || ranks > goodput.wanted) wanted = 0;
  if (!wanted) wanted = goodput.wanted;
  if (*wanted == 0) return;
  const absl::Time to = core::IsFinal(record.state) ? std::min(goodput.at, record.ended_at) : goodput.at;
  const double all = *wanted * absl::ToDoubleSeconds(to - goodput.since);
  const double counted = std::accumulate(goodput.seconds.begin(), goodput.seconds.end(), goodput.open);
  ++kernel_.counts["rank-seconds added up"];
  if (std::abs(counted - all) <= 1e-3) return;
  kernel_.Fail("INV-13",
               absl::StrCat(counted, " rank-seconds of ", record.id.value, " have a label, of ", all));
}

// INV-5: no job fails by a generation that was given another size and has not got anywhere, unless the head
// that decided so is gone. A program that never says how far it is has got somewhere after a minute.
void Checker::CheckResize(const core::JobRecord& record) {
  JobTruth& truth = jobs_[record.id];
  if (record.faults.empty() || !truth.resized) return;
  const core::FaultRecord& fault = record.faults.back();
  const auto [ended, epoch] = *truth.resized;
  if (fault.generation.value != ended + 1 || epoch != epoch_) return;
  if (record.state == core::JobState::kReconfiguring && record.ending == core::Ending::kNone &&
      absl::StartsWith(fault.message, core::kGoesBack)) {
    ++kernel_.counts["size given up"];
    truth.resized.reset();
  }
  const bool judged =
      record.state == core::JobState::kFailed && absl::StartsWith(record.reason, fault.message + ";");
  const bool asks = fault.cause == core::ExitCause::kExited && fault.exit_code == core::kExitNoRestart;
  const bool of_size = fault.kind == core::FaultKind::kCrash || fault.kind == core::FaultKind::kOom;
  if (!judged || fault.progressed || asks || !of_size) return;
  const auto generation = generations_.find({record.id, fault.generation.value});
  const bool ran = generation != generations_.end() && generation->second.all_started_at &&
                   kernel_.now() - *generation->second.all_started_at >= 50 * kSec;
  if (ran) return;
  // Whom it grows by comes up beside it: it has the size that it had.
  if (generation != generations_.end() && !generation->second.grant.waiting.empty()) return;
  kernel_.Fail("INV-5", absl::StrCat(record.id.value, " has failed by its resize: ", record.reason));
}

// INV-5: a checkpoint that was committed before a fault counts for it, and nothing else does.
void Checker::CheckCommitted(const core::JobRecord& record, int64_t highest_before) {
  JobTruth& truth = jobs_[record.id];
  if (record.faults.empty() || record.ending != core::Ending::kNone) return;
  const core::FaultRecord& last = record.faults.back();
  const int64_t counted = last.committed.value_or(-1);
  // A job that ends for another reason meanwhile, a stop, never comes to judge the fault.
  const bool first_seen = last.generation.value > truth.fault_decided && !core::IsFinal(record.state);
  if (first_seen) truth.fault_decided = last.generation.value;
  // Steps that processes have in memory which go on count as well.
  const int64_t highest = std::max(truth.highest_step, truth.step_in_memory);
  if (counted > highest || (first_seen && counted < highest_before)) {
    kernel_.Fail("INV-5", absl::StrCat(record.id.value, " counts step ", counted,
                                       " as committed before the fault of g", last.generation.value,
                                       ", the highest durable one is ", truth.highest_step));
  }
}

// INV-5: no node holds more than it has.
void Checker::CheckRoom(const core::JobRecord& granted) {
  std::map<NodeId, int> used;
  for (const auto& [id, job] : disk_.jobs()) {
    if (!job.grant || core::IsFinal(job.state) || job.generation <= job.revoked) continue;
    const spec::JobSpec* spec = spec_of(job.spec_text);
    if (spec == nullptr) continue;
    for (const auto* ranks : {&job.grant->ranks, &job.grant->waiting}) {
      for (const core::RankPlace& rank : *ranks) used[rank.node] += spec->resources.cpus.value_or(1);
    }
  }
  for (const core::NodePlace& place : granted.grant->nodes) {
    if (used[place.node] > cpus_of(place.node)) {
      kernel_.Fail("INV-5", absl::StrCat(place.hostname, " has ", cpus_of(place.node), " cpus, ",
                                         used[place.node], " are granted"));
    }
  }
}

// INV-7: the control plane ends a healthy rank for no reason of its own.
void Checker::CheckRevoke(const NodeId& node, const core::Revoke& revoke, int64_t awake) {
  JobTruth& job = jobs_[revoke.job];
  uint64_t& left = job.revoke_left[node];
  left = std::max(left, revoke.generation.value);
  const auto it = generations_.find({revoke.job, revoke.generation.value});
  if (it == generations_.end() || it->second.revoked) return;
  GenerationTruth& truth = it->second;
  truth.revoked = true;
  if (absl::StartsWith(revoke.reason, core::kGrows) || absl::StartsWith(revoke.reason, core::kShrinks))
    job.resized = {revoke.generation.value, epoch_};
  if (truth.content == 0) return;
  if (const auto why = Unjustified(truth, Record(revoke.job), revoke.reason, awake)) {
    kernel_.Fail("INV-7", absl::StrCat(G(revoke.job, revoke.generation.value), " is revoked (", revoke.reason,
                                       "), but ", *why));
  }
}

std::optional<std::string> Checker::Unjustified(const GenerationTruth& truth, const core::JobRecord* record,
                                                const std::string& reason, int64_t awake) {
  const JobTruth& job = jobs_[truth.grant.job];
  if (truth.started > 0 && truth.running == 0) return std::nullopt;  // nobody is left to be ended
  if (truth.bad_end || truth.lost || job.stop_heard || job.final_state) return std::nullopt;
  const spec::JobSpec* spec = record == nullptr ? nullptr : spec_of(record->spec_text);
  if (spec != nullptr && spec->time_limit) return std::nullopt;
  if (spec != nullptr && spec->progress.on_stall == spec::OnStall::kKill &&
      std::max(truth.stalled, kernel_.now() - truth.stepped_at) >= Ns(spec->progress.stall) - 2 * kSlack) {
    return std::nullopt;
  }
  for (const core::NodePlace& place : truth.grant.nodes) {
    const NodeTruth& node = nodes_[place.node];
    const int64_t silence = awake - std::max(node.heard_awake, head_served_awake_);
    if (silence >= Ns(config.dead_after) - kSlack) return std::nullopt;
    if (node.renewed_awake >= *truth.placed_awake) return std::nullopt;
    // A generation that is granted while the agent cleans up after a dead keeper goes down with it.
    const auto died = node.keeper_died.find(truth.grant.job);
    if (died != node.keeper_died.end() && died->second >= truth.granted_at - 5 * kSec) return std::nullopt;
    const bool stands = node.announced_until && *node.announced_until >= truth.granted_at;
    if (stands || node.heard_leave || node.drained) return std::nullopt;
    if (node.clone_heard) return std::nullopt;  // takes over when the first is suspect
  }
  for (const core::NodePlace& one : truth.grant.nodes) {
    for (const core::NodePlace& other : truth.grant.nodes) {
      // Reported, and not withdrawn, within link_settle of the end of a cut; messages may be slow.
      if (link_was_cut &&
          link_was_cut(one.node, other.node, std::max(truth.granted_at, kernel_.now() - kMin)))
        return std::nullopt;
    }
  }
  const bool grows = absl::StartsWith(reason, core::kGrows) && spec != nullptr && spec->ranks &&
                     truth.grant.world_size < spec->ranks->max;
  if (grows) {
    ++kernel_.counts["generation grows"];
    return std::nullopt;
  }
  const bool ends = record != nullptr && record->after_save != core::Ending::kNone;
  const bool have = absl::StartsWith(reason, "the ranks that are left have");
  if (ends || (have && record != nullptr && record->saves)) {
    ++kernel_.counts["too few have saved"];
    return std::nullopt;
  }
  const bool beside = absl::StrContains(reason, " the ") && absl::StrContains(reason, " that run");
  if (beside && truth.up_beside > 0) {
    ++kernel_.counts["generation takes in who came up beside it"];
    return std::nullopt;
  }
  if (absl::StrContains(reason, "of what still loads") && truth.up_beside > 0) {
    ++kernel_.counts["generation has a spare for one that loads"];
    return std::nullopt;
  }
  if (absl::StartsWith(reason, "spares are started") && spec != nullptr && spec->spares > 0) {
    ++kernel_.counts["generation takes spares beside it"];
    return std::nullopt;
  }
  if (absl::StrContains(reason, "started anew") && truth.ended_beside) {
    ++kernel_.counts["generation starts anew who ended beside it"];
    return std::nullopt;
  }
  if (job.scale_heard && absl::StartsWith(reason, core::kShrinks)) {
    ++kernel_.counts["generation shrinks"];
    return std::nullopt;
  }
  const bool waits_for_return = awake - *truth.decided_awake >= Ns(config.return_timeout) - kSlack;
  if (waits_for_return && somebody_hangs && somebody_hangs(truth.grant.job, truth.grant.generation.value)) {
    ++kernel_.counts["a process that hangs is not waited for"];
    return std::nullopt;
  }
  const bool late = awake - *truth.decided_awake >= Ns(config.start_timeout) - kSlack;
  const bool started = truth.all_started_at && kernel_.now() - *truth.all_started_at >= 15 * kSec;
  if (late && !started) return std::nullopt;
  return absl::StrCat("all ", truth.grant.world_size, " ranks are healthy and its nodes are heard");
}

// INV-3: an answer leaves only when what it says is on disk, and is the same each time.
void Checker::HeadReplies(const core::ClientReply& reply) {
  const auto asked = asked_.find(reply.id);
  if (asked == asked_.end() || !(asked->second.submit || asked->second.stop)) return;
  const auto record =
      disk_.durable().find(core::KeyOf(core::RequestRecord{asked->second.client_key, reply.id}));
  if (NotStored(reply) && record != disk_.durable().end()) {
    return kernel_.Fail("INV-3", absl::StrCat("request ", reply.id, " is stored, and said not to be"));
  }
  if (!reply.ok) return;
  if (record == disk_.durable().end() || std::get<core::RequestRecord>(record->second).reply != reply) {
    return kernel_.Fail("INV-3", absl::StrCat("request ", reply.id, " is acknowledged before it is durable"));
  }
  const auto [it, fresh] = acknowledged_.try_emplace(reply.id, reply);
  if (!fresh && it->second != reply) {
    kernel_.Fail("INV-3", absl::StrCat("request ", reply.id, " has two different answers"));
  }
  if (!fresh) return;
  ++kernel_.counts["operation acknowledged"];
  if (asked->second.submit) {
    asked->second.job = JobId(nlohmann::json::parse(reply.json).at("job").get<std::string>());
  } else if (const core::JobRecord* job = Record(asked->second.job)) {
    JobTruth& truth = jobs_[asked->second.job];
    if (!truth.stop_acknowledged_at) truth.stop_acknowledged_at = job->generation.value;
  }
}

void Checker::ClientHears(const core::ClientReply& reply) {
  // Read late and not done; asked again under the same id it may have been.
  if (reply.code == static_cast<int>(absl::StatusCode::kDeadlineExceeded)) return;
  if (NotStored(reply)) return;  // true when it was said; it may have been long on its way
  const auto it = acknowledged_.find(reply.id);
  if (it != acknowledged_.end() && it->second != reply) {
    kernel_.Fail("INV-3",
                 absl::StrCat("a client reads another answer to request ", reply.id, " than was recorded"));
  }
}

// ---------------------------------------------------------------- what becomes durable

void Checker::Durable(const std::vector<core::RecordWrite>& writes) {
  std::map<JobId, int64_t> highest_before;
  for (const core::RecordWrite& write : writes) {
    if (!write.record) continue;
    if (const auto* checkpoint = std::get_if<core::CheckpointRecord>(&*write.record)) {
      JobTruth& truth = jobs_[checkpoint->job];
      highest_before.try_emplace(checkpoint->job, truth.highest_step);
      truth.highest_step = std::max(truth.highest_step, checkpoint->step);
    }
  }
  for (const core::RecordWrite& write : writes) {
    if (!write.record) continue;
    if (const auto* status = std::get_if<core::JobStatusRecord>(&*write.record)) {
      const core::JobRecord* job = Record(status->job);
      if (job == nullptr) continue;
      DurableJob(*job);
      const auto before = highest_before.find(job->id);
      CheckCommitted(*job, before == highest_before.end() ? jobs_[job->id].highest_step : before->second);
      if (core::IsFinal(job->state)) CheckBudgets(*job);
      CheckResize(*job);
      CheckGoodput(*job);
    }
    if (const auto* checkpoint = std::get_if<core::CheckpointRecord>(&*write.record)) {
      JobTruth& truth = jobs_[checkpoint->job];
      if (checkpoint->timeline.value < truth.checkpoint_timeline ||
          (checkpoint->timeline.value == truth.checkpoint_timeline &&
           checkpoint->step < truth.checkpoint_step)) {
        kernel_.Fail("INV-4", absl::StrCat("the newest checkpoint of ", checkpoint->job.value,
                                           " goes back to step ", checkpoint->step));
      }
      if (committed && !committed(checkpoint->job, checkpoint->timeline.value, checkpoint->step)) {
        kernel_.Fail("INV-4", absl::StrCat("the head knows a checkpoint of ", checkpoint->job.value,
                                           ", step ", checkpoint->step, " of timeline ",
                                           checkpoint->timeline.value, ", that was never committed"));
      }
      truth.checkpoint_timeline = checkpoint->timeline.value;
      truth.checkpoint_step = checkpoint->step;
      truth.checkpoint_at = kernel_.now();
    }
    if (const auto* node = std::get_if<core::NodeRecord>(&*write.record)) NoteLeave(*node);
  }
  for (const core::RecordWrite& write : writes) {
    if (!write.record) continue;
    if (const auto* fault = std::get_if<core::JobFaultRecord>(&*write.record)) CheckDrained(*fault);
  }
}

void Checker::NoteLeave(const core::NodeRecord& record) {
  NodeTruth& node = nodes_[record.id];
  std::string leave;
  for (const core::NodeNotice* notice : {&record.notice, &record.drain}) {
    if (notice->kind == core::NoticeKind::kLeave) absl::StrAppend(&leave, notice->id, ";");
  }
  if (leave != node.leave && !leave.empty() && node.leave.empty()) node.leave_since = kernel_.now();
  node.leave = std::move(leave);
}

// INV-7: before its time is up a notice ends a generation only for a checkpoint that was committed since.
void Checker::CheckDrained(const core::JobFaultRecord& record) {
  JobTruth& job = jobs_[record.job];
  if (!absl::EndsWith(record.fault.message, "; a checkpoint was made") ||
      !job.noticed_in.insert(record.fault.generation.value).second) {
    return;
  }
  // Ranks that were told of one machine are ended for the next one that leaves, perhaps at once.
  int64_t since = nodes_[record.fault.node].leave_since;
  for (const auto& [id, node] : nodes_) {
    if (!node.leave.empty()) since = std::min(since, node.leave_since);
  }
  if (job.checkpoint_at < since) {
    kernel_.Fail("INV-7",
                 absl::StrCat(G(record.job, record.fault.generation.value), " was ended for a checkpoint of ",
                              (since - job.checkpoint_at) / 1'000'000, " ms before the notice"));
  }
}

// INV-3: one request makes one job; a job that is over stays over. INV-1: numbers only grow.
void Checker::DurableJob(const core::JobRecord& record) {
  JobTruth& truth = jobs_[record.id];
  const auto [it, fresh] = job_of_request_.try_emplace(record.request_id, record.id);
  if (it->second != record.id) {
    kernel_.Fail("INV-3", absl::StrCat("request ", record.request_id, " made two jobs: ", it->second.value,
                                       " and ", record.id.value));
  }
  if (truth.final_state && record.state != *truth.final_state) {
    kernel_.Fail("INV-3", absl::StrCat(record.id.value, " was ", core::Name(*truth.final_state), " and is ",
                                       core::Name(record.state)));
  }
  if (core::IsFinal(record.state)) truth.final_state = record.state;
  if (record.generation.value < truth.generation || record.revoked.value < truth.revoked ||
      record.timeline.value < truth.timeline) {
    kernel_.Fail("INV-1",
                 absl::StrCat(record.id.value, " goes back to g", record.generation.value, " revoked ",
                              record.revoked.value, " timeline ", record.timeline.value));
  }
  truth.generation = record.generation.value;
  truth.revoked = record.revoked.value;
  truth.timeline = record.timeline.value;
  CheckCharges(record);
}

// ---------------------------------------------------------------- agents

void Checker::AgentStarts(const Machine& machine) {
  agents_[machine.index()] = {};
  agents_[machine.index()].leased_from = kernel_.now();
}

void Checker::AgentHears(const Machine& machine, const core::Message& message) {
  AgentTruth& agent = agents_[machine.index()];
  agent.stale_grant.reset();
  std::visit(
      [&](const auto& m) {
        if constexpr (requires { m.epoch; }) {
          if (m.epoch.value < agent.epoch) {
            if constexpr (requires { m.grant; }) agent.stale_grant = {m.grant.job, m.grant.generation.value};
            return;
          }
          agent.epoch = m.epoch.value;
        }
        using T = std::decay_t<decltype(m)>;
        if constexpr (std::is_same_v<T, core::HeartbeatAck>) {
          const auto sent = agent.beats_sent.find(m.sequence);
          if (sent == agent.beats_sent.end()) return;
          agent.leased_from = std::max(agent.leased_from, sent->second);
          agent.beats_sent.erase(agent.beats_sent.begin(), std::next(sent));
        } else if constexpr (std::is_same_v<T, core::AgentWelcome>) {
          if (agent.hello_sent) agent.leased_from = std::max(agent.leased_from, *agent.hello_sent);
          agent.hello_sent.reset();
        }
        if constexpr (std::is_same_v<T, core::Revoke>) {
          agent.revoked[m.job] = std::max(agent.revoked[m.job], m.generation.value);
        } else if constexpr (std::is_same_v<T, core::ForgetJob>) {
          agent.forgotten.insert(m.job);
        } else if constexpr (std::is_same_v<T, core::AgentShutdown>) {
          agent.shutdown = true;
        }
      },
      message);
}

void Checker::AgentSays(const Machine& machine, const core::Message& message) {
  AgentTruth& agent = agents_[machine.index()];
  if (const auto* beat = std::get_if<core::AgentHeartbeat>(&message))
    agent.beats_sent[beat->sequence] = kernel_.now();
  if (std::holds_alternative<core::AgentHello>(message) && !agent.hello_sent)
    agent.hello_sent = kernel_.now();
  if (const auto* gone = std::get_if<core::GenerationGone>(&message)) {
    uint64_t& said = agent.gone_said[gone->job];
    said = std::max(said, gone->generation.value);
  }
}

// INV-6 and INV-2: what waited for the files of its job starts no rank of a generation that was revoked
// meanwhile, or of which the agent has said that nothing is here.
void Checker::AgentSends(const Machine& machine, const core::ToKeeper& order) {
  const auto* start = std::get_if<keeper::StartRank>(&order.command);
  if (start == nullptr) return;
  const AgentTruth& agent = agents_[machine.index()];
  const auto reaches = [&](const std::map<JobId, uint64_t>& generations) {
    const auto it = generations.find(order.job);
    return it != generations.end() && it->second >= start->generation;
  };
  const std::string what = absl::StrCat("m", machine.index(), " starts rank ", start->rank, " of ",
                                        G(order.job, start->generation));
  if (reaches(agent.revoked)) kernel_.Fail("INV-6", absl::StrCat(what, " after it heard the revoke"));
  if (reaches(agent.gone_said)) kernel_.Fail("INV-2", absl::StrCat(what, " after it said that it is gone"));
}

// INV-6 and INV-7 at the agent.
void Checker::AgentOrders(const Machine& machine, const core::ToKeeper& order) {
  AgentTruth& agent = agents_[machine.index()];
  if (const auto* begin = std::get_if<keeper::BeginGeneration>(&order.command)) {
    if (agent.stale_grant == std::pair(order.job, begin->generation)) {
      kernel_.Fail("INV-6", absl::StrCat("m", machine.index(), " starts ", G(order.job, begin->generation),
                                         " on the word of a head of an older epoch"));
    }
    const auto revoked = agent.revoked.find(order.job);
    if (revoked != agent.revoked.end() && revoked->second >= begin->generation) {
      kernel_.Fail("INV-6", absl::StrCat("m", machine.index(), " starts ", G(order.job, begin->generation),
                                         " after it was revoked"));
    }
  } else if (const auto* end = std::get_if<keeper::EndGeneration>(&order.command)) {
    const auto revoked = agent.revoked.find(order.job);
    const bool told = revoked != agent.revoked.end() && revoked->second >= end->generation;
    const bool lease = kernel_.now() - agent.leased_from >= Ns(config.fence_after);
    if (lease && !told) LeaseEnds(order.job, end->generation);
    const bool by_keeper = end->reason == "revoked by the head";  // what the keeper remembers of a revoke
    if (!told && !lease && !by_keeper) {
      kernel_.Fail("INV-7", absl::StrCat("m", machine.index(), " ends ", G(order.job, end->generation), " (",
                                         end->reason, ") and was not told to"));
    }
  } else if (std::holds_alternative<keeper::Quit>(order.command)) {
    const auto keeper = machine.keepers().find(order.job);
    bool empty = true;  // but for kept processes that are being ended
    if (keeper != machine.keepers().end()) {
      for (const RankPtr& process : keeper->second->Processes())
        empty = empty && process->kept && process->termed;
    }
    if (!empty && !agent.forgotten.contains(order.job) && !agent.shutdown) {
      kernel_.Fail("INV-7", absl::StrCat("m", machine.index(), " ends the keeper of ", order.job.value,
                                         " and was not told to"));
    }
  } else if (const auto* signal = std::get_if<keeper::SignalRank>(&order.command)) {
    const core::JobRecord* record = Record(order.job);
    const spec::JobSpec* spec = record == nullptr ? nullptr : spec_of(record->spec_text);
    if (spec != nullptr && spec->progress.on_stall != spec::OnStall::kKill) {
      kernel_.Fail("INV-7", absl::StrCat("m", machine.index(), " signals rank ", signal->rank, " of ",
                                         order.job.value, ", whose on_stall is report"));
    }
  }
}

void Checker::AgentLeaves(const Machine& machine, const absl::Status& status) {
  ++kernel_.counts[absl::StrCat(machine.config().clone ? "clone refused" : "agent refused", "")];
  (void)status;
}

void Checker::KeeperDies(const Machine& machine, const JobId& job) {
  nodes_[machine.config().node].keeper_died[job] = kernel_.now();
  for (auto& [key, truth] : generations_) {
    if (key.first != job) continue;
    for (const core::NodePlace& place : truth.grant.nodes) {
      truth.lost = truth.lost || place.node == machine.config().node;
    }
  }
}

void Checker::KeeperSwept(const Machine& machine, const JobId& job) {
  nodes_[machine.config().node].keeper_died[job] = kernel_.now();
}

void Checker::MachineAnnounced(const Machine& machine, std::optional<int64_t> leaves_at) {
  NodeTruth& node = nodes_[machine.config().node];
  node.announced_until = leaves_at ? std::numeric_limits<int64_t>::max() : kernel_.now();
}

void Checker::MachineDies(const Machine& machine) {
  for (auto& [key, truth] : generations_) {
    for (const core::NodePlace& place : truth.grant.nodes) {
      truth.lost = truth.lost || (place.node == machine.config().node && !machine.config().clone);
    }
  }
}

void Checker::LeaseEnds(const JobId& job, uint64_t generation) {
  ++kernel_.counts["lease ended ranks"];
  generations_[{job, generation}].lost = true;
}

}  // namespace gtrain::sim
