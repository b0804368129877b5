// ClientTransport over ZeroMQ: one DEALER socket with CURVE, pinned to the server's public key.
// Owner thread only. Reconnects by itself with growing, jittered pauses (0.1 s to 2 s) and looks the host
// name up again each time (faults W7, W12, W13, W15).
#pragma once
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "net/port/transport.h"
#include "net/zmq/keys.h"

namespace gtrain::net {

// The threads and descriptors that a process with many clients shares (a simulation of many agents). Lives as
// long as a client uses it; thread-safe.
std::shared_ptr<void> MakeClientContext(int clients_max);

// "host:port" or "[v6]:port" of one server, as Connect takes it. Whether the host exists is another matter.
bool ValidServerAddress(absl::string_view endpoint);

struct ClientOptions {
  std::string endpoint;           // "host:port", "[v6]:port"
  std::string server_public_key;  // Z85; anyone else at that address is refused
  KeyPair keys;
  int64_t message_bytes_max = 16 << 20;  // that come
  int64_t send_bytes_max = port::kToServerBytesMax;
  int queue_messages_max = 10'000;
  std::shared_ptr<void> context;  // empty: one of its own
  // How often a silent server is asked whether it still runs, while its machine answers, and how long its
  // answer may take before the connection is given up. Each question wakes both ends, so a client that stays
  // for days, like an agent, asks seldom.
  absl::Duration ask_every = absl::Seconds(10);
  absl::Duration answer_within = absl::Seconds(5);
  absl::Duration handshake_limit = absl::Seconds(5);  // then the next connection is tried
};

class ZmqClient final : public port::ClientTransport {
 public:
  // Does not wait for the connection: look at Connected(). InvalidArgument for a bad endpoint or key.
  static absl::StatusOr<std::unique_ptr<ZmqClient>> Connect(const ClientOptions& options);
  ~ZmqClient() override;  // gives unsent messages one second

  absl::Status Send(absl::string_view payload) override;
  std::optional<std::string> Receive() override;
  // Each lost connection shows as false at least once, however fast the next one came, so a peer that says
  // hello after every change to true does so on every connection. PollFd() stays readable until a change was
  // returned here.
  bool Connected() const override;
  int PollFd() const override;

  // Why there is no connection: OK, Unavailable (nobody listens), DeadlineExceeded (who listens does not
  // answer) or PermissionDenied (the server does not know our key, or is not the server we know).
  absl::Status status() const;
  // The server at the other end has just said that our key may not connect.
  bool KeyRefused() const;

 private:
  struct State;
  explicit ZmqClient(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace gtrain::net
