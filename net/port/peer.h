// The peers at the other end of a connection of the control plane.
#pragma once
#include <compare>
#include <string>

namespace gtrain::net {

// kJoin: the one-use key inside a join token; it may send AgentJoin and nothing else.
enum class Role { kAdmin, kUser, kNode, kReadOnly, kJoin };

// The peer at the other end of a connection, according to its CURVE key.
struct Peer {
  Role role = Role::kReadOnly;
  std::string key_id;  // 16 hex digits of the key's hash: a NodeId for nodes, a ClientId otherwise
  std::string name;    // of its line in the list of allowed keys; may be empty
  auto operator<=>(const Peer&) const = default;
};

}  // namespace gtrain::net
