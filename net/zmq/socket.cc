#include "net/zmq/socket.h"

#include <netdb.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace gtrain::net {

absl::Status ZmqStatus(absl::string_view what) {
  return absl::InternalError(absl::StrCat(what, ": ", zmq_strerror(zmq_errno())));
}

bool SetInt(void* socket, int option, int value) {
  return zmq_setsockopt(socket, option, &value, sizeof(value)) == 0;
}
bool SetInt64(void* socket, int option, int64_t value) {
  return zmq_setsockopt(socket, option, &value, sizeof(value)) == 0;
}
bool SetText(void* socket, int option, absl::string_view value) {
  std::string text(value);  // Z85 keys are told from binary ones by their length with the final NUL
  bool is_key =
      option == ZMQ_CURVE_SERVERKEY || option == ZMQ_CURVE_PUBLICKEY || option == ZMQ_CURVE_SECRETKEY;
  return zmq_setsockopt(socket, option, text.c_str(), text.size() + (is_key ? 1 : 0)) == 0;
}
int GetInt(void* socket, int option) {
  int value = 0;
  size_t size = sizeof(value);
  return zmq_getsockopt(socket, option, &value, &size) == 0 ? value : -1;
}

// The kernel asks whether the other machine is still there, and wakes nobody for it: probes while nothing is
// said (tcp(7), TCP_KEEPIDLE), and a limit for what is not acknowledged (TCP_USER_TIMEOUT).
bool SetCommon(void* socket, const CommonOptions& o) {
  constexpr int kSilenceS = 2;
  constexpr int kLostAfterS = 4;
  constexpr int64_t kEnvelope =
      64;  // what is counted is the message as it is encrypted, which is 33 bytes longer
  return SetInt64(socket, ZMQ_MAXMSGSIZE, o.message_bytes_max + kEnvelope) &&
         SetInt(socket, ZMQ_HANDSHAKE_IVL, o.handshake_ms) && SetInt(socket, ZMQ_TCP_KEEPALIVE, 1) &&
         SetInt(socket, ZMQ_TCP_KEEPALIVE_IDLE, kSilenceS) && SetInt(socket, ZMQ_TCP_KEEPALIVE_INTVL, 1) &&
         SetInt(socket, ZMQ_TCP_KEEPALIVE_CNT, kLostAfterS - kSilenceS) &&
         SetInt(socket, ZMQ_TCP_MAXRT, 1000 * kLostAfterS) &&
         SetInt(socket, ZMQ_SNDHWM, o.queue_messages_max) &&
         SetInt(socket, ZMQ_RCVHWM, o.queue_messages_max) && SetInt(socket, ZMQ_LINGER, o.linger_ms);
}

namespace {

class Part {
 public:
  Part() { zmq_msg_init(&message_); }
  ~Part() { zmq_msg_close(&message_); }
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;
  bool Receive(void* socket) {
    int rc;
    while ((rc = zmq_msg_recv(&message_, socket, ZMQ_DONTWAIT)) < 0 && zmq_errno() == EINTR) {
    }
    return rc >= 0;
  }
  bool more() { return zmq_msg_more(&message_) != 0; }
  std::string text() {
    return std::string(static_cast<const char*>(zmq_msg_data(&message_)), zmq_msg_size(&message_));
  }
  int SourceFd() { return zmq_msg_get(&message_, ZMQ_SRCFD); }
  std::string Property(const char* name) {
    const char* value = zmq_msg_gets(&message_, name);
    return value == nullptr ? "" : value;
  }

 private:
  zmq_msg_t message_;
};

}  // namespace

std::optional<Frames> ReceiveFrames(void* socket, size_t keep) {
  Frames result;
  while (true) {
    Part part;
    if (!part.Receive(socket)) return std::nullopt;  // only before the first frame: messages arrive whole
    ++result.count;
    if (result.frames.size() < keep) {
      result.frames.push_back(part.text());
      result.user_id = part.Property("User-Id");
      result.peer_address = part.Property("Peer-Address");
      result.fd = part.SourceFd();
    }
    if (!part.more()) return result;
  }
}

std::string PeerAddress(int fd) {
  sockaddr_storage peer = {};
  socklen_t size = sizeof(peer);
  char text[NI_MAXHOST] = "";
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0 || peer.ss_family == AF_UNIX ||
      getnameinfo(reinterpret_cast<sockaddr*>(&peer), size, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) !=
          0) {
    return "";
  }
  return std::string(absl::StripPrefix(text, "::ffff:"));
}

void CutConnection(int fd, absl::string_view address) {
  if (fd >= 0 && !address.empty() && PeerAddress(fd) == address) shutdown(fd, SHUT_RDWR);
}

void StopMonitor(void* socket) { zmq_socket_monitor(socket, nullptr, 0); }

Socket OpenMonitor(void* context, void* socket, const std::string& name) {
  std::string endpoint = absl::StrCat("inproc://", name);
  if (zmq_socket_monitor(socket, endpoint.c_str(), ZMQ_EVENT_ALL) != 0) return nullptr;
  Socket monitor(zmq_socket(context, ZMQ_PAIR));
  // Unlimited: a full queue would make ZeroMQ's I/O thread wait for us.
  if (!monitor || !SetInt(monitor.get(), ZMQ_RCVHWM, 0) || !SetInt(monitor.get(), ZMQ_LINGER, 0) ||
      zmq_connect(monitor.get(), endpoint.c_str()) != 0) {
    return nullptr;
  }
  return monitor;
}

std::optional<MonitorEvent> ReadMonitor(void* monitor) {
  std::optional<Frames> frames = ReceiveFrames(monitor, 2);
  if (!frames || frames->count != 2 || frames->frames[0].size() != 6) return std::nullopt;
  MonitorEvent event;
  uint16_t number;
  std::memcpy(&number, frames->frames[0].data(), sizeof(number));
  std::memcpy(&event.value, frames->frames[0].data() + 2, sizeof(event.value));
  event.event = number;
  event.address = frames->frames[1];
  return event;
}

bool Wakeup::Init(const std::vector<void*>& sockets) {
  epoll_.reset(epoll_create1(EPOLL_CLOEXEC));
  again_.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_.valid() || !again_.valid()) return false;
  std::vector<int> fds = {again_.get()};
  for (void* socket : sockets) fds.push_back(GetInt(socket, ZMQ_FD));
  for (int fd : fds) {
    epoll_event event{.events = EPOLLIN, .data = {.fd = fd}};
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return false;
  }
  Raise();
  return true;
}

void Wakeup::Raise() {
  if (raised_) return;
  raised_ = true;
  uint64_t one = 1;
  (void)!write(again_.get(), &one, sizeof(one));
}

void Wakeup::Clear() {
  if (!raised_) return;
  raised_ = false;
  uint64_t drained;
  (void)!read(again_.get(), &drained, sizeof(drained));
}

std::optional<HostPort> SplitHostPort(absl::string_view endpoint) {
  size_t colon = endpoint.rfind(':');
  HostPort result;
  if (colon == absl::string_view::npos) return std::nullopt;
  const absl::string_view port = endpoint.substr(colon + 1);
  // Digits alone: a number with blanks around it or a sign is none to the library below.
  if (port.find_first_not_of("0123456789") != absl::string_view::npos ||
      !absl::SimpleAtoi(port, &result.port) || result.port > 65535) {
    return std::nullopt;
  }
  absl::string_view host = endpoint.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
    result.v6 = true;
  }
  bool colons = host.find(':') != absl::string_view::npos;
  if (host.empty() || colons != result.v6 || host.find_first_of("/ ;") != absl::string_view::npos)
    return std::nullopt;
  result.host = std::string(host);
  return result;
}

}  // namespace gtrain::net
