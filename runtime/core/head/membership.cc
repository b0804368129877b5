// A hello is the moment of truth: everything the node holds is compared with what the head has granted and
// revoked (reconciler.h). A node that falls silent is suspect, then dead; one that does so often waits in
// quarantine.
#include "runtime/core/head/membership.h"

#include <algorithm>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "base/probe.h"
#include "base/units.h"
#include "runtime/core/head/faults.h"
#include "runtime/core/head/job_life.h"
#include "runtime/core/head/leaves.h"
#include "runtime/core/head/links.h"
#include "runtime/core/head/progress.h"
#include "runtime/core/head/rank_news.h"
#include "runtime/core/head/reconciler.h"
#include "runtime/core/head/recovery.h"
#include "runtime/core/head/relays.h"
#include "runtime/core/values/authority.h"

namespace gtrain::core {
namespace {

std::string Seconds(absl::Duration d) {
  return absl::FormatDuration(absl::Trunc(d, absl::Milliseconds(100)));
}

}  // namespace

Membership::Membership(HeadContext& context, HeadModel& model, Recovery& recovery, Reconciler& reconciler,
                       JobLife& life, Faults& faults, RankNews& ranks, Links& links, Leaves& leaves,
                       Relays& relays)
    : context_(context),
      model_(model),
      config_(context.config()),
      recovery_(recovery),
      reconciler_(reconciler),
      life_(life),
      faults_(faults),
      ranks_(ranks),
      links_(links),
      leaves_(leaves),
      relays_(relays),
      detector_({config_.heartbeat_interval, config_.suspect_after, config_.dead_after}) {}

void Membership::AddKnown(NodeRecord record, Instant now) {
  const NodeId id = record.id;
  Node& node = model_.AddNode(id);
  node.record = std::move(record);
  node.revision = ++model_.revisions;
  node.heard_at = now;
  Expect(id, now);
}

void Membership::Expect(const NodeId& id, Instant now) {
  detector_.Expect(id, now, std::max(absl::ZeroDuration(), config_.rejoin_window - config_.dead_after));
}

// ---------------------------------------------------------------- hello

// The sentence with which a hello is refused; empty = welcome.
std::string Membership::RefuseHello(const AgentHello& hello) const {
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

bool Membership::HoldsRanks(const NodeId& id) const {
  return std::any_of(model_.jobs.begin(), model_.jobs.end(),
                     [&](const auto& item) { return item.second.Live() && item.second.HoldsNode(id); });
}

// Refuses a second agent with this node's key, and tells it to end the generations that are over: nobody else
// can end its leftovers.
void Membership::RefuseRival(Node& node) {
  GT_PROBE("head.rival_refused");
  ++context_.counters().refused;
  for (const HeldGeneration& held : std::get<AgentHello>(node.rival->message).held) {
    const Job* job = model_.FindJob(held.job);
    if (job == nullptr ? recovery_.TakesUp(held.job)
                       : !IsFinal(job->record.state) && held.generation > job->record.revoked) {
      continue;
    }
    GT_PROBE("head.rival_told_to_end");
    context_.Do(SendToNode{node.record.id, SendKind::kNow,
                           Revoke{model_.epoch(), held.job, held.generation, EndMode::kStopNow,
                                  absl::ZeroDuration(), "it is over, and another agent has this node's key"},
                           node.rival->route});
  }
  context_.Do(RefusePeer{
      node.rival->route,
      absl::StrCat("another agent with this node's key is alive (", node.record.hostname, " at ",
                   node.record.address, "): stop it, or join this machine with a token of its own")});
  context_.Say(absl::StrCat("refused a second agent with the key of ", node.record.hostname));
  node.rival.reset();
}

// True for a hello from a connection that its agent has given up already (fault W7). The order of earlier
// hellos counts no longer once the node is dead: its clock is trusted no longer than that.
bool Membership::IsLate(const Node& node, const AgentHello& hello, bool relayed) const {
  if (hello.order == 0) return false;  // of an older version
  const auto before = [&](const std::string& boot, uint64_t order) {
    return boot == hello.boot_id && hello.order < order;
  };
  if (node.rival) {
    const AgentHello& rival = std::get<AgentHello>(node.rival->message);
    if (before(rival.boot_id, rival.order)) return true;
  }
  // A relay may keep a hello back until its node is dead, to lift the lease of ranks that still run there
  // (N2).
  const bool counts = node.state != NodeState::kDead || relayed;
  return node.welcomed && counts && before(node.record.boot_id, node.hello_order);
}

// After a restart of this head the first may not have spoken yet; its ranks are a reason to wait for it.
bool Membership::HoldsBackRival(Node& known, const PeerMessage& event, const AgentHello& hello) {
  const bool expected = known.welcomed ? known.state == NodeState::kAlive
                                       : known.state == NodeState::kUnknown && HoldsRanks(known.record.id);
  if (!expected || known.route == event.route || known.record.incarnation == hello.incarnation) return false;
  GT_PROBE("head.rival_held");
  if (known.rival && known.rival->route != event.route) RefuseRival(known);
  known.rival = event;
  return true;
}

// False: it is refused, too late, or waits until the agent that is heard now has spoken or fallen silent.
bool Membership::Admits(const PeerMessage& event, const AgentHello& hello) {
  const NodeId id(event.peer.key_id);
  if (std::string refusal = RefuseHello(hello); !refusal.empty()) {
    ++context_.counters().refused;
    context_.Say(absl::StrCat("refused ", hello.hostname, ": ", refusal));
    context_.Do(RefusePeer{event.route, std::move(refusal)});
    return false;
  }
  if (const auto it = revoked_.find(id); it != revoked_.end()) {  // its key may still be on the list
    context_.Do(RefusePeer{event.route, absl::StrCat("this node was ", it->second), true});
    return false;
  }
  if (recovery_.Outranked(hello)) {
    recovery_.StepDown(hello);
    return false;
  }
  const auto known = model_.nodes.find(id);
  if (known == model_.nodes.end()) return true;
  if (IsLate(known->second, hello, !event.via.empty())) {
    GT_PROBE("head.late_hello");
    ++context_.counters().stale_dropped;
    return false;
  }
  return !HoldsBackRival(known->second, event, hello);
}

void Membership::TakeRecord(Node& node, const PeerMessage& event, const AgentHello& hello,
                            bool new_incarnation) {
  NodeRecord record{NodeId(event.peer.key_id),
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
  if (record == node.record) return;
  node.record = std::move(record);
  node.revision = ++model_.revisions;
  context_.Write(node.record);
}

void Membership::TakeConnection(Node& node, const PeerMessage& event, const AgentHello& hello, Instant now) {
  node.route = event.route;
  node.welcomed = true;
  node.hello_order = hello.order;
  node.free_ports = hello.free_ports;
  node.near_port = hello.near_port;
  node.near_key = hello.near_key;
  node.takes_copies = hello.takes_copies;
  node.keeps_seals = hello.keeps_seals;
  node.knows_fabric_order = hello.knows_fabric_order;
  node.knows_relays = hello.knows_relays && !hello.public_key.empty();
  node.relay_port = hello.relay_port;
  node.relay_failed = false;
  node.public_key = hello.public_key;
  node.via = event.via;
  node.said_at = now;
  node.state = NodeState::kAlive;
  node.watched = detector_.Heard(node.record.id, now);
  node.heard_at = now;
}

// Notices, avoidances and unproven grants were about the machine's life before this one.
void Membership::ForgetIncarnation(Node& node) {
  node.notice_at.reset();
  links_.EndAvoidances(node.record.id, "it restarted");
  recovery_.ForgetNode(node.record.id);
}

void Membership::Welcome(const NodeId& id) {
  context_.Send(
      id, SendKind::kReply,
      AgentWelcome{config_.cluster, model_.epoch(), id, config_.heartbeat_interval, config_.fence_after,
                   config_.prove_epoch ? config_.prove_epoch(model_.epoch()) : "",
                   recovery_.WantsDescriptions(), /*joins_pieces=*/true});
}

void Membership::OnHello(const PeerMessage& event, const AgentHello& hello, Instant now) {
  if (!Admits(event, hello)) return;
  const NodeId id(event.peer.key_id);
  const bool known = model_.nodes.contains(id);
  Node& node = model_.AddNode(id);
  const bool new_incarnation =
      known && !node.record.incarnation.empty() && node.record.incarnation != hello.incarnation;
  TakeRecord(node, event, hello, new_incarnation);
  // The first on a connection says what is there, for nothing is on its way. One that is repeated may have
  // been sent before what this head sent on the same connection arrived.
  const bool repeated = node.welcomed && node.route == event.route && !new_incarnation;
  node.missed = node.missed && repeated;
  TakeConnection(node, event, hello, now);
  AllowFreeze(node);
  if (new_incarnation) ForgetIncarnation(node);
  Welcome(id);
  context_.Say(absl::StrCat(hello.hostname, known ? " is back" : " joined", " with ", hello.inventory.cpus,
                            " cpus and ", hello.inventory.gpus.size(), " GPUs",
                            new_incarnation ? ", as a new incarnation" : ""));
  reconciler_.Reconcile(node, hello, new_incarnation, repeated, now);
  relays_.OnHello(node, now);
  model_.schedule = true;
}

// ---------------------------------------------------------------- what is heard, and silence

Node* Membership::OnHeard(const PeerMessage& event, Instant now) {
  const NodeId id(event.peer.key_id);
  Node* node = model_.FindNode(id);
  if (node == nullptr || !node->welcomed || node->route != event.route) {
    GT_PROBE("head.message_of_old_connection");
    // A late message of an old connection, or one from before this head's time. The agent says hello on
    // every new connection, so there is nothing to answer.
    ++context_.counters().stale_dropped;
    return nullptr;
  }
  node->said_at = now;
  Heard(*node, now);
  return node;
}

void Membership::Heard(Node& node, Instant now) {
  detector_.Heard(*node.watched, now);  // which its hello has set
  node.heard_at = now;
  if (node.rival) RefuseRival(node);
  if (node.state != NodeState::kAlive) Returned(node, now);
}

// A relay that lies can only keep up the appearance that a child lives, and not for long.
void Membership::OnChildrenHeard(const ChildrenHeard& heard, Instant now) {
  for (const NodeId& id : heard.children) {
    Node* node = model_.FindNode(id);
    if (node == nullptr || !node->welcomed || node->via != heard.relay) continue;
    if (now - node->said_at > config_.relay_believed) {
      GT_PROBE("head.relay_not_believed");
      continue;
    }
    Heard(*node, now);
  }
}

void Membership::OnHeartbeat(Node& node, const AgentHeartbeat& heartbeat, Instant now) {
  if (!heartbeat.free_ports.empty()) node.free_ports = heartbeat.free_ports;
  for (const RankStatus& status : heartbeat.changed) ranks_.OnRankStatus(node.record.id, status, now);
  context_.Send(node.record.id, SendKind::kNow,
                HeartbeatAck{model_.epoch(), heartbeat.sequence, node.missed});
}

// Called when a node is heard again after suspicion or death. Revokes sent meanwhile may not have reached it
// (fault N2).
void Membership::Returned(Node& node, Instant now) {
  const bool was_dead = node.state == NodeState::kDead;
  if (was_dead) GT_PROBE("head.dead_node_returns");
  node.state = NodeState::kAlive;
  context_.Say(absl::StrCat(node.record.hostname, " is heard again"));
  links_.ForgetLinks(node.record.id);
  model_.schedule = true;
  for (const auto& [number, id] : model_.job_order) {
    Job& job = model_.jobs.at(id);
    if (job.Unreleased(node.record.id)) life_.ResendEnding(job, node.record.id, now);
    const auto& kept = job.record.kept;
    if (was_dead && IsFinal(job.record.state) &&
        std::find(kept.begin(), kept.end(), node.record.id) != kept.end()) {
      context_.Send(node.record.id, SendKind::kReply, ForgetJob{model_.epoch(), id});
    }
  }
}

void Membership::OnPeerGone(const PeerGone& gone, Instant now) {
  const auto it = model_.nodes.find(NodeId(gone.peer.key_id));
  if (gone.peer.role != Role::kNode || it == model_.nodes.end() || it->second.route != gone.route) return;
  GT_PROBE("head.peer_gone");
  it->second.missed = true;
  evidence_ = {};
  if (const auto change = detector_.Suspect(it->first, now)) OnSilence(*change, now);
}

void Membership::CheckSilence(Instant now) {
  evidence_ = {};
  for (const FailureDetector::Change& change : detector_.Advance(now)) OnSilence(change, now);
}

void Membership::OnSilence(const FailureDetector::Change& change, Instant now) {
  Node& node = model_.nodes.at(change.node);
  node.silence = change.silence;
  if (change.to == FailureDetector::Level::kSuspect) {
    node.state = NodeState::kSuspect;
    evidence_.usable.reset();
    context_.Say(absl::StrCat(node.record.hostname, " is suspect: silent for ", Seconds(change.silence)));
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
    context_.Say(absl::StrCat(node.record.hostname, " is dead: silent for ", Seconds(change.silence)));
    for (Job* job : model_.LiveJobs()) {
      faults_.RanksLost(*job, node, absl::StrCat("silent for ", Seconds(change.silence)), now);
      life_.ContinueEnding(*job, now);
    }
    model_.schedule = true;
  }
}

// Each return of a node that does not stay costs its jobs a re-formation, so it is believed ever more slowly.
// The only machine of a local cluster is never shut out.
void Membership::CountFlap(Node& node, Instant now) {
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
  model_.quarantined.insert(node.record.id);
  node.quarantine = absl::StrCat("in quarantine: it fell silent ", node.flaps, " times within ",
                                 PrintDuration(config_.flap_decay), "; used again after ",
                                 PrintDuration(cooldown), " without another");
  context_.Say(absl::StrCat(node.record.hostname, " is ", node.quarantine));
}

void Membership::EndQuarantines(Instant now) {
  std::erase_if(model_.quarantined, [&](const NodeId& id) {
    const auto it = model_.nodes.find(id);
    if (it == model_.nodes.end()) return true;
    Node& node = it->second;
    if (node.quarantined_until && now < *node.quarantined_until) return false;
    if (!std::exchange(node.quarantined_until, std::nullopt)) return true;
    context_.Say(absl::StrCat(node.record.hostname, " leaves quarantine"));
    model_.schedule = true;
    return true;
  });
}

// A dead agent and a dead node are equally silent. Two things tell them apart: ranks elsewhere that step on
// need those of the silent node; and where no other node is left, giving up a generation gains nothing.
bool Membership::MayOnlyLackItsAgent(const Node& node, Instant now) {
  const NodeId& id = node.record.id;
  bool holds = false;
  for (const auto& [job_id, job] : model_.jobs) {
    if (!job.Live() || !job.HoldsNode(id)) continue;
    holds = true;
    const auto [stepping, fresh] = evidence_.stepping.try_emplace(job_id);
    if (fresh) stepping->second = WhoSteps(job, now);
    if (stepping->second.AnyBut(id)) return true;
  }
  if (!holds) return false;
  if (!evidence_.usable) {
    evidence_.usable.emplace();
    for (const auto& [other, known] : model_.nodes) {
      if (known.Usable()) evidence_.usable->Add(other);
    }
  }
  return !evidence_.usable->AnyBut(id);
}

// The nodes of which a rank has just stepped.
SomeNodes Membership::WhoSteps(const Job& job, Instant now) const {
  const absl::Duration recent = std::max(config_.suspect_after, 2 * BetweenSteps(job));
  SomeNodes some;
  for (const RankPlace& place : job.record.grant->ranks) {
    const std::optional<Instant> stepped = job.ranks[place.rank].stepped_at;
    if (stepped && now - *stepped <= recent) some.Add(place.node);
  }
  return some;
}

// ---------------------------------------------------------------- by hand

NodeId Membership::NodeCalled(const std::string& text) const {
  if (model_.nodes.contains(NodeId(text))) return NodeId(text);
  NodeId found(text);
  int matches = 0;
  for (const auto& [id, node] : model_.nodes) {
    if (node.record.hostname != text) continue;
    found = id;
    ++matches;
  }
  return matches == 1 ? found : NodeId(text);
}

// Everything that rests on the node ends now; the service takes its key off the list. A node that never came
// back after joining is known to the list alone.
void Membership::RevokeNode(const PeerMessage& event, const ClientRequest& request,
                            const ClientRevokeNode& revoke, Instant now) {
  const NodeId id = NodeCalled(revoke.node);
  const std::string why = absl::StrCat("revoked by ", OwnerName(event.peer),
                                       revoke.reason.empty() ? "" : ": ", Shortened(revoke.reason, 1 << 10));
  if (model_.store_full) {  // the service could not take the key off the list, so nothing is done
    return context_.Answer(
        event.route, request.id,
        absl::ResourceExhaustedError(absl::StrCat("nothing was done: ", model_.store_low.value_or(""),
                                                  ". Free some space there and ask again")),
        "");
  }
  if (model_.nodes.contains(id)) {
    DropNode(id, why, now);
    revoked_[id] = why;
  }
  ClientRequest resolved{request.id, request.deadline, ClientRevokeNode{id.value, why}};
  context_.Do(ServiceRequest{event.peer, event.route, event.address, std::move(resolved)});
}

void Membership::DropNode(const NodeId& id, const std::string& why, Instant now) {
  const Node& node = model_.nodes.at(id);
  context_.Say(absl::StrCat(node.record.hostname, " is ", why));
  for (const std::string& route : {node.route, node.rival ? node.rival->route : ""}) {
    if (!route.empty()) context_.Do(RefusePeer{route, absl::StrCat("this node was ", why), true});
  }
  for (Job* job : model_.LiveJobs()) faults_.RanksLost(*job, node, why, now);
  context_.Delete(KeyOf(node.record));
  detector_.Forget(id);
  recovery_.ForgetNode(id);
  relays_.Forget(id);
  model_.DropNode(id);
  for (Job* job : model_.LiveJobs()) life_.Release(*job, id, now);
}

}  // namespace gtrain::core
