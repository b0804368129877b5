// The transport port in memory, within one thread: for tests and benches. Messages arrive at once and in
// order; each client's peer is what its maker says.
#pragma once
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "net/port/transport.h"

namespace gtrain::port {

class MemoryServer final : public ServerTransport {
  struct Connection {
    net::Peer peer;
    std::string route;
    bool up = true, told = false;
    std::deque<std::string> queue;
  };
  struct State {
    std::deque<Received> queue;
    std::map<std::string, std::weak_ptr<Connection>> connections;
    int last = 0;
  };

 public:
  // Outlives the server: its clients see a server that is gone as a lost connection.
  class Client final : public ClientTransport {
   public:
    Client(std::weak_ptr<State> server, net::Peer peer) : server_(std::move(server)) {
      own_->peer = std::move(peer);
      Connect();
    }
    absl::Status Send(absl::string_view payload) override {
      const std::shared_ptr<State> server = server_.lock();
      if (server == nullptr || !own_->up) return absl::UnavailableError("not connected");
      server->queue.push_back({own_->peer, {own_->route}, "127.0.0.1", std::string(payload)});
      return absl::OkStatus();
    }
    std::optional<std::string> Receive() override {
      if (own_->queue.empty()) return std::nullopt;
      std::string payload = std::move(own_->queue.front());
      own_->queue.pop_front();
      return payload;
    }
    bool Connected() const override { return !server_.expired() && own_->up; }
    int PollFd() const override { return -1; }
    void Cut() { own_->up = false; }
    void Connect() {  // on another route
      const std::shared_ptr<State> server = server_.lock();
      if (server == nullptr) return;
      own_->up = true;
      own_->route = absl::StrCat("memory/", ++server->last);
      server->connections[own_->route] = own_;
    }
    std::deque<std::string>& queue() { return own_->queue; }  // what has arrived, to be tampered with

   private:
    const std::weak_ptr<State> server_;
    const std::shared_ptr<Connection> own_ = std::make_shared<Connection>();
  };

  std::unique_ptr<Client> Connect(net::Peer peer) {
    return std::make_unique<Client>(state_, std::move(peer));
  }

  absl::Status Send(const Route& route, absl::string_view payload) override {
    const auto it = state_->connections.find(route.id);
    const auto connection = it == state_->connections.end() ? nullptr : it->second.lock();
    if (connection == nullptr || !connection->up || connection->route != route.id)
      return absl::UnavailableError("the route is gone");
    connection->queue.emplace_back(payload);
    return absl::OkStatus();
  }
  std::optional<Received> Receive() override {
    if (state_->queue.empty()) return std::nullopt;
    Received received = std::move(state_->queue.front());
    state_->queue.pop_front();
    return received;
  }
  int PollFd() const override { return -1; }

 private:
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace gtrain::port
