#include "net/zmq/client.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/rng.h"
#include "net/zmq/socket.h"

namespace gtrain::net {

struct ZmqClient::State {
  ~State() {
    if (dealer) StopMonitor(dealer.get());
    monitor.reset();
    dealer.reset();  // the context waits for LINGER
  }
  void Update();        // reads the monitor
  bool Untold() const;  // the owner does not know yet what became of the connection
  void Retry();         // after a refusal

  std::shared_ptr<void> context;
  Socket dealer, monitor;
  Wakeup wakeup;
  int64_t message_bytes_max = 0, send_bytes_max = 0;
  std::string endpoint;
  bool connected = false;
  bool told = false;         // what Connected() said last
  bool lost_unseen = false;  // a connection was lost since Connected() last said so
  bool refused = false;      // the server said no to our key
  int bad_handshakes = 0;    // in a row: whoever listens there is not the server we know
  bool reached = false;      // somebody took the last connection, whatever they said
  RealClock clock;
  Rng rng = Rng::FromSystem();
  std::optional<Instant> retry_at;
  Instant refused_at;
};

constexpr absl::Duration kRefusedPause = absl::Seconds(1);
constexpr int kBadHandshakesMeanRefused = 3;  // one may be a server that is just ending

namespace {

// `value` is the errno of the end of a handshake. A server that refuses ends the connection; when a server
// stands still the kernel accepts the connection, and the handshake only runs out of time.
bool EndedByServer(uint32_t value) { return value == EPIPE || value == ECONNRESET; }

}  // namespace

void ZmqClient::State::Update() {
  while (std::optional<MonitorEvent> event = ReadMonitor(monitor.get())) {
    switch (event->event) {
      case ZMQ_EVENT_HANDSHAKE_SUCCEEDED:
        connected = true;
        refused = false;
        bad_handshakes = 0;
        break;
      case ZMQ_EVENT_HANDSHAKE_FAILED_AUTH:
        refused = true;
        refused_at = clock.Now();
        retry_at = clock.Now() + kRefusedPause * (0.75 + 0.5 * rng.Unit());
        break;
      case ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL:
        ++bad_handshakes;
        break;
      case ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        if (EndedByServer(event->value)) ++bad_handshakes;
        break;
      case ZMQ_EVENT_CONNECTED:
        reached = true;
        break;
      case ZMQ_EVENT_CLOSED:  // an attempt to connect
        reached = false;
        break;
      case ZMQ_EVENT_DISCONNECTED:
        if (connected) reached = false;
        lost_unseen |= connected;
        connected = false;
        break;
      default:
        break;
    }
  }
  Retry();
  if (Untold()) wakeup.Raise();
}

// Whatever call of ours read the monitor's event, the owner, who may have asked Connected() just before, must
// not sleep on it.
bool ZmqClient::State::Untold() const { return connected != told || lost_unseen; }

// ZeroMQ reconnects after every loss but one: a server that refused the key. The key may be put on the
// list at any time, so this asks again, as long as the owner looks at the connection.
void ZmqClient::State::Retry() {
  if (!retry_at || clock.Now() < *retry_at) return;
  retry_at.reset();
  const std::string url = absl::StrCat("tcp://", endpoint);
  zmq_disconnect(dealer.get(), url.c_str());
  if (zmq_connect(dealer.get(), url.c_str()) != 0) retry_at = clock.Now() + kRefusedPause;
}

std::shared_ptr<void> MakeClientContext(int clients_max) {
  constexpr int kSocketsEach = 3;  // the connection, its monitor's two ends
  std::shared_ptr<void> context(zmq_ctx_new(), TermContext());
  if (context != nullptr) zmq_ctx_set(context.get(), ZMQ_MAX_SOCKETS, kSocketsEach * clients_max + 16);
  return context;
}

namespace {

// Only clients ask: a server with thousands of them would have a timer for each, and ZeroMQ looks for a timer
// among all of them.
bool SetHeartbeat(void* dealer, const ClientOptions& options) {
  const auto ms = [](absl::Duration time) { return static_cast<int>(absl::ToInt64Milliseconds(time)); };
  return SetInt(dealer, ZMQ_HEARTBEAT_IVL, ms(options.ask_every)) &&
         SetInt(dealer, ZMQ_HEARTBEAT_TIMEOUT, ms(options.answer_within));
}

bool SetUp(void* dealer, const ClientOptions& options) {
  const int handshake_ms = static_cast<int>(absl::ToInt64Milliseconds(options.handshake_limit));
  const CommonOptions common{options.message_bytes_max, options.queue_messages_max, handshake_ms, 1000};
  return SetCommon(dealer, common) && SetInt(dealer, ZMQ_IMMEDIATE, 1) &&
         SetInt(dealer, ZMQ_RECONNECT_IVL, 100) && SetInt(dealer, ZMQ_RECONNECT_IVL_MAX, 2000) &&
         SetInt(dealer, ZMQ_CONNECT_TIMEOUT, 5000) && SetHeartbeat(dealer, options) &&
         SetText(dealer, ZMQ_CURVE_SERVERKEY, options.server_public_key) &&
         SetText(dealer, ZMQ_CURVE_PUBLICKEY, options.keys.public_key) &&
         SetText(dealer, ZMQ_CURVE_SECRETKEY, options.keys.secret_key);
}

}  // namespace

bool ValidServerAddress(absl::string_view endpoint) {
  constexpr size_t kHostBytesMax = 255;
  const std::optional<HostPort> at = SplitHostPort(endpoint);
  return at && at->port != 0 && at->host.size() <= kHostBytesMax &&
         std::all_of(at->host.begin(), at->host.end(), [&](char c) {
           return absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
                  absl::StrContains(at->v6 ? ":.%-_" : ".-_", c);
         });
}

absl::StatusOr<std::unique_ptr<ZmqClient>> ZmqClient::Connect(const ClientOptions& options) {
  std::optional<HostPort> at = SplitHostPort(options.endpoint);
  if (!at || !ValidServerAddress(options.endpoint)) {
    return absl::InvalidArgumentError(absl::StrCat("\"", options.endpoint, "\" is not host:port"));
  }
  for (const std::string* key :
       {&options.server_public_key, &options.keys.public_key, &options.keys.secret_key}) {
    if (!ValidKey(*key)) return absl::InvalidArgumentError("not a valid key of the head or of this machine");
  }
  static std::atomic<uint64_t> clients{0};  // names of monitors must differ within a context
  auto state = std::make_unique<State>();
  state->message_bytes_max = options.message_bytes_max;
  state->send_bytes_max = options.send_bytes_max;
  state->endpoint = options.endpoint;
  state->context = options.context != nullptr ? options.context : MakeClientContext(1);
  if (!state->context) return ZmqStatus("context");
  state->dealer.reset(zmq_socket(state->context.get(), ZMQ_DEALER));
  void* dealer = state->dealer.get();
  const bool numeric_v4 = at->host.find_first_not_of("0123456789.") == std::string::npos;
  if (dealer == nullptr || !SetUp(dealer, options) || !SetInt(dealer, ZMQ_IPV6, numeric_v4 ? 0 : 1))
    return ZmqStatus("cannot make the client socket");
  state->monitor = OpenMonitor(state->context.get(), dealer, absl::StrCat("client-monitor-", ++clients));
  if (!state->monitor) return ZmqStatus("cannot watch the client socket");
  if (!state->wakeup.Init({dealer, state->monitor.get()}))
    return absl::InternalError("cannot make the wake-up descriptor");
  if (zmq_connect(dealer, absl::StrCat("tcp://", options.endpoint).c_str()) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot connect to ", options.endpoint, ": ", zmq_strerror(zmq_errno())));
  }
  return std::unique_ptr<ZmqClient>(new ZmqClient(std::move(state)));
}

ZmqClient::ZmqClient(std::unique_ptr<State> state) : state_(std::move(state)) {}
ZmqClient::~ZmqClient() = default;

absl::Status ZmqClient::Send(absl::string_view payload) {
  if (static_cast<int64_t>(payload.size()) > state_->send_bytes_max) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a message of ", payload.size(), " bytes, and the head takes ", state_->send_bytes_max, " at most"));
  }
  state_->wakeup.Raise();  // sending may use up the readiness of the socket's own descriptor
  state_->Update();
  if (!state_->connected) return absl::UnavailableError(absl::StrCat("not connected to ", state_->endpoint));
  if (zmq_send(state_->dealer.get(), payload.data(), payload.size(), ZMQ_DONTWAIT) >= 0) {
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError("the head does not take our messages");
}

std::optional<std::string> ZmqClient::Receive() {
  state_->Update();
  while (std::optional<Frames> message = ReceiveFrames(state_->dealer.get(), 1)) {
    if (message->count == 1) return std::move(message->frames[0]);
  }
  if (!state_->Untold()) state_->wakeup.Clear();
  return std::nullopt;
}

bool ZmqClient::Connected() const {
  state_->Update();
  state_->told = state_->connected && !state_->lost_unseen;
  state_->lost_unseen = false;
  if (state_->Untold()) state_->wakeup.Raise();  // a loss that is over already: the caller asks again soon
  return state_->told;
}

int ZmqClient::PollFd() const { return state_->wakeup.fd(); }

bool ZmqClient::KeyRefused() const {
  state_->Update();
  constexpr absl::Duration kRecently = absl::Seconds(5);  // it asks again each second
  return state_->refused && !state_->connected && state_->clock.Now() - state_->refused_at < kRecently;
}

absl::Status ZmqClient::status() const {
  state_->Update();
  if (state_->connected) return absl::OkStatus();
  if (state_->refused) {
    return absl::PermissionDeniedError(
        absl::StrCat("the head at ", state_->endpoint, " does not know our key, or is not the head we know"));
  }
  if (state_->bad_handshakes >= kBadHandshakesMeanRefused) {
    return absl::PermissionDeniedError(
        absl::StrCat("the head at ", state_->endpoint,
                     " closes our connections unheard: it does not know our key, is not the head we know, or "
                     "has too many connections from this address (its log says so)"));
  }
  if (state_->reached) {
    return absl::DeadlineExceededError(absl::StrCat(
        "the head at ", state_->endpoint,
        " takes the connection but does not answer: is it paused or overloaded? Look at its process and its "
        "log there, let it go on (kill -CONT) or start it again; the ranks go on meanwhile"));
  }
  return absl::UnavailableError(absl::StrCat("nothing answers at ", state_->endpoint));
}

}  // namespace gtrain::net
