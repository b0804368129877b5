#include "runtime/core/values/authority.h"

#include <type_traits>
#include <variant>

#include "absl/strings/str_cat.h"

namespace gtrain::core {
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
  static constexpr RequestRule kUndrain = {"node undrain", true, Scope::kAll, Scope::kNone, Scope::kNone};
  const auto* drain = std::get_if<ClientDrainNode>(&body);
  if (drain != nullptr && drain->undo) return kUndrain;
  return std::visit(
      [](const auto& request) -> const RequestRule& { return kRuleOf<std::decay_t<decltype(request)>>; },
      body);
}

std::string ReasonOf(const ClientRequestBody& body) {
  constexpr size_t kReasonBytesMax = 1 << 10;
  if (const auto* drain = std::get_if<ClientDrainNode>(&body))
    return drain->reason.substr(0, kReasonBytesMax);
  if (const auto* revoke = std::get_if<ClientRevokeNode>(&body))
    return revoke->reason.substr(0, kReasonBytesMax);
  return "";
}

Sender SenderOf(Role role) {
  switch (role) {
    case Role::kNode:
      return Sender::kAgent;
    case Role::kJoin:
      return Sender::kJoiner;
    case Role::kAdmin:
    case Role::kUser:
    case Role::kReadOnly:
      return Sender::kClient;
  }
  return Sender::kAny;  // which sends no message
}

bool MaySend(Role role, const Message& message) {
  return std::visit([&](const auto& m) { return kSenderOf<std::decay_t<decltype(m)>> == SenderOf(role); },
                    message);
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
