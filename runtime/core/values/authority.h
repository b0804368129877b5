// Who may do what (the table is message_table.h). PURE. Requests that are not listed are refused (faults X5,
// B8).
//
// The role comes from the key of the connection. A rank has no key here: it asks its keeper, with the token
// of its generation.
#pragma once
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "runtime/core/values/message_table.h"

namespace gtrain::core {

const RequestRule& RuleOf(const ClientRequestBody& body);

// The reason that the client gives, for the audit log; at most 1 KiB of it.
std::string ReasonOf(const ClientRequestBody& body);

// The kind of peer on a connection with a key of this role.
Sender SenderOf(Role role);

// Whether a peer of this role may send such a message to the head at all.
bool MaySend(Role role, const Message& message);

// The name under which a peer owns jobs: that of its key, else the key itself.
std::string OwnerName(const Peer& peer);

// PermissionDenied says what would be needed. `owner` is that of the job the request names; nullptr: it names
// none, or none that exists.
absl::Status Authorize(const Peer& peer, const ClientRequestBody& body, const std::string* owner);

}  // namespace gtrain::core
