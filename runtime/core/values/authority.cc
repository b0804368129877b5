#include "runtime/core/values/authority.h"

#include <iterator>

#include "absl/strings/str_cat.h"

namespace gtrain::core {
namespace {

constexpr Scope kNone = Scope::kNone, kOwn = Scope::kOwn, kAll = Scope::kAll;

// In the order of ClientRequestBody.
constexpr RequestRule kRequests[] = {
    // name          changes  admin  user   readonly
    {"submit", true, kAll, kOwn, kNone},        {"stop", true, kAll, kOwn, kNone},
    {"status", false, kAll, kOwn, kAll},  // the list of all jobs, without their output, is for everyone
    {"why", false, kAll, kOwn, kAll},           {"nodes", false, kAll, kAll, kAll},
    {"logs", false, kAll, kOwn, kAll},          {"exec", true, kAll, kOwn, kNone},
    {"events", false, kAll, kOwn, kAll},        {"shutdown", true, kAll, kNone, kNone},
    {"token create", true, kAll, kNone, kNone}, {"token ls", false, kAll, kNone, kNone},
    {"token revoke", true, kAll, kNone, kNone}, {"user add", true, kAll, kNone, kNone},
    {"user ls", false, kAll, kNone, kNone},     {"user revoke", true, kAll, kNone, kNone},
    {"node revoke", true, kAll, kNone, kNone},  {"backup", true, kAll, kNone, kNone},
    {"node drain", true, kAll, kNone, kNone},   {"stack", true, kAll, kOwn, kNone},
    {"scale", true, kAll, kOwn, kNone},         {"console", true, kAll, kOwn, kNone},
};
static_assert(std::size(kRequests) == std::variant_size_v<ClientRequestBody>,
              "a client request has no rule: who may make it?");

enum class Sender { kNode, kClient, kJoin, kHead };

// In the order of Message.
constexpr Sender kSenders[] = {
    Sender::kNode,    // AgentHello
    Sender::kNode,    // AgentHeartbeat
    Sender::kNode,    // RanksStarted
    Sender::kNode,    // RankExited
    Sender::kNode,    // GenerationGone
    Sender::kNode,    // ExchangePart
    Sender::kNode,    // CheckpointReport
    Sender::kNode,    // LogTail
    Sender::kNode,    // AgentNote
    Sender::kNode,    // AgentAnswer
    Sender::kHead,    // AgentWelcome
    Sender::kHead,    // AgentRefused
    Sender::kHead,    // HeartbeatAck
    Sender::kHead,    // StartGeneration
    Sender::kHead,    // Revoke
    Sender::kHead,    // AckExit
    Sender::kHead,    // ExchangeTable
    Sender::kHead,    // ForgetJob
    Sender::kHead,    // NoticeRanks
    Sender::kHead,    // AgentQuery
    Sender::kHead,    // AgentShutdown
    Sender::kJoin,    // AgentJoin
    Sender::kHead,    // AgentJoined
    Sender::kClient,  // ClientRequest
    Sender::kHead,    // ClientReply
    Sender::kNode,    // GenerationDescribed
    Sender::kNode,    // NoticeSeen
    Sender::kHead,    // AckNotice
    Sender::kHead,    // ExchangeMissing
    Sender::kNode,    // LinkDown
    Sender::kHead,    // KeepCopies
    Sender::kHead,    // RanksLeft
};
static_assert(std::size(kSenders) == std::variant_size_v<Message>, "a message has no sender");

}  // namespace

Scope RequestRule::Of(Role role) const {
  switch (role) {
    case Role::kAdmin:
      return admin;
    case Role::kUser:
      return user;
    case Role::kReadOnly:
      return readonly;
    case Role::kNode:
    case Role::kJoin:
      return Scope::kNone;
  }
  return Scope::kNone;
}

const RequestRule& RuleOf(const ClientRequestBody& body) {
  static constexpr RequestRule kUndrain = {"node undrain", true, kAll, kNone, kNone};
  const auto* drain = std::get_if<ClientDrainNode>(&body);
  return drain != nullptr && drain->undo ? kUndrain : kRequests[body.index()];
}

std::string ReasonOf(const ClientRequestBody& body) {
  constexpr size_t kReasonBytesMax = 1 << 10;
  if (const auto* drain = std::get_if<ClientDrainNode>(&body))
    return drain->reason.substr(0, kReasonBytesMax);
  if (const auto* revoke = std::get_if<ClientRevokeNode>(&body))
    return revoke->reason.substr(0, kReasonBytesMax);
  return "";
}

bool MaySend(Role role, const Message& message) {
  switch (kSenders[message.index()]) {
    case Sender::kNode:
      return role == Role::kNode;
    case Sender::kJoin:
      return role == Role::kJoin;
    case Sender::kClient:
      return role == Role::kAdmin || role == Role::kUser || role == Role::kReadOnly;
    case Sender::kHead:
      return false;
  }
  return false;
}

std::string OwnerName(const Peer& peer) { return peer.name.empty() ? peer.key_id : peer.name; }

absl::Status Authorize(const Peer& peer, const ClientRequestBody& body, const std::string* owner) {
  const RequestRule& rule = RuleOf(body);
  switch (rule.Of(peer.role)) {
    case Scope::kAll:
      return absl::OkStatus();
    case Scope::kOwn:
      if (owner == nullptr || *owner == OwnerName(peer)) return absl::OkStatus();
      return absl::PermissionDeniedError(
          absl::StrCat("the job belongs to ", *owner, ": ", rule.name, " is for its owner and for admins"));
    case Scope::kNone:
      break;
  }
  if (peer.role == Role::kNode || peer.role == Role::kJoin) {
    return absl::PermissionDeniedError("the key of a node may not make client requests");
  }
  if (peer.role == Role::kReadOnly && rule.user != Scope::kNone) {
    return absl::PermissionDeniedError("this key may only read; use a user key to change anything");
  }
  return absl::PermissionDeniedError(absl::StrCat(rule.name, " needs the admin key of the cluster"));
}

}  // namespace gtrain::core
