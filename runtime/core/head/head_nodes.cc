// Membership. A node is its key; a connection is its newest route after a hello; an incarnation is one
// life of its keepers. A hello is the moment of truth: everything the node holds is compared with what
// the head has granted and revoked, and each difference is settled at once.
#include <algorithm>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "base/probe.h"
#include "base/units.h"
#include "runtime/core/head/head_state.h"
#include "runtime/core/values/authority.h"

namespace gtrain::core {
namespace {

std::string Seconds(absl::Duration d) {
  return absl::FormatDuration(absl::Trunc(d, absl::Milliseconds(100)));
}

}  // namespace

std::string HeadState::Hostname(const NodeId& id) const {
  const auto it = nodes_.find(id);
  return it == nodes_.end() ? id.value : it->second.record.hostname;
}

// The sentence with which a hello is refused; empty = welcome.
std::string HeadState::RefuseHello(const AgentHello& hello) const {
  // One version apart is compatible both ways (fault N13): fields are only added, unknown kinds are dropped.
  if (std::abs(int64_t{hello.protocol} - config_.protocol) > 1) {
    return absl::StrCat("protocol ", hello.protocol, " of gtrain ", hello.version,
                        " is more than one version away from protocol ", config_.protocol, " of this head",
                        config_.version.empty() ? "" : absl::StrCat(" (gtrain ", config_.version, ")"),
                        ": upgrade one version at a time, or install the same on both");
  }
  // Empty: its key was let in, and the answer that named the cluster was lost.
  if (hello.cluster != config_.cluster && !hello.cluster.empty()) {
    return absl::StrCat("this is cluster ", config_.cluster.value, ", the agent belongs to ",
                        hello.cluster.value, ": join it anew with a token of this cluster");
  }
  return "";
}

bool HeadState::HoldsRanks(const NodeId& id) const {
  return std::any_of(jobs_.begin(), jobs_.end(),
                     [&](const auto& item) { return item.second.Live() && item.second.HoldsNode(id); });
}

// What it holds of what is over it ends itself: its leftovers are nobody else's.
void HeadState::RefuseRival(Node& node) {
  GT_PROBE("head.rival_refused");
  ++counters_.refused;
  for (const HeldGeneration& held : std::get<AgentHello>(node.rival->message).held) {
    const Job* job = FindJob(held.job);
    if (job == nullptr ? TakesUp(held.job)
                       : !IsFinal(job->record.state) && held.generation > job->record.revoked) {
      continue;
    }
    GT_PROBE("head.rival_told_to_end");
    out_.push_back(
        SendToNode{node.record.id, SendKind::kNow,
                   Revoke{epoch(), held.job, held.generation, EndMode::kStopNow, absl::ZeroDuration(),
                          "it is over, and another agent has this node's key"},
                   node.rival->route});
  }
  out_.push_back(RefusePeer{
      node.rival->route,
      absl::StrCat("another agent with this node's key is alive (", node.record.hostname, " at ",
                   node.record.address, "): stop it, or join this machine with a token of its own")});
  Say(absl::StrCat("refused a second agent with the key of ", node.record.hostname));
  node.rival.reset();
}

// From a connection that its agent has given up already (fault W7). A node that is dead may say what it
// likes: its clock is trusted no longer than that.
bool HeadState::IsLate(const Node& node, const AgentHello& hello) const {
  if (hello.order == 0) return false;  // of an older version
  const auto before = [&](const std::string& boot, uint64_t order) {
    return boot == hello.boot_id && hello.order < order;
  };
  if (node.rival) {
    const AgentHello& rival = std::get<AgentHello>(node.rival->message);
    if (before(rival.boot_id, rival.order)) return true;
  }
  return node.welcomed && node.state != NodeState::kDead && before(node.record.boot_id, node.hello_order);
}

void HeadState::OnHello(const PeerMessage& event, const AgentHello& hello, Instant now) {
  const NodeId id(event.peer.key_id);
  if (std::string refusal = RefuseHello(hello); !refusal.empty()) {
    ++counters_.refused;
    Say(absl::StrCat("refused ", hello.hostname, ": ", refusal));
    out_.push_back(RefusePeer{event.route, std::move(refusal)});
    return;
  }
  if (const auto it = revoked_.find(id); it != revoked_.end()) {  // its key may still be on the list
    out_.push_back(RefusePeer{event.route, absl::StrCat("this node was ", it->second), true});
    return;
  }
  if (Outranked(hello)) return StepDown(hello);
  if (const auto it = nodes_.find(id); it != nodes_.end()) {
    Node& known = it->second;
    if (IsLate(known, hello)) {
      GT_PROBE("head.late_hello");
      ++counters_.stale_dropped;
      return;
    }
    // After a restart of this head the first may not have spoken yet; its ranks are a reason to wait for it.
    const bool expected = known.welcomed ? known.state == NodeState::kAlive
                                         : known.state == NodeState::kUnknown && HoldsRanks(id);
    if (expected && known.route != event.route && known.record.incarnation != hello.incarnation) {
      GT_PROBE("head.rival_held");
      if (known.rival && known.rival->route != event.route) RefuseRival(known);
      known.rival = event;
      return;
    }
  }
  const bool known = nodes_.contains(id);
  Node& node = nodes_[id];
  const bool new_incarnation =
      known && !node.record.incarnation.empty() && node.record.incarnation != hello.incarnation;
  NodeRecord record{id,
                    hello.incarnation,
                    hello.boot_id,
                    hello.hostname,
                    hello.address.empty() ? event.address : hello.address,
                    hello.version,
                    hello.inventory,
                    hello.labels,
                    node.record.unclean && !new_incarnation,
                    new_incarnation ? NodeNotice() : node.record.notice,
                    node.record.drain};
  if (record != node.record) {
    node.record = std::move(record);
    node.revision = ++revisions_;
    Write(node.record);
  }
  // The first on a connection says what is there, for nothing is on its way. One that is repeated may have
  // been sent before what this head sent on the same connection arrived.
  const bool repeated = node.welcomed && node.route == event.route && !new_incarnation;
  node.missed = node.missed && repeated;
  node.route = event.route;
  node.welcomed = true;
  node.hello_order = hello.order;
  node.free_ports = hello.free_ports;
  node.near_port = hello.near_port;
  node.near_key = hello.near_key;
  node.takes_copies = hello.takes_copies;
  node.keeps_seals = hello.keeps_seals;
  node.state = NodeState::kAlive;
  detector_.Heard(id, now);
  node.heard_at = now;
  if (new_incarnation) node.notice_at.reset();
  AllowFreeze(node);
  if (new_incarnation) EndAvoidances(id, "it restarted");
  if (new_incarnation) std::erase_if(unproven_, [&](const auto& item) { return item.first.second == id; });
  Send(id, SendKind::kReply,
       AgentWelcome{config_.cluster, epoch(), id, config_.heartbeat_interval, config_.fence_after,
                    config_.prove_epoch ? config_.prove_epoch(epoch()) : "",
                    cluster_.recovering || !set_aside_.empty(), /*joins_pieces=*/true});
  Say(absl::StrCat(hello.hostname, known ? " is back" : " joined", " with ", hello.inventory.cpus,
                   " cpus and ", hello.inventory.gpus.size(), " GPUs",
                   new_incarnation ? ", as a new incarnation" : ""));
  Reconcile(node, hello, new_incarnation, repeated, now);
  schedule_ = true;
}

void HeadState::Reconcile(Node& node, const AgentHello& hello, bool new_incarnation, bool repeated,
                          Instant now) {
  std::map<JobId, std::vector<const HeldGeneration*>> held;
  std::vector<const HeldGeneration*> over;
  std::set<JobId> described;  // what the node says of these follows
  for (const HeldGeneration& generation : hello.held) {
    if (AwaitsDescription(generation)) described.insert(generation.job);
  }
  for (const HeldGeneration& generation : hello.held) {
    if (described.contains(generation.job)) continue;
    const Job* job = FindJob(generation.job);
    const bool final = job != nullptr && IsFinal(job->record.state);
    // A job may be over before this node confirmed it: what is held here keeps its room.
    const bool keeps_room = final && Unreleased(*job, node.record.id);
    if (keeps_room) GT_PROBE("head.what_is_over_keeps_its_room");
    if (job == nullptr || final) over.push_back(&generation);
    if (job != nullptr && (!final || keeps_room)) held[generation.job].push_back(&generation);
  }
  for (const auto& [number, id] : job_order_) {
    const std::vector<const HeldGeneration*>& here = held[id];
    if (repeated && here.empty()) {
      GT_PROBE("head.repeated_hello");
      continue;
    }
    if (!described.contains(id)) ReconcileJob(jobs_.at(id), node, here, new_incarnation, now);
  }
  for (const HeldGeneration* generation : over) {
    EndForgotten(node.record.id, *generation, FindJob(generation->job) != nullptr);
  }
  SettleCopies(node.record.id, hello);
}

// Of a job that is over or was never ours: the exits are taken note of, everything is ended.
void HeadState::EndForgotten(const NodeId& node, const HeldGeneration& held, bool known) {
  GT_PROBE("head.ends_forgotten_job");
  for (const RankExit& exit : held.exited) {
    Send(node, SendKind::kReply, AckExit{epoch(), held.job, exit.generation, exit.rank});
  }
  Send(node, SendKind::kNow,
       Revoke{epoch(), held.job, held.generation, EndMode::kStopNow, absl::ZeroDuration(),
              known ? "the job is over" : "this head knows no such job"});
  Send(node, SendKind::kReply, ForgetJob{epoch(), held.job});
}

// `held`: every generation of the job that has anything left on this node.
void HeadState::ReconcileJob(Job& job, const Node& node, const std::vector<const HeldGeneration*>& held,
                             bool new_incarnation, Instant now) {
  const NodeId& id = node.record.id;
  const bool was_ending = Unreleased(job, id);
  bool holds_over = false, holds_current = false, saw_revoke = false;
  const bool stopping = std::any_of(held.begin(), held.end(), [&](const HeldGeneration* generation) {
    return generation->stopping && generation->revoked >= job.record.generation;
  });
  // Before its exits are heard: they are the consequence of the stop. A head before us began it and died
  // before writing it down (its disk may have been full), or its records are lost.
  if (stopping && job.Live() && job.HoldsNode(id)) {
    GT_PROBE("head.finishes_unrecorded_stop");
    BeginEnding(job, Ending::kCancel, EndMode::kStop, job.spec.stop_grace,
                cluster_.recovering
                    ? "its agents were told to stop it before the head's records were lost"
                    : "its agents were told to stop it by a head that ended before it could say so",
                now);
  }
  for (const HeldGeneration* generation : held) {
    for (const RankStatus& status : generation->live) OnRankStatus(id, status, now);
    for (const RankExit& exit : generation->exited) OnExited(id, exit, now);
    saw_revoke = saw_revoke || generation->revoked >= job.record.generation;
    holds_current = holds_current || generation->generation == job.record.generation;
  }
  for (const HeldGeneration* generation : held) {
    holds_over = holds_over || generation->generation <= job.record.revoked;
  }
  if (Unreleased(job, id)) {
    if (!holds_over) {
      GT_PROBE("head.released_by_hello");
      Release(job, id, now);
    } else if (was_ending) {
      ResendEnding(job, id, now);
    }
    return;
  }
  if (holds_over) ResendEnding(job, id, now);
  if (!job.Live() || !job.HoldsNode(id)) return;
  if (saw_revoke) {
    GT_PROBE("head.finishes_unrecorded_revoke");
    // A head before us revoked this and died before writing it down: finish what it began.
    return BeginEnding(job, Ending::kReplace, EndMode::kReform, config_.reform_grace,
                       "a generation was revoked by a head that ended before it could say so", now);
  }
  if (holds_current && job.told_at && job.leave) TellRanks(job, id, now);  // it may not have heard
  if (holds_current) return SayWhoLeft(job, &id);
  bool missing = false, started = new_incarnation || job.record.state == JobState::kRunning;
  for (const RankPlace& place : job.record.grant->ranks) {
    if (place.node != id || job.ExitOf(place.rank) != nullptr) continue;
    missing = true;
    started = started || job.ranks[place.rank].started;
  }
  if (!missing) return;
  if (!Settled(now)) {
    unsettled_.emplace(job.record.id, id);
    return;
  }
  if (!started) GT_PROBE("head.grants_again");
  if (!started) return SendGrant(job, {id});  // it was lost with the connection
  const char* why =
      new_incarnation ? "it restarted and its ranks are gone" : "its keeper is gone and so are its ranks";
  GT_PROBE("head.ranks_gone_at_hello");
  RanksLost(job, node, why, now);
  if (!holds_over) Release(job, id, now);
}

// The node still has processes of a generation that is over; it may not have heard so. What is left of
// the grace still holds.
void HeadState::ResendEnding(Job& job, const NodeId& node, Instant now) {
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

bool HeadState::Unreleased(const Job& job, const NodeId& node) const {
  return std::find(job.record.unreleased.begin(), job.record.unreleased.end(), node) !=
         job.record.unreleased.end();
}

void HeadState::Release(Job& job, const NodeId& node, Instant now) {
  if (std::erase(job.record.unreleased, node) > 0) {
    job.written.unreleased = false;
    Dirty(job);
  }
  ContinueEnding(job, now);
  schedule_ = true;
}

void HeadState::OnHeartbeat(Node& node, const AgentHeartbeat& heartbeat, Instant now) {
  if (!heartbeat.free_ports.empty()) node.free_ports = heartbeat.free_ports;
  for (const RankStatus& status : heartbeat.changed) OnRankStatus(node.record.id, status, now);
  Send(node.record.id, SendKind::kNow, HeartbeatAck{epoch(), heartbeat.sequence, node.missed});
}

// Heard again after suspicion or death. What was revoked meanwhile may not have reached it (fault N2).
void HeadState::Returned(Node& node, Instant now) {
  const bool was_dead = node.state == NodeState::kDead;
  if (was_dead) GT_PROBE("head.dead_node_returns");
  node.state = NodeState::kAlive;
  Say(absl::StrCat(node.record.hostname, " is heard again"));
  ForgetLinks(node.record.id);
  schedule_ = true;
  for (const auto& [number, id] : job_order_) {
    Job& job = jobs_.at(id);
    if (Unreleased(job, node.record.id)) ResendEnding(job, node.record.id, now);
    const auto& kept = job.record.kept;
    if (was_dead && IsFinal(job.record.state) &&
        std::find(kept.begin(), kept.end(), node.record.id) != kept.end()) {
      Send(node.record.id, SendKind::kReply, ForgetJob{epoch(), id});
    }
  }
}

void HeadState::OnSilence(const FailureDetector::Change& change, Instant now) {
  Node& node = nodes_.at(change.node);
  node.silence = change.silence;
  if (change.to == FailureDetector::Level::kSuspect) {
    node.state = NodeState::kSuspect;
    Say(absl::StrCat(node.record.hostname, " is suspect: silent for ", Seconds(change.silence)));
    if (node.rival) {
      const PeerMessage rival = *std::move(node.rival);
      node.rival.reset();
      GT_PROBE("head.rival_accepted");
      OnHello(rival, std::get<AgentHello>(rival.message), now);
    }
  } else if (change.to == FailureDetector::Level::kDead) {
    if (change.silence < config_.agent_grace && MayOnlyLackItsAgent(node, now)) {
      GT_PROBE("head.spares_silent_agent");
      return detector_.Spare(node.record.id, now + config_.heartbeat_interval);
    }
    GT_PROBE("head.node_dead");
    node.state = NodeState::kDead;
    if (!node.Leaving()) CountFlap(node, now);
    Say(absl::StrCat(node.record.hostname, " is dead: silent for ", Seconds(change.silence)));
    for (Job* job : LiveJobs()) {
      RanksLost(*job, node, absl::StrCat("silent for ", Seconds(change.silence)), now);
      ContinueEnding(*job, now);
    }
    schedule_ = true;
  }
}

// Each return of a node that does not stay costs its jobs a re-formation, so it is believed ever more slowly.
// The only machine of a local cluster is never shut out.
void HeadState::CountFlap(Node& node, Instant now) {
  while (node.flaps > 0 && now - node.flapped_at >= config_.flap_decay) {
    node.flaps /= 2;
    node.flapped_at = node.flapped_at + config_.flap_decay;
  }
  ++node.flaps;
  node.flapped_at = now;
  if (node.flaps < 2 || config_.local) return;
  absl::Duration cooldown = config_.quarantine_min;
  for (int i = 2; i < node.flaps && cooldown < config_.quarantine_max; ++i) cooldown *= 2;
  cooldown = std::min(cooldown, config_.quarantine_max);
  node.quarantined_until = now + cooldown;
  node.quarantine = absl::StrCat("in quarantine: it fell silent ", node.flaps, " times within ",
                                 PrintDuration(config_.flap_decay), "; used again after ",
                                 PrintDuration(cooldown), " without another");
  Say(absl::StrCat(node.record.hostname, " is ", node.quarantine));
}

void HeadState::EndQuarantines(Instant now) {
  for (auto& [id, node] : nodes_) {
    if (!node.quarantined_until || now < *node.quarantined_until) continue;
    node.quarantined_until.reset();
    Say(absl::StrCat(node.record.hostname, " leaves quarantine"));
    schedule_ = true;
  }
}

// A dead agent and a dead node are equally silent. What tells them apart: ranks elsewhere that step on need
// those of the silent node; and where no other node is left, giving up a generation gains nothing.
bool HeadState::MayOnlyLackItsAgent(const Node& node, Instant now) const {
  bool holds = false;
  for (const auto& [id, job] : jobs_) {
    if (!job.Live() || !job.HoldsNode(node.record.id)) continue;
    holds = true;
    absl::Duration recent = config_.suspect_after;
    recent = std::max(recent, 2 * BetweenSteps(job));
    for (const RankPlace& place : job.record.grant->ranks) {
      const std::optional<Instant> stepped = job.ranks[place.rank].stepped_at;
      if (place.node != node.record.id && stepped && now - *stepped <= recent) return true;
    }
  }
  const bool others = std::any_of(nodes_.begin(), nodes_.end(), [&](const auto& entry) {
    return entry.first != node.record.id && entry.second.Usable();
  });
  return holds && !others;
}

NodeId HeadState::NodeCalled(const std::string& text) const {
  if (nodes_.contains(NodeId(text))) return NodeId(text);
  NodeId found(text);
  int matches = 0;
  for (const auto& [id, node] : nodes_) {
    if (node.record.hostname != text) continue;
    found = id;
    ++matches;
  }
  return matches == 1 ? found : NodeId(text);
}

// Everything that rests on the node ends now; the service takes its key off the list. A node that never came
// back after joining is known to the list alone.
void HeadState::RevokeNode(const PeerMessage& event, const ClientRequest& request,
                           const ClientRevokeNode& revoke, Instant now) {
  const NodeId id = NodeCalled(revoke.node);
  const std::string why = absl::StrCat("revoked by ", OwnerName(event.peer),
                                       revoke.reason.empty() ? "" : ": ", Shortened(revoke.reason, 1 << 10));
  if (store_full_) {  // the service could not take the key off the list, so nothing is done
    return Answer(event.route, request.id,
                  absl::ResourceExhaustedError(absl::StrCat("nothing was done: ", store_low_.value_or(""),
                                                            ". Free some space there and ask again")),
                  "");
  }
  if (nodes_.contains(id)) {
    DropNode(id, why, now);
    revoked_[id] = why;
  }
  ClientRequest resolved{request.id, request.deadline, ClientRevokeNode{id.value, why}};
  out_.push_back(ServiceRequest{event.peer, event.route, event.address, std::move(resolved)});
}

void HeadState::DropNode(const NodeId& id, const std::string& why, Instant now) {
  const Node& node = nodes_.at(id);
  Say(absl::StrCat(node.record.hostname, " is ", why));
  for (const std::string& route : {node.route, node.rival ? node.rival->route : ""}) {
    if (!route.empty()) out_.push_back(RefusePeer{route, absl::StrCat("this node was ", why), true});
  }
  for (Job* job : LiveJobs()) RanksLost(*job, node, why, now);
  Delete(KeyOf(node.record));
  detector_.Forget(id);
  std::erase_if(unproven_, [&](const auto& item) { return item.first.second == id; });
  nodes_.erase(id);
  for (Job* job : LiveJobs()) Release(*job, id, now);
}

// The ranks of a node fail together, as one infrastructure fault (fault N1).
void HeadState::RanksLost(Job& job, const Node& node, const std::string& why, Instant now) {
  if (!job.Live() || !job.HoldsNode(node.record.id)) return;
  FaultRecord fault;
  fault.kind = FaultKind::kInfrastructure;
  fault.cause = ExitCause::kLost;
  fault.node = node.record.id;
  fault.hostname = node.record.hostname;
  fault.message = absl::StrCat("node ", node.record.hostname, " is lost: ", why);
  for (const RankPlace& place : job.record.grant->ranks) {
    if (place.node != node.record.id || job.ExitOf(place.rank) != nullptr || fault.rank >= 0) continue;
    fault.rank = place.rank;
    const HeldTail* tail = tails_.Find({job.record.id, job.record.generation, place.rank, true});
    if (tail != nullptr) fault.tail = tail->text;
  }
  if (fault.rank >= 0) Fail(job, std::move(fault), now);  // otherwise all of its ranks had ended well
}

}  // namespace gtrain::core
