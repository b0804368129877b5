// Private to net/zmq: owners of ZeroMQ's handles, and the socket options both ends share.
#pragma once
#include <zmq.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/unique_fd.h"
#include "net/zmq/ingress.h"
#include "net/zmq/keys.h"

namespace gtrain::net {

// Debian's zmq.h hides it among the drafts, its library knows it.
inline constexpr int kZapEnforceDomain = 93;
inline constexpr char kZapDomain[] = "gtrain";

struct CloseSocket {
  void operator()(void* socket) const { zmq_close(socket); }
};
using Socket = std::unique_ptr<void, CloseSocket>;
struct TermContext {
  void operator()(void* context) const {
    while (zmq_ctx_term(context) != 0 && errno == EINTR) {
    }
  }
};
using Context = std::unique_ptr<void, TermContext>;

absl::Status ZmqStatus(absl::string_view what);  // from zmq_errno()

bool SetInt(void* socket, int option, int value);
bool SetInt64(void* socket, int option, int64_t value);
bool SetText(void* socket, int option, absl::string_view value);
int GetInt(void* socket, int option);

struct CommonOptions {
  int64_t message_bytes_max;
  int queue_messages_max;
  int handshake_ms;
  int linger_ms;
};
// Limits, HWM, and that a connection whose other machine is gone ends after 4 s. False: the library refused
// one.
bool SetCommon(void* socket, const CommonOptions& options);

// One complete message, of which at most `keep` frames. nullopt: nothing there (or the context ends).
std::optional<Frames> ReceiveFrames(void* socket, size_t keep);

// Numeric address of the TCP peer of a descriptor; "" when it has none (any more).
std::string PeerAddress(int fd);
// Ends a connection that ZeroMQ owns, from outside: it sees the end of the stream and cleans up. Descriptors
// are reused, so nothing happens unless the peer is still at `address`; at worst another connection of that
// address is made again.
void CutConnection(int fd, absl::string_view address);

// Events of a socket, read through a PAIR. StopMonitor must come before the PAIR is closed: without a
// reader the next event would hold ZeroMQ's I/O thread for ever.
void StopMonitor(void* socket);
Socket OpenMonitor(void* context, void* socket, const std::string& name);
struct MonitorEvent {
  int event = 0;
  uint32_t value = 0;
  std::string address;
};
std::optional<MonitorEvent> ReadMonitor(void* monitor);

// A ZMQ_FD only says "look again", and using the socket clears it. This keeps a descriptor for poll()
// that stays readable until Receive has found nothing, whatever was sent in between.
class Wakeup {
 public:
  bool Init(const std::vector<void*>& sockets);
  int fd() const { return epoll_.get(); }
  void Raise();  // the owner should look again
  void Clear();  // the owner has looked and found nothing

 private:
  UniqueFd epoll_;
  UniqueFd again_;  // eventfd
  bool raised_ = false;
};

struct HostPort {
  std::string host;  // without brackets
  int port = 0;
  bool v6 = false;
};
std::optional<HostPort> SplitHostPort(absl::string_view endpoint);

}  // namespace gtrain::net
