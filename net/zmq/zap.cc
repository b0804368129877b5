// ZAP by RFC 27: one REP socket at a fixed inproc address. A request is eight frames, the last of them
// the 32-byte public key; the answer names the User-Id that ZeroMQ then attaches to every message of the
// connection. Anything unexpected is answered with 400, which closes the connection: default deny.
#include "net/zmq/zap.h"

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "base/logging.h"

namespace gtrain::net {
namespace {

constexpr char kZapEndpoint[] = "inproc://zeromq.zap.01";
constexpr size_t kRequestFrames =
    7;  // as REP shows them: version, id, domain, address, routing id, mechanism, key
constexpr absl::Duration kLogPause = absl::Seconds(10);

bool SendFrames(void* socket, const std::vector<std::string>& frames) {
  for (size_t i = 0; i < frames.size(); ++i) {
    int flags = i + 1 < frames.size() ? ZMQ_SNDMORE : 0;
    if (zmq_send(socket, frames[i].data(), frames[i].size(), flags) < 0) return false;
  }
  return true;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Gate>> Gate::Start(void* context, Socket monitor,
                                                  std::shared_ptr<KeyRegistry> registry,
                                                  std::shared_ptr<const Clock> clock,
                                                  ConnectionLimits limits) {
  Socket zap(zmq_socket(context, ZMQ_REP));
  if (!zap || !SetInt(zap.get(), ZMQ_LINGER, 0) || zmq_bind(zap.get(), kZapEndpoint) != 0) {
    return ZmqStatus("cannot start the key check");
  }
  std::unique_ptr<Gate> gate(
      new Gate(std::move(zap), std::move(monitor), std::move(registry), std::move(clock), limits));
  gate->thread_ = std::thread([g = gate.get()] { g->Run(); });
  return gate;
}

Gate::Gate(Socket zap, Socket monitor, std::shared_ptr<KeyRegistry> registry,
           std::shared_ptr<const Clock> clock, ConnectionLimits limits)
    : zap_(std::move(zap)),
      monitor_(std::move(monitor)),
      registry_(std::move(registry)),
      clock_(std::move(clock)),
      limits_(limits) {}

Gate::~Gate() {
  if (thread_.joinable()) thread_.join();
}

void Gate::Run() {
  zmq_pollitem_t items[2] = {{zap_.get(), 0, ZMQ_POLLIN, 0}, {monitor_.get(), 0, ZMQ_POLLIN, 0}};
  while (true) {
    if (zmq_poll(items, 2, -1) < 0) {
      if (zmq_errno() == EINTR) continue;
      break;  // ETERM
    }
    if ((items[1].revents & ZMQ_POLLIN) != 0) CountEvents();
    if ((items[0].revents & ZMQ_POLLIN) != 0 && !AnswerOne()) break;
  }
  zap_.reset();  // the context waits for these
  monitor_.reset();
}

bool Gate::AnswerOne() {
  std::optional<Frames> request = ReceiveFrames(zap_.get(), kRequestFrames);
  if (!request) return zmq_errno() != ETERM;
  const std::vector<std::string>& f = request->frames;
  std::optional<Role> role;
  std::string key_id;
  if (request->count == kRequestFrames && f[0] == "1.0" && f[2] == kZapDomain && f[5] == "CURVE" &&
      f[6].size() == 32) {
    char z85[41];
    zmq_z85_encode(z85, reinterpret_cast<const uint8_t*>(f[6].data()), f[6].size());
    key_id = KeyId(z85);
    role = registry_->RoleOfKeyId(key_id, clock_->Now());
  }
  std::string id = f.size() > 1 ? f[1] : "";
  if (role) {
    return SendFrames(zap_.get(), {"1.0", id, "200", "", absl::StrCat(RoleName(*role), "/", key_id), ""}) ||
           zmq_errno() != ETERM;
  }
  if (counting_) ++counters_.denied;
  Refused(f.size() > 3 ? f[3] : "", absl::StrCat("its key ", key_id, " is not allowed"));
  return SendFrames(zap_.get(), {"1.0", id, "400", "key not allowed", "", ""}) || zmq_errno() != ETERM;
}

void Gate::CountEvents() {
  while (std::optional<MonitorEvent> event = ReadMonitor(monitor_.get())) {
    switch (event->event) {
      case ZMQ_EVENT_ACCEPTED:
        if (counting_) ++counters_.accepted;
        Opened(static_cast<int>(event->value));
        break;
      case ZMQ_EVENT_DISCONNECTED:
        Closed(static_cast<int>(event->value));
        break;
      case ZMQ_EVENT_HANDSHAKE_SUCCEEDED:
        ++counters_.authenticated;
        break;
      case ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL:
      case ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        Refused("", "it does not speak our protocol or has no key");
        break;
      default:
        break;
    }
  }
}

// Whether a connection is greedy shows only after ZeroMQ has accepted it; it is cut before it costs more than
// a descriptor for a moment. Each close is reported before its descriptor can be used again.
void Gate::Opened(int fd) {
  Closed(fd);
  std::string address = PeerAddress(fd);
  if (address.empty()) return;
  const bool greedy = ++per_address_[address] > limits_.per_address;
  const bool crowded = connections_.size() >= static_cast<size_t>(limits_.all);
  if (greedy || crowded) {
    if (counting_) ++counters_.over_limit;
    Refused(address,
            greedy ? absl::StrCat("it has ", limits_.per_address, " connections open already")
                   : absl::StrCat(limits_.all, " connections are open, which is what `ulimit -n` allows"));
    CutConnection(fd, address);
  }
  connections_.emplace(fd, std::move(address));
}

void Gate::Closed(int fd) {
  const auto it = connections_.find(fd);
  if (it == connections_.end()) return;
  const auto count = per_address_.find(it->second);
  if (--count->second == 0) per_address_.erase(count);
  connections_.erase(it);
}

void Gate::Refused(absl::string_view address, absl::string_view why) {
  if (!counting_) return;
  ++unlogged_;
  Instant now = clock_->Now();
  if (now - last_log_ < kLogPause) return;
  last_log_ = now;
  LogWarning("refused ", unlogged_, unlogged_ == 1 ? " connection" : " connections",
             " since the last such line; the newest", address.empty() ? "" : absl::StrCat(" from ", address),
             ": ", why);
  unlogged_ = 0;
}

}  // namespace gtrain::net
