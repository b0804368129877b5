// The input and output of HeadCore, as plain values. PURE.
//
// The service loop: take an event, HeadCore::Step, Outbox::Add, do what it returns, hand Outbox::NextBatch to
// the disk thread, Outbox::Durable when it is done.
#pragma once
#include <concepts>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/core/values/log_tails.h"
#include "runtime/core/values/messages.h"
#include "runtime/core/values/records.h"

namespace gtrain::core {

// ---------------------------------------------------------------- in

// A decoded message. `peer` comes from the connection's key; `address` is the numeric address of
// its socket; `route` the transport's opaque name of the connection.
struct PeerMessage {
  Peer peer;
  std::string route;
  std::string address;
  Message message;
  absl::Duration waited;  // so long it may have lain unread, after a pause of this process
  NodeId via = {};        // the agent through which it came; empty: on a connection of its own
};

// These agents, whose newest route leads through another agent, have spoken to that one. The relay says so
// and nobody proves it.
struct ChildrenHeard {
  NodeId relay;
  std::vector<NodeId> children;
};

// Says that the transport knows that this connection is gone. Optional: silence says the same, later.
struct PeerGone {
  Peer peer;
  std::string route;
};

// The room on the store's disk changed: with `low` no new job is taken, for the reason `text` (fault H3).
struct StoreRoom {
  bool low = false;
  std::string text;
  bool full = false;  // nothing is stored until there is room again
};

// What takes longer than the loop should: it is made once, on any thread, of what the core knew when it
// asked.
class PlanWork {
 public:
  virtual ~PlanWork() = default;
  virtual void Make() = 0;
};

// The work of a MakePlan is done.
struct PlanMade {
  std::shared_ptr<PlanWork> work;
};

// Due at NextDeadline() or earlier; drain ready input first.
struct Tick {};

using HeadEvent = std::variant<PeerMessage, PeerGone, ChildrenHeard, PlanMade, StoreRoom, Tick>;

// ---------------------------------------------------------------- out

// A change that a client asked for, and its outcome: one line of the audit log (docs/formats/audit.md).
struct AuditEntry {
  Peer peer;
  std::string address;
  std::string action;  // "submit", "node revoke", ...
  std::string target;  // a job, a node, a user; may be empty
  std::string outcome = "ok";
  std::string reason = {};  // what whoever asked said; may be empty
  bool operator==(const AuditEntry&) const = default;
};

// One atomic batch of writes. The audit lines are written before it.
struct Persist {
  std::vector<RecordWrite> writes;
  std::vector<AuditEntry> audit;
  bool operator==(const Persist&) const = default;
};

enum class SendKind {
  kNow,    // takes authority away, or depends on nothing but the epoch: leaves at once
  kGrant,  // gives authority: leaves when everything before it is durable, dropped if a revoke covers it
  kReply,  // leaves when everything before it is durable
};

// A message that several effects share, and which nobody changes: a grant is as long as its job has ranks and
// goes to each of their nodes, so copies of it would take nodes x ranks until it is stored. The service packs
// it for each of them as it leaves.
class SharedMessage {
 public:
  // It stands wherever a message does.
  template <typename T>
  // NOLINTNEXTLINE(google-explicit-constructor)
  requires std::constructible_from<Message, T> SharedMessage(T&& message)
      : message_(std::make_shared<const Message>(std::forward<T>(message))) {}
  const Message& operator*() const { return *message_; }
  bool operator==(const SharedMessage& other) const { return *message_ == *other.message_; }
  bool Same(const SharedMessage& other) const { return message_ == other.message_; }  // not only equal

 private:
  std::shared_ptr<const Message> message_;
};

// A message to the newest route of a node (HeadCore::RouteOf at the time of sending), or to the one given. A
// node without a route misses it; the head settles that at its next hello.
struct SendToNode {
  NodeId node;
  SendKind kind = SendKind::kReply;
  SharedMessage message;
  std::string route = {};  // of a connection that is about to be refused; empty: the newest
  bool operator==(const SendToNode&) const = default;
};

// A document for readers, with the values of the moment in which the core made it. To make it is cheap; its
// text is not, with thousands of ranks, and is built when it is delivered, on any thread.
class Document {
 public:
  virtual ~Document() = default;
  virtual std::string Json() const = 0;
};

// ClientReply on a client's connection.
struct ReplyToClient {
  std::string route;
  ClientReply reply;
  bool changes = false;  // it answers a request that changed something, and so promises that it is stored
  std::shared_ptr<const Document> document = nullptr;  // becomes reply.json; null: it is there already
  std::string client_key = {};                         // with a document or changes: who asked
  bool operator==(const ReplyToClient&) const = default;
};

// The answer to a read of logs of a node that does not answer, where the service may have spilled some.
struct ReplyFromSpill {
  std::string route;
  std::string client_key;
  std::string request_id;
  AgentQuery query;
  NodeId node;
  std::string hostname;
  int world_size = 0;            // of the generation
  std::string why;               // the node does not answer
  std::optional<HeldTail> held;  // the newest part
  bool operator==(const ReplyFromSpill&) const = default;
};
inline TailKey TailOf(const AgentQuery& query) {
  return {query.job, query.generation, query.rank, query.is_stderr};
}

ClientReply ReplyOf(const std::string& id, const absl::StatusOr<std::string>& json);
// The whole reply.
ClientReply Built(const ReplyToClient& reply);
ClientReply Built(const ReplyFromSpill& reply, const std::optional<SpilledTail>& spilled);

// Deletes the spilled tails of the job.
struct DropSpilled {
  JobId job;
  bool operator==(const DropSpilled&) const = default;
};

// AgentRefused on a connection that is not (or no longer) a node's route; leaves at once.
struct RefusePeer {
  std::string route;
  std::string reason;
  bool revoked = false;
  bool operator==(const RefusePeer&) const = default;
};

// A request that needs the cluster's keys, permission already checked: one of tokens, users and
// ClientRevokeNode, or AgentJoin. The service answers it and writes its audit line.
struct ServiceRequest {
  Peer peer;
  std::string route;
  std::string address;
  Message message;
  bool operator==(const ServiceRequest&) const = default;
};

// One line of <run dir>/events.jsonl. The core keeps the newest for ClientEvents itself.
struct EmitEvent {
  JobId job;
  std::string run_dir;
  uint64_t sequence = 0;
  Generation generation;
  std::string kind;  // "state", "fault", "grant", "revoke", "checkpoint", "stall", "note", "warning"
  std::string text;
  absl::Time at = absl::InfinitePast();  // by the clock on the wall
  std::string goodput;                   // a JSON object: the job's, at the end of a generation or of the job
  bool operator==(const EmitEvent&) const = default;
};

// "2026-01-02T03:04:05.678Z"; empty: not known.
std::string WallText(absl::Time at);

// <run dir>/failure.json.
struct WriteFailure {
  JobId job;
  std::string run_dir;
  std::shared_ptr<const Document> document;
  bool operator==(const WriteFailure&) const = default;
};

// Writes <run dir>/result.json and, on a local cluster, the index of its runs: the remains of a job that is
// over.
struct WriteResult {
  JobId job;
  std::string run_dir;
  std::shared_ptr<const Document> document;
  bool late = false;  // the head that saw the end did not write it: whoever removed the folder meant it
  bool operator==(const WriteResult&) const = default;
};

// Has the work done beside the loop, and PlanMade said after it; leaves at once.
struct MakePlan {
  std::shared_ptr<PlanWork> work;
  bool operator==(const MakePlan&) const = default;
};

// End the head process cleanly; last effect ever.
struct StopHead {
  std::string reason;
  bool failed = false;  // the process ends with an error
  bool operator==(const StopHead&) const = default;
};

using Effect =
    std::variant<Persist, SendToNode, ReplyToClient, RefusePeer, ServiceRequest, EmitEvent, WriteFailure,
                 WriteResult, MakePlan, StopHead, SpillTail, DropSpilled, ReplyFromSpill>;

struct StepResult {
  std::vector<Effect> effects;  // in order
  std::string why;              // one sentence, empty when nothing was decided
  // What it persists may wait some milliseconds for the writes of another step: nobody waits for it alone.
  bool may_wait = false;
};

}  // namespace gtrain::core
