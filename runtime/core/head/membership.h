// Membership: which nodes belong to the cluster, which of them are alive, and which of them leave. PURE.
// Private to runtime/core/head.
//
// A node is its key, a connection is the newest route behind a hello, and an incarnation is one life of a
// node's keepers. HeadState owns it; only the loop's thread uses it, and it never blocks. A hello and a
// return from silence cost a look at each job; other messages cost nothing that grows with the cluster.
#pragma once
#include <map>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "runtime/core/head/failure_detector.h"
#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_model.h"

namespace gtrain::core {

class Faults;
class JobLife;
class Leaves;
class Links;
class RankNews;
class Reconciler;
class Recovery;
class Relays;

// Some nodes, as far as it matters whether there is one besides a given one.
struct SomeNodes {
  std::optional<NodeId> one;
  bool more = false;
  void Add(const NodeId& node) {
    if (!one) one = node;
    more = more || *one != node;
  }
  bool AnyBut(const NodeId& node) const { return more || (one && *one != node); }
};

class Membership {
 public:
  Membership(HeadContext& context, HeadModel& model, Recovery& recovery, Reconciler& reconciler,
             JobLife& life, Faults& faults, RankNews& ranks, Links& links, Leaves& leaves, Relays& relays);

  void AddKnown(NodeRecord record, Instant now);  // a record of it was found at the start
  // From now on a node that has not spoken yet falls silent like any other.
  void Expect(const NodeId& id, Instant now);
  void RestoreNotices(Node& node, Instant now);

  // True when this process itself has just been asleep; slept() says for how long.
  bool Awake(Instant now) { return detector_.Awake(now); }
  absl::Duration slept() const { return detector_.slept(); }
  std::optional<Instant> NextDeadline() const { return detector_.NextDeadline(); }

  void OnHello(const PeerMessage& event, const AgentHello& hello, Instant now);
  // Returns the welcomed node whose newest connection this is; nullptr: the message is counted as stale.
  Node* OnHeard(const PeerMessage& event, Instant now);
  void OnChildrenHeard(const ChildrenHeard& heard, Instant now);
  void OnHeartbeat(Node& node, const AgentHeartbeat& heartbeat, Instant now);
  void OnPeerGone(const PeerGone& gone, Instant now);
  void OnNoticeSeen(Node& node, const NoticeSeen& seen, Instant now);
  void CheckSilence(Instant now);
  void EndQuarantines(Instant now);

  // People ask for these.
  void RevokeNode(const PeerMessage& event, const ClientRequest& request, const ClientRevokeNode& revoke,
                  Instant now);
  absl::StatusOr<std::string> Drain(const Peer& peer, const ClientDrainNode& drain, Instant now);

 private:
  std::string RefuseHello(const AgentHello& hello) const;
  bool Admits(const PeerMessage& event, const AgentHello& hello);
  bool HoldsBackRival(Node& known, const PeerMessage& event, const AgentHello& hello);
  bool IsLate(const Node& node, const AgentHello& hello, bool relayed) const;
  void RefuseRival(Node& node);
  bool HoldsRanks(const NodeId& id) const;
  void TakeRecord(Node& node, const PeerMessage& event, const AgentHello& hello, bool new_incarnation);
  void TakeConnection(Node& node, const PeerMessage& event, const AgentHello& hello, Instant now);
  void ForgetIncarnation(Node& node);
  void Welcome(const NodeId& id);
  void Heard(Node& node, Instant now);
  void Returned(Node& node, Instant now);
  void OnSilence(const FailureDetector::Change& change, Instant now);
  void CountFlap(Node& node, Instant now);
  bool MayOnlyLackItsAgent(const Node& node, Instant now);
  SomeNodes WhoSteps(const Job& job, Instant now) const;
  void DropNode(const NodeId& id, const std::string& why, Instant now);
  NodeId NodeCalled(const std::string& text) const;
  void AllowFreeze(const Node& node);
  void TakeNotice(Node& node, NodeNotice& slot, std::optional<Instant>& at, NodeNotice notice, Instant now);

  HeadContext& context_;
  HeadModel& model_;
  const HeadConfig& config_;
  Recovery& recovery_;
  Reconciler& reconciler_;
  JobLife& life_;
  Faults& faults_;
  RankNews& ranks_;
  Links& links_;
  Leaves& leaves_;
  Relays& relays_;

  // What speaks for nodes that are silent, found out once a look at all of them: a room without power is
  // thousands.
  struct Evidence {
    std::map<JobId, SomeNodes> stepping;  // nodes of which a rank has just stepped
    std::optional<SomeNodes> usable;
  };
  Evidence evidence_;
  FailureDetector detector_;
  std::map<NodeId, std::string> revoked_;  // by this head, and what its agent is told
};

}  // namespace gtrain::core
