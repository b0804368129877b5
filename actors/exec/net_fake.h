// Connections in memory that break when a test says so, for clusters of one process. What was on its way when
// one breaks arrives up to some point, in either direction, and the rest is lost; the next one is there at
// once.
#pragma once
#include <sys/eventfd.h>

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/rng.h"
#include "base/unique_fd.h"
#include "net/port/net_module.h"

namespace gtrain::actors {

class FakeNet {
 public:
  static FakeNet& Get() {
    static FakeNet net;
    return net;
  }

  // As many of ten thousand messages as this break their connection.
  void BreakOften(uint64_t often, uint64_t seed) {
    MutexLock lock(&mutex_);
    breaks_ = often;
    rng_ = Rng(seed);
  }
  uint64_t broken() {
    MutexLock lock(&mutex_);
    return broken_;
  }
  // Nothing comes from or to this endpoint any more, and nobody is told.
  void CutOff(const std::string& endpoint, bool cut) {
    MutexLock lock(&mutex_);
    if (cut) {
      cut_.insert(endpoint);
    } else {
      cut_.erase(endpoint);
    }
    for (Connection* connection : clients_) {
      if (connection->endpoint != endpoint) continue;
      if (cut) Break(*connection);
      connection->bell.Ring();
    }
  }

  static const port::NetModule& Module() {
    static const port::NetModule module = {port::kNetModuleAbi, &FakeNet::Serve, &FakeNet::Connect};
    return module;
  }

 private:
  struct Bell {
    UniqueFd fd{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
    void Ring() const { eventfd_write(fd.get(), 1); }
    void Silence() const {
      eventfd_t value = 0;
      eventfd_read(fd.get(), &value);
    }
  };
  struct Listener {
    std::deque<port::Received> queue;
    Bell bell;
  };
  struct Connection {
    std::string endpoint, route;  // the route is a new one for each connection
    bool connected = false, told = false;
    std::deque<std::string> queue;
    Bell bell;
  };

  class Server final : public port::ServerTransport {
   public:
    explicit Server(std::string endpoint) : endpoint_(std::move(endpoint)) {}
    ~Server() override {
      MutexLock lock(&Get().mutex_);
      Get().listeners_.erase(endpoint_);
      for (auto& [route, connection] : Get().connections_) {
        if (connection->endpoint == endpoint_) Break(*connection);
      }
    }
    absl::Status Send(const port::Route& route, absl::string_view payload) override {
      MutexLock lock(&Get().mutex_);
      const auto it = Get().connections_.find(route.id);
      if (it == Get().connections_.end()) return absl::UnavailableError("the route is gone");
      if (Get().BreaksNow(*it->second)) return absl::OkStatus();  // it was sent, and does not arrive
      it->second->queue.emplace_back(payload);
      it->second->bell.Ring();
      return absl::OkStatus();
    }
    std::optional<port::Received> Receive() override {
      MutexLock lock(&Get().mutex_);
      Listener& own = *Get().listeners_.at(endpoint_);
      if (own.queue.empty()) {
        own.bell.Silence();
        return std::nullopt;
      }
      port::Received received = std::move(own.queue.front());
      own.queue.pop_front();
      return received;
    }
    int PollFd() const override {
      MutexLock lock(&Get().mutex_);
      return Get().listeners_.at(endpoint_)->bell.fd.get();
    }

   private:
    const std::string endpoint_;
  };

  class Client final : public port::ClientTransport {
   public:
    explicit Client(const std::string& endpoint) : own_(std::make_shared<Connection>()) {
      own_->endpoint = endpoint;
      own_->bell.Ring();
      MutexLock lock(&Get().mutex_);
      Get().clients_.insert(own_.get());
    }
    ~Client() override {
      MutexLock lock(&Get().mutex_);
      Get().clients_.erase(own_.get());
      Get().connections_.erase(own_->route);
    }
    absl::Status Send(absl::string_view payload) override {
      MutexLock lock(&Get().mutex_);
      const auto listener = Get().listeners_.find(own_->endpoint);
      if (!own_->connected || listener == Get().listeners_.end())
        return absl::UnavailableError("not connected");
      if (Get().BreaksNow(*own_)) return absl::OkStatus();
      port::Received received;
      received.route.id = own_->route;
      received.address = "fake";
      received.payload = std::string(payload);
      listener->second->queue.push_back(std::move(received));
      listener->second->bell.Ring();
      return absl::OkStatus();
    }
    std::optional<std::string> Receive() override {
      MutexLock lock(&Get().mutex_);
      if (own_->queue.empty()) {
        if (own_->connected == own_->told) own_->bell.Silence();
        return std::nullopt;
      }
      std::string message = std::move(own_->queue.front());
      own_->queue.pop_front();
      return message;
    }
    bool Connected() const override {
      MutexLock lock(&Get().mutex_);
      if (!own_->connected && !own_->told) Get().Reconnect(own_);
      own_->told = own_->connected;
      // A loss is told once, and then there is another connection.
      if (!own_->told && !Get().cut_.contains(own_->endpoint)) own_->bell.Ring();
      return own_->told;
    }
    int PollFd() const override { return own_->bell.fd.get(); }

   private:
    const std::shared_ptr<Connection> own_;
  };

  static absl::StatusOr<std::unique_ptr<port::ServerTransport>> Serve(const std::string& /*listen*/,
                                                                      const port::NetOptions& /*options*/,
                                                                      std::string* endpoint) {
    MutexLock lock(&Get().mutex_);
    *endpoint = absl::StrCat("fake:", ++Get().last_);
    Get().listeners_[*endpoint] = std::make_unique<Listener>();
    return std::make_unique<Server>(*endpoint);
  }
  static absl::StatusOr<std::unique_ptr<port::ClientTransport>> Connect(const std::string& endpoint,
                                                                        const port::NetOptions& /*options*/) {
    return std::make_unique<Client>(endpoint);
  }

  void Reconnect(const std::shared_ptr<Connection>& connection) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!listeners_.contains(connection->endpoint) || cut_.contains(connection->endpoint)) return;
    connections_.erase(connection->route);
    connection->route = absl::StrCat("route ", ++last_);
    connection->connected = true;
    connections_[connection->route] = connection;
  }
  // What has been sent to the client and not read arrives up to some point.
  bool BreaksNow(Connection& connection) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (breaks_ == 0 || rng_.Below(10'000) >= breaks_) return false;
    if (!connection.queue.empty()) connection.queue.resize(rng_.Below(connection.queue.size()));
    Break(connection);
    ++broken_;
    return true;
  }
  static void Break(Connection& connection) {
    connection.connected = false;
    connection.bell.Ring();
  }

  Mutex mutex_;
  std::map<std::string, std::unique_ptr<Listener>> listeners_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::shared_ptr<Connection>> connections_ ABSL_GUARDED_BY(mutex_);  // by route
  std::set<Connection*> clients_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> cut_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_ ABSL_GUARDED_BY(mutex_) = 0, breaks_ ABSL_GUARDED_BY(mutex_) = 0,
                 broken_ ABSL_GUARDED_BY(mutex_) = 0;
  Rng rng_ ABSL_GUARDED_BY(mutex_){1};
};

}  // namespace gtrain::actors
