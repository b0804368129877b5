// Order at start: context, ZAP thread, ROUTER with every limit, proof over an abstract unix socket that
// a random key is refused, and only then the real addresses. Routing ids are ZeroMQ's own automatic ones,
// never set by a peer of ours and never handed over, so a second connection of one key cannot take the first
// one's messages.
#include "net/zmq/server.h"

#include <netdb.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <climits>
#include <cstring>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "net/zmq/socket.h"
#include "net/zmq/zap.h"

namespace gtrain::net {

struct ZmqServer::State {
  explicit State(ServerOptions o) : options(std::move(o)) {}
  ~State() {
    if (router) StopMonitor(router.get());
    router.reset();  // unsent messages go on for LINGER
    if (context) zmq_ctx_shutdown(context.get());
    gate.reset();
    // ~Context waits for the rest
  }

  const ServerOptions options;
  Context context;
  Socket router;
  std::unique_ptr<Gate> gate;
  Wakeup wakeup;
  std::vector<std::string> endpoints;
  std::atomic<uint64_t> bad_frames{0};
  std::atomic<uint64_t> revoked_dropped{0};
};

namespace {

// Fault B4: whatever the limits say, one address never holds more than a quarter of the descriptors, and all
// together leave some to the process itself.
ConnectionLimits LimitsFor(const ServerOptions& o) {
  constexpr rlim_t kOwnFiles = 2048;
  rlimit files = {};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur == RLIM_INFINITY)
    return {o.connections_per_address_max, o.connections_max};
  const rlim_t descriptors = std::min<rlim_t>(files.rlim_cur, INT_MAX);
  const auto quarter = static_cast<int>(descriptors / 4);
  const auto others = static_cast<int>(descriptors - std::min(descriptors / 2, kOwnFiles));
  return {std::min(o.connections_per_address_max, std::max(16, quarter)),
          std::min(o.connections_max, std::max(16, others))};
}

absl::StatusOr<Socket> MakeRouter(void* context, const ServerOptions& o) {
  Socket router(zmq_socket(context, ZMQ_ROUTER));
  CommonOptions common{o.message_bytes_max, o.queue_messages_max,
                       static_cast<int>(absl::ToInt64Milliseconds(o.handshake_limit)), 500};
  bool ok = router && SetCommon(router.get(), common) && SetInt(router.get(), ZMQ_CURVE_SERVER, 1) &&
            SetText(router.get(), ZMQ_CURVE_SECRETKEY, o.keys.secret_key) &&
            SetText(router.get(), ZMQ_ZAP_DOMAIN, kZapDomain) && SetInt(router.get(), kZapEnforceDomain, 1) &&
            SetInt(router.get(), ZMQ_ROUTER_MANDATORY, 1) && SetInt(router.get(), ZMQ_BACKLOG, 1024);
  if (!ok) return ZmqStatus("cannot make the server socket");
  return router;
}

// Fault X2: without a working key check ZeroMQ lets every key in. Connects with a key nobody has allowed.
absl::Status ProveRefusal(void* context, void* router, const ServerOptions& o) {
  std::string address = absl::StrCat("ipc://@gtrain-proof-", RandomHex(16));
  if (zmq_bind(router, address.c_str()) != 0) return ZmqStatus("cannot bind the socket of the key proof");
  absl::Cleanup unbind = [&] { zmq_unbind(router, address.c_str()); };
  Socket probe(zmq_socket(context, ZMQ_DEALER));
  KeyPair random = MakeKeyPair();
  Socket monitor;
  absl::Cleanup stop_monitor = [&] {
    if (probe) StopMonitor(probe.get());
  };
  bool ok = probe && SetInt(probe.get(), ZMQ_LINGER, 0) &&
            SetText(probe.get(), ZMQ_CURVE_SERVERKEY, o.keys.public_key) &&
            SetText(probe.get(), ZMQ_CURVE_PUBLICKEY, random.public_key) &&
            SetText(probe.get(), ZMQ_CURVE_SECRETKEY, random.secret_key) &&
            (monitor = OpenMonitor(context, probe.get(), "proof-monitor")) != nullptr &&
            zmq_connect(probe.get(), address.c_str()) == 0;
  if (!ok) return ZmqStatus("cannot prove that unknown keys are refused");
  Instant deadline = o.clock->Now() + absl::Seconds(10);
  while (o.clock->Now() < deadline) {
    zmq_pollitem_t item = {monitor.get(), 0, ZMQ_POLLIN, 0};
    (void)zmq_poll(&item, 1, 100);
    while (std::optional<MonitorEvent> event = ReadMonitor(monitor.get())) {
      if (event->event == ZMQ_EVENT_HANDSHAKE_FAILED_AUTH) return absl::OkStatus();
      if (event->event == ZMQ_EVENT_HANDSHAKE_SUCCEEDED) {
        return absl::FailedPreconditionError(
            "refusing to serve: this ZeroMQ lets unknown keys in (fault X2)");
      }
    }
  }
  return absl::FailedPreconditionError(
      "refusing to serve: no proof within 10 s that unknown keys are refused");
}

// zmq_bind tells the monitor of its failure before it returns, and what that does may set errno anew (seen:
// EAGAIN for a port in use), so the kernel is asked once more what is wrong with the address.
int BindError(const HostPort& at, int reported) {
  addrinfo hints = {};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV | AI_PASSIVE;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(at.host.c_str(), absl::StrCat(at.port).c_str(), &hints, &found) != 0) return reported;
  absl::Cleanup release = [&] { freeaddrinfo(found); };
  UniqueFd fd(socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int yes = 1;
  if (!fd.valid() || setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes)) != 0) return reported;
  return bind(fd.get(), found->ai_addr, found->ai_addrlen) != 0 ? errno : reported;
}

absl::StatusOr<std::string> BindOne(void* router, const std::string& listen) {
  std::optional<HostPort> at = SplitHostPort(listen);
  if (!at)
    return absl::InvalidArgumentError(
        absl::StrCat("cannot listen on \"", listen, "\": expected address:port"));
  if (!SetInt(router, ZMQ_IPV6, at->v6 ? 1 : 0)) return ZmqStatus("IPv6");
  std::string port = at->port == 0 ? "*" : absl::StrCat(at->port);
  std::string host = at->v6 ? absl::StrCat("[", at->host, "]") : at->host;
  if (zmq_bind(router, absl::StrCat("tcp://", host, ":", port).c_str()) != 0) {
    const int error = BindError(*at, zmq_errno());
    if (error == EADDRINUSE) {
      std::string owner = OwnerOfPort(at->port);
      return absl::AlreadyExistsError(absl::StrCat("cannot listen on ", listen, ": the port is in use",
                                                   owner.empty() ? " by a process of another user" : " by ",
                                                   owner, "; choose another with --listen"));
    }
    return absl::InvalidArgumentError(absl::StrCat("cannot listen on ", listen, ": ", zmq_strerror(error),
                                                   "; give an address of this machine with --listen"));
  }
  char bound[256];
  size_t size = sizeof(bound);
  if (zmq_getsockopt(router, ZMQ_LAST_ENDPOINT, bound, &size) != 0) return ZmqStatus("last endpoint");
  return std::string(absl::StripPrefix(bound, "tcp://"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<ZmqServer>> ZmqServer::Start(ServerOptions options) {
  GT_CHECK(options.registry != nullptr && options.clock != nullptr);
  auto state = std::make_unique<State>(std::move(options));
  const ServerOptions& o = state->options;
  state->context.reset(zmq_ctx_new());
  void* context = state->context.get();
  if (context == nullptr) return ZmqStatus("context");
  zmq_ctx_set(context, ZMQ_MAX_SOCKETS, 64);
  GT_ASSIGN_OR_RETURN(state->router, MakeRouter(context, o));
  Socket monitor = OpenMonitor(context, state->router.get(), "server-monitor");
  if (!monitor) return ZmqStatus("cannot watch the server socket");
  GT_ASSIGN_OR_RETURN(state->gate,
                      Gate::Start(context, std::move(monitor), o.registry, o.clock, LimitsFor(o)));
  GT_RETURN_IF_ERROR(ProveRefusal(context, state->router.get(), o));
  state->gate->StartCounting();
  for (const std::string& listen : o.listen) {
    GT_ASSIGN_OR_RETURN(std::string bound, BindOne(state->router.get(), listen));
    state->endpoints.push_back(std::move(bound));
  }
  if (!state->wakeup.Init({state->router.get()}))
    return absl::InternalError("cannot make the wake-up descriptor");
  return std::unique_ptr<ZmqServer>(new ZmqServer(std::move(state)));
}

ZmqServer::ZmqServer(std::unique_ptr<State> state) : state_(std::move(state)) {}
ZmqServer::~ZmqServer() = default;

absl::Status ZmqServer::Send(const port::Route& route, absl::string_view payload) {
  if (static_cast<int64_t>(payload.size()) > state_->options.send_bytes_max) {
    return absl::InvalidArgumentError(absl::StrCat("message of ", payload.size(), " bytes is too large"));
  }
  state_->wakeup.Raise();  // sending may use up the readiness of the socket's own descriptor
  void* router = state_->router.get();
  if (zmq_send(router, route.id.data(), route.id.size(), ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0) {
    if (zmq_errno() == EAGAIN) return absl::ResourceExhaustedError("the peer does not take its messages");
    return absl::UnavailableError(absl::StrCat("the peer is gone: ", zmq_strerror(zmq_errno())));
  }
  if (zmq_send(router, payload.data(), payload.size(), ZMQ_DONTWAIT) < 0) {
    return absl::UnavailableError(absl::StrCat("the peer is gone: ", zmq_strerror(zmq_errno())));
  }
  return absl::OkStatus();
}

std::optional<port::Received> ZmqServer::Receive() {
  while (std::optional<Frames> message = ReceiveFrames(state_->router.get(), 2)) {
    const int fd = message->fd;
    const std::string address = message->peer_address;
    Drop drop;
    if (auto received =
            Admit(*std::move(message), *state_->options.registry, state_->options.clock->Now(), &drop)) {
      return received;
    }
    if (drop == Drop::kBadFrames) {
      ++state_->bad_frames;
    } else {
      ++state_->revoked_dropped;
      CutConnection(fd, PlainAddress(address));
    }
  }
  state_->wakeup.Clear();
  return std::nullopt;
}

int ZmqServer::PollFd() const { return state_->wakeup.fd(); }
const std::vector<std::string>& ZmqServer::endpoints() const { return state_->endpoints; }

ServerCounters ZmqServer::counters() const {
  const GateCounters& gate = state_->gate->counters();
  ServerCounters counters{.accepted = gate.accepted,
                          .authenticated = gate.authenticated,
                          .denied = gate.denied,
                          .over_limit = gate.over_limit,
                          .bad_frames = state_->bad_frames,
                          .revoked_dropped = state_->revoked_dropped};
  const uint64_t explained = counters.authenticated + counters.denied + counters.over_limit;
  counters.bad_handshakes = counters.accepted > explained ? counters.accepted - explained : 0;
  return counters;
}

}  // namespace gtrain::net
