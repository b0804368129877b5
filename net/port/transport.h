// Port: authenticated, encrypted, message-oriented connections of the control plane.
// Adapter: net/zmq. Payloads are opaque bytes (runtime/wire makes and reads them).
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "net/port/peer.h"

namespace gtrain::port {

// The longest message that a server reads. A peer that sends a longer one loses its connection, with all that
// is on its way there, and again when it says it anew: so a client refuses to send it.
inline constexpr int64_t kToServerBytesMax = 4 << 20;

// One connection as the server sees it. A reconnecting peer gets a new route; the
// caller keeps "newest route of this key" itself, after a hello.
struct Route {
  std::string id;  // opaque; never chosen by the peer
  auto operator<=>(const Route&) const = default;
};

struct Received {
  net::Peer peer;  // from the connection's key
  Route route;
  std::string address;  // numeric address of the peer's socket
  std::string payload;
};

// Owner thread only. Send and Receive never block.
class ServerTransport {
 public:
  virtual ~ServerTransport() = default;
  // Unavailable: the route is gone (EHOSTUNREACH). ResourceExhausted: its queue is full. The caller
  // treats both as a lost connection of that peer.
  virtual absl::Status Send(const Route& route, absl::string_view payload) = 0;
  virtual std::optional<Received> Receive() = 0;
  // Readable when Receive may have something; stays so until Receive has returned nullopt.
  virtual int PollFd() const = 0;
};

// Owner thread only. Send and Receive never block; reconnects by itself with jitter.
class ClientTransport {
 public:
  virtual ~ClientTransport() = default;
  // Unavailable while not connected. ResourceExhausted: its queue is full, and this message is lost though
  // the connection lives. InvalidArgument: too long.
  virtual absl::Status Send(absl::string_view payload) = 0;
  virtual std::optional<std::string> Receive() = 0;
  // Each lost connection shows as false at least once, however fast the next one came, so a peer that says
  // hello after every change to true does so on every connection.
  virtual bool Connected() const = 0;
  virtual int PollFd() const = 0;
};

}  // namespace gtrain::port
