// A blocking client of the head, for the command line and tests.
// Not thread-safe; every call has a deadline.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/rng.h"
#include "net/zmq/client.h"
#include "runtime/core/values/messages.h"
#include "runtime/core/values/request_pacer.h"

namespace gtrain::net {

class ControlClient {
 public:
  // `ask_every` and `answer_within` of the options are its own: a head that stands still is noticed after 3
  // to 6 s.
  static absl::StatusOr<std::unique_ptr<ControlClient>> Connect(ClientOptions options);

  // Sends the request and waits for its reply, repeating it under the same id after a lost connection or
  // a long silence; the head executes it once (fault H15). `request.id` is filled in when
  // empty, `request.deadline` always. A reply with ok = false is returned as it is, but that of a head that
  // has too much to read out just now, only when it is still so at the end. DeadlineExceeded: no reply in
  // time (the request may or may not have been executed: repeat it with the same id to find out).
  // PermissionDenied: the head does not know this key, or is not the head we know. Cancelled: `interrupt_fd`
  // became readable. `waited`: in vain, by an earlier call with the same id; for the error's words alone.
  absl::StatusOr<core::ClientReply> Call(core::ClientRequest request, absl::Duration timeout,
                                         absl::Duration waited = absl::ZeroDuration());
  absl::StatusOr<core::ClientReply> Call(core::ClientRequestBody body, absl::Duration timeout);

  // Makes several calls that are under way together: one way there and back instead of one each. One answer a
  // request, in order. An interrupt ends those that still wait.
  std::vector<absl::StatusOr<core::ClientReply>> CallAll(std::vector<core::ClientRequest> requests,
                                                         absl::Duration timeout,
                                                         absl::Duration waited = absl::ZeroDuration());

  // A descriptor (self-pipe of a signal handler) that ends a waiting Call when readable; -1 = none.
  void set_interrupt_fd(int fd) { interrupt_fd_ = fd; }

  // Work that goes on while a Call waits: `step` is called at `at` and says when it is called again; between
  // two steps there is always a look at the head and at `interrupt_fd`. An error of it ends the Call. It may
  // not Call.
  struct Aside {
    Instant at;
    std::function<absl::StatusOr<Instant>()> step;
  };
  void set_aside(std::optional<Aside> aside) { aside_ = std::move(aside); }

 private:
  struct Waiting {
    size_t index = 0;
    core::ClientRequest request;
    std::optional<core::RequestPacer> pacer;
    std::string late;                       // the head's word that the time was over
    std::optional<core::ClientReply> busy;  // its newest word that it had no room
    absl::Status refused;                   // too large to be sent
  };
  explicit ControlClient(std::unique_ptr<ZmqClient> transport);
  void TakeReplies(std::vector<Waiting>* waiting, std::vector<absl::StatusOr<core::ClientReply>>* replies);
  // Waits until there is news from the head or the interrupt, at most `limit`, or a step of the work aside
  // was done.
  absl::Status Wait(absl::Duration limit);

  std::unique_ptr<ZmqClient> transport_;
  RealClock clock_;
  Rng rng_;
  int interrupt_fd_ = -1;
  std::optional<Aside> aside_;
};

// Registers `node_public_key` with the cluster of a join token (fault X2: the only way in without an admin).
// PermissionDenied: the token is spent, expired or of another head.
absl::StatusOr<core::AgentJoined> JoinCluster(const JoinToken& token, absl::string_view node_public_key,
                                              absl::string_view hostname, absl::Duration timeout);
// Whether the head lets these keys in: those of a node whose join was done and whose answer was lost, when
// its token is used up. Blocks for at most `timeout`.
bool IsLetIn(const JoinToken& token, const KeyPair& keys, absl::Duration timeout);

// 128 random bits in hex, for ClientRequest::id.
std::string NewRequestId();

}  // namespace gtrain::net
