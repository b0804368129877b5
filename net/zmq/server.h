// ServerTransport over ZeroMQ: one ROUTER socket with CURVE, a ZAP handler that runs before anything
// is bound, and a proof at start that a random key is refused (faults X2, X3, B1-B5, W7, W11).
//
// Owner thread only, as the port says; counters() and the registry are thread-safe. One more thread
// answers ZAP questions and reads the socket's monitor.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "net/port/transport.h"
#include "net/zmq/key_registry.h"
#include "net/zmq/keys.h"

namespace gtrain::net {

struct ServerOptions {
  std::vector<std::string>
      listen;  // numeric "address:port"; "[v6]:port"; port 0 = any free; "*" = all addresses
  KeyPair keys;
  std::shared_ptr<KeyRegistry> registry;
  std::shared_ptr<const Clock> clock;
  int64_t message_bytes_max =
      port::kToServerBytesMax;        // a larger frame closes the connection before it is read
  int64_t send_bytes_max = 16 << 20;  // what clients accept
  int queue_messages_max = 10'000;    // a peer, each way
  absl::Duration handshake_limit = absl::Seconds(5);
  int connections_per_address_max = 4096;  // further ones are closed at once (fault B4)
  // The limit of all addresses together; further connections are closed at once, too. Whatever it says, up to
  // 2,048 descriptors of the process, or half of them, are left to its own files: strangers with many
  // addresses must not end a head whose store opens its next file.
  int connections_max = 1 << 20;
};

struct ServerCounters {
  uint64_t accepted = 0;       // TCP connections
  uint64_t authenticated = 0;  // of these, with an allowed key
  uint64_t denied = 0;         // keys that are not in the registry
  uint64_t over_limit = 0;     // cut: its address had too many
  // The rest: not our protocol, no key, wrong server key, too slow, or still shaking hands. ZeroMQ reports
  // only some of these, so this is what is left of `accepted`.
  uint64_t bad_handshakes = 0;
  uint64_t bad_frames = 0;       // messages that are not exactly one frame
  uint64_t revoked_dropped = 0;  // messages of a key that was allowed when it connected but is no longer
};

class ZmqServer final : public port::ServerTransport {
 public:
  // Binds and starts. FailedPrecondition: a random key was let in (or nothing could be proved); nothing
  // stays bound then. AlreadyExists: the port is in use, with the owner's pid if it can be seen.
  static absl::StatusOr<std::unique_ptr<ZmqServer>> Start(ServerOptions options);
  ~ZmqServer() override;  // gives unsent messages half a second

  absl::Status Send(const port::Route& route, absl::string_view payload) override;
  std::optional<port::Received> Receive() override;
  int PollFd() const override;

  // The addresses that were bound, "127.0.0.1:43211", in the order of ServerOptions::listen.
  const std::vector<std::string>& endpoints() const;
  ServerCounters counters() const;

 private:
  struct State;
  explicit ZmqServer(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// "pid 4711 (python3)" of the process that listens on a local TCP port, "" if it cannot be seen (fault W16).
std::string OwnerOfPort(int port);

}  // namespace gtrain::net
