// The two ends of the way through another agent, as the agent's shell opens them: the door of a relay, and
// the connection of a child. Files in the state directory remember the port of the one and the relay of the
// other over a restart. Owner thread only; blocks on these small files alone.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "net/zmq/key_registry.h"
#include "net/zmq/keys.h"
#include "runtime/agent/relay.h"
#include "runtime/agent/relayed_client.h"
#include "runtime/core/values/messages.h"

namespace gtrain::agent {

// Where children of this agent connect.
class RelayDoor {
 public:
  // Listens at `host` ("*", "10.0.0.2", "[v6]"), on the port of the last time if it is free; lets nobody in.
  static absl::StatusOr<std::unique_ptr<RelayDoor>> Open(const std::string& state_dir,
                                                         const std::string& host, const net::KeyPair& keys);
  // Whether an agent before this one had a door.
  static bool WasOpen(const std::string& state_dir);

  int port() const { return port_; }
  Relay& relay() { return *relay_; }
  // From now on these may come, and who has spoken within the last minute.
  void Admit(const std::vector<core::RelayChild>& children, Instant now);

 private:
  RelayDoor(std::shared_ptr<net::KeyRegistry> keys, std::unique_ptr<Relay> relay, int port)
      : keys_(std::move(keys)), relay_(std::move(relay)), port_(port) {}

  const std::shared_ptr<net::KeyRegistry> keys_;
  const std::unique_ptr<Relay> relay_;
  const int port_;
  std::map<NodeId, std::string> admitted_;
};

// The relay to be tried first after a start; nullopt: none, the head directly.
std::optional<core::ConnectVia> LoadVia(const std::string& state_dir);
void SaveVia(const std::string& state_dir, const std::optional<core::ConnectVia>& via);

// InvalidArgument: what a head said of the relay cannot be.
absl::StatusOr<std::unique_ptr<RelayedClient>> ConnectThrough(const core::ConnectVia& via, const NodeId& self,
                                                              const net::KeyPair& keys,
                                                              const std::string& head_public_key,
                                                              double jitter);

}  // namespace gtrain::agent
