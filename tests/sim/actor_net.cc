#include "tests/sim/actor_net.h"

#include <sys/eventfd.h>

#include <utility>

#include "absl/strings/numbers.h"
#include "actors/plan/frames.h"
#include "base/check.h"

namespace gtrain::sim {
namespace {

constexpr int64_t kTryMin = 2 * kMs, kTryMax = 200 * kMs;  // until a connection is made again
constexpr int64_t kCutMin = kSec, kCutMax = 15 * kSec;     // so long one outlasts a cut

}  // namespace

ActorNet* ActorNet::current = nullptr;

ActorNet::Bell::Bell() : fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) { GT_CHECK(fd.valid()); }
void ActorNet::Bell::Ring() const { eventfd_write(fd.get(), 1); }
void ActorNet::Bell::Silence() const {
  eventfd_t value = 0;
  eventfd_read(fd.get(), &value);
}

ActorNet::ActorNet(Kernel& kernel, const Faults& faults, std::function<void(int)> wake)
    : kernel_(kernel), faults_(faults), wake_(std::move(wake)) {
  GT_CHECK(current == nullptr);
  current = this;
}
ActorNet::~ActorNet() { current = nullptr; }

class ActorNet::Server final : public port::ServerTransport {
 public:
  Server(ActorNet* net, std::string endpoint) : net_(net), endpoint_(std::move(endpoint)) {}
  absl::Status Send(const port::Route& route, absl::string_view payload) override {
    const auto it = net_->routes_.find(route.id);
    if (Own() == nullptr || it == net_->routes_.end()) return absl::UnavailableError("the route is gone");
    const Shared connection = it->second;
    if (connection->route != route.id) return absl::OkStatus();  // lost, and it does not know yet
    return net_->Put(connection, /*to_server=*/false, payload)
               ? absl::OkStatus()
               : absl::ResourceExhaustedError("too many are under way");
  }
  std::optional<port::Received> Receive() override {
    Listener* const own = Own();
    if (own == nullptr) return std::nullopt;
    if (own->queue.empty()) {
      own->bell.Silence();
      return std::nullopt;
    }
    port::Received received = std::move(own->queue.front());
    own->queue.pop_front();
    return received;
  }
  int PollFd() const override { return Own()->bell.fd.get(); }

 private:
  // Null: its process is dead.
  Listener* Own() const {
    const auto it = net_->listeners_.find(endpoint_);
    return it == net_->listeners_.end() ? nullptr : &it->second;
  }
  ActorNet* const net_;
  const std::string endpoint_;
};

class ActorNet::Client final : public port::ClientTransport {
 public:
  Client(ActorNet* net, Shared own) : net_(net), own_(std::move(own)) {
    net_->connections_[own_->number] = own_;
    net_->Try(own_);
  }
  ~Client() override {
    net_->BreakOne(own_);
    ++own_->attempt;
    net_->connections_.erase(own_->number);
  }
  absl::Status Send(absl::string_view payload) override {
    if (!own_->connected) return absl::UnavailableError("not connected");
    return net_->Put(own_, /*to_server=*/true, payload)
               ? absl::OkStatus()
               : absl::ResourceExhaustedError("too many are under way");
  }
  std::optional<std::string> Receive() override {
    if (own_->received.empty()) {
      if (!own_->lost) own_->bell.Silence();
      return std::nullopt;
    }
    std::string message = std::move(own_->received.front());
    own_->received.pop_front();
    return message;
  }
  // A loss is told once, and the bell goes on until it is.
  bool Connected() const override { return !std::exchange(own_->lost, false) && own_->connected; }
  int PollFd() const override { return own_->bell.fd.get(); }

 private:
  ActorNet* const net_;
  const Shared own_;
};

absl::StatusOr<std::unique_ptr<port::ServerTransport>> ActorNet::Serve(const std::string& /*listen*/,
                                                                       const port::NetOptions& options,
                                                                       std::string* endpoint) {
  int process = 0;
  GT_CHECK(absl::SimpleAtoi(options.secret, &process));
  *endpoint = current->endpoints_.at(process);
  current->listeners_[*endpoint].process = process;
  return std::make_unique<Server>(current, *endpoint);
}

absl::StatusOr<std::unique_ptr<port::ClientTransport>> ActorNet::Connect(const std::string& endpoint,
                                                                         const port::NetOptions& options) {
  auto connection = std::make_shared<Connection>();
  GT_CHECK(absl::SimpleAtoi(options.secret, &connection->from));
  connection->number = ++current->last_;
  connection->endpoint = endpoint;
  return std::make_unique<Client>(current, std::move(connection));
}

const port::NetModule& ActorNet::Module() {
  static const port::NetModule module = {port::kNetModuleAbi, &ActorNet::Serve, &ActorNet::Connect};
  return module;
}

void ActorNet::Try(const Shared& connection) {
  const std::weak_ptr<Connection> weak = connection;
  kernel_.After(kernel_.Between(kTryMin, kTryMax), [this, weak, attempt = connection->attempt] {
    const Shared connection = weak.lock();
    if (connection == nullptr || connection->attempt != attempt) return;
    const auto listener = listeners_.find(connection->endpoint);
    if (listener == listeners_.end() || IsCut(connection->from, listener->second.process))
      return Try(connection);
    ++connection->attempt;
    connection->to = listener->second.process;
    connection->route = absl::StrCat("route ", ++last_);
    connection->connected = true;
    connection->broken = false;
    connection->to_server = {};
    connection->to_client = {};
    routes_[connection->route] = connection;
    connection->bell.Ring();
    wake_(connection->from);
  });
}

bool ActorNet::Put(const Shared& connection, bool to_server, absl::string_view payload) {
  if (connection->broken) return true;  // neither end knows yet
  Way& way = to_server ? connection->to_server : connection->to_client;
  if (way.queue.size() >= faults_.queue_max) return false;
  ++counts_.messages;
  counts_.bytes += payload.size();
  for (absl::string_view rest = payload; !rest.empty();) {
    const auto frame = actors::TakeFrame(&rest);
    if (!frame.ok()) break;
    counts_.calls += std::holds_alternative<actors::CallFrame>(*frame) ? 1 : 0;
    counts_.answers += std::holds_alternative<actors::AnswerFrame>(*frame) ? 1 : 0;
  }
  if (kernel_.rng.Chance(faults_.breaks)) {
    BreakOne(connection);
    return true;
  }
  way.queue.emplace_back(payload);
  Travel(connection, to_server);
  return true;
}

void ActorNet::Travel(const Shared& connection, bool to_server) {
  Way& way = to_server ? connection->to_server : connection->to_client;
  way.last = std::max(way.last, kernel_.now() + kernel_.Between(faults_.delay_max / 10, faults_.delay_max));
  const std::weak_ptr<Connection> weak = connection;
  kernel_.At(way.last, [this, weak, to_server, attempt = connection->attempt] {
    const Shared connection = weak.lock();
    if (connection != nullptr && connection->attempt == attempt && !connection->broken)
      Arrive(connection, to_server);
  });
}

void ActorNet::Arrive(const Shared& connection, bool to_server) {
  Way& way = to_server ? connection->to_server : connection->to_client;
  if (IsCut(connection->from, connection->to)) {
    ++way.stalled;
    return;
  }
  std::string payload = std::move(way.queue.front());
  way.queue.pop_front();
  if (!to_server) {
    connection->received.push_back(std::move(payload));
    connection->bell.Ring();
    return wake_(connection->from);
  }
  Listener& listener = listeners_.at(connection->endpoint);
  port::Received received;
  received.route.id = connection->route;
  received.address = "simulated";
  received.payload = std::move(payload);
  listener.queue.push_back(std::move(received));
  listener.bell.Ring();
  wake_(connection->to);
}

void ActorNet::BreakOne(const Shared& connection) {
  if (connection->broken) return;
  ++broken_;
  connection->broken = true;
  connection->to_server = {};
  connection->to_client = {};
  kernel_.After(kernel_.Between(0, faults_.notice_max),
                [this, route = connection->route] { routes_.erase(route); });
  const std::weak_ptr<Connection> weak = connection;
  kernel_.After(kernel_.Between(0, faults_.notice_max), [this, weak, attempt = connection->attempt] {
    const Shared connection = weak.lock();
    if (connection == nullptr || connection->attempt != attempt) return;
    connection->connected = false;
    connection->lost = true;
    connection->bell.Ring();
    wake_(connection->from);
    Try(connection);
  });
}

void ActorNet::Dead(int process) {
  listeners_.erase(endpoints_.at(process));
  for (const auto& [number, weak] : connections_) {
    const Shared connection = weak.lock();
    if (connection != nullptr && (connection->to == process || connection->from == process))
      BreakOne(connection);
  }
}

void ActorNet::Cut(std::set<int> group) {
  cut_ = std::move(group);
  for (const auto& [number, weak] : connections_) {
    const Shared connection = weak.lock();
    if (connection == nullptr || !IsCut(connection->from, connection->to)) continue;
    kernel_.After(kernel_.Between(kCutMin, kCutMax), [this, weak = weak, attempt = connection->attempt] {
      const Shared connection = weak.lock();
      if (connection != nullptr && connection->attempt == attempt && IsCut(connection->from, connection->to))
        BreakOne(connection);
    });
  }
}

void ActorNet::Heal() {
  cut_.clear();
  for (const auto& [number, weak] : connections_) {
    const Shared connection = weak.lock();
    if (connection == nullptr) continue;
    for (; connection->to_server.stalled > 0; --connection->to_server.stalled) Travel(connection, true);
    for (; connection->to_client.stalled > 0; --connection->to_client.stalled) Travel(connection, false);
  }
}

void ActorNet::Break(double chance) {
  std::vector<Shared> all;
  for (const auto& [number, weak] : connections_) {
    if (Shared connection = weak.lock(); connection != nullptr && kernel_.rng.Chance(chance))
      all.push_back(std::move(connection));
  }
  for (const Shared& connection : all) BreakOne(connection);
}

}  // namespace gtrain::sim
