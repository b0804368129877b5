// Connections between simulated processes that run actors. Messages of a connection arrive in their order,
// each after a while; what is on its way when it breaks is lost, and either end notices that at its own time.
// Single-threaded; one at a time, since a NetModule is two plain functions.
#pragma once
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "base/unique_fd.h"
#include "net/port/net_module.h"
#include "tests/sim/kernel.h"

namespace gtrain::sim {

class ActorNet {
 public:
  struct Faults {
    int64_t delay_max = kMs;    // of a message
    double breaks = 0;          // chance of a message to break its connection
    int64_t notice_max = kSec;  // until an end notices that its connection is gone
    size_t queue_max = 64;      // messages under way, each direction
  };
  struct Counts {
    uint64_t messages = 0, bytes = 0, calls = 0, answers = 0;
  };

  // `wake`: something has come to a process.
  ActorNet(Kernel& kernel, const Faults& faults, std::function<void(int process)> wake);
  ~ActorNet();
  ActorNet(const ActorNet&) = delete;
  ActorNet& operator=(const ActorNet&) = delete;

  // The secret of a process says which one it is: NetOptions has room for nothing else.
  static const port::NetModule& Module();
  static std::string SecretOf(int process) { return absl::StrCat(process); }

  // It will serve there.
  void Expect(int process, const std::string& endpoint) { endpoints_[process] = endpoint; }
  void Dead(int process);
  // Nothing passes between the group and the others until Heal. Connections across may last as long.
  void Cut(std::set<int> group);
  void Heal();
  // Each connection with this chance.
  void Break(double chance);
  void CalmDown() { faults_.breaks = 0; }
  const Counts& counts() const { return counts_; }
  uint64_t broken() const { return broken_; }

 private:
  struct Bell {
    UniqueFd fd;
    Bell();
    void Ring() const;
    void Silence() const;
  };
  struct Listener {
    int process = 0;
    std::deque<port::Received> queue;
    Bell bell;
  };
  struct Way {
    std::deque<std::string> queue;
    int64_t last = 0;      // no message arrives before the one that was sent before it
    uint64_t stalled = 0;  // arrived, but for the cut
  };
  struct Connection {
    int from = 0, to = 0;
    uint64_t number = 0, attempt = 0;
    std::string endpoint, route;  // the route is a new one with each attempt
    bool connected = false;       // as the client knows it
    bool broken = true;           // as it is
    bool lost = false;            // and the client has not asked since
    Way to_server, to_client;
    std::deque<std::string> received;
    Bell bell;
  };
  using Shared = std::shared_ptr<Connection>;
  class Server;
  class Client;

  static absl::StatusOr<std::unique_ptr<port::ServerTransport>> Serve(const std::string& listen,
                                                                      const port::NetOptions& options,
                                                                      std::string* endpoint);
  static absl::StatusOr<std::unique_ptr<port::ClientTransport>> Connect(const std::string& endpoint,
                                                                        const port::NetOptions& options);
  bool IsCut(int a, int b) const { return cut_.contains(a) != cut_.contains(b); }
  void Try(const Shared& connection);
  // False: as many as may be are under way.
  bool Put(const Shared& connection, bool to_server, absl::string_view payload);
  void Travel(const Shared& connection, bool to_server);
  void Arrive(const Shared& connection, bool to_server);
  void BreakOne(const Shared& connection);

  static ActorNet* current;
  Kernel& kernel_;
  Faults faults_;
  const std::function<void(int)> wake_;
  std::map<int, std::string> endpoints_;
  std::map<std::string, Listener> listeners_;
  std::map<uint64_t, std::weak_ptr<Connection>> connections_;
  std::map<std::string, Shared> routes_;  // as servers know them
  std::set<int> cut_;
  uint64_t last_ = 0, broken_ = 0;
  Counts counts_;
};

}  // namespace gtrain::sim
