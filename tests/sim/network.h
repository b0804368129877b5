// Connections between machines and the head's machine. A connection is an object, as in the services: a key
// may have several, old ones may be half-open, and the head sends to the newest it has heard a hello on.
//
// Faults look as they do above TCP: a lost segment is a delay of everything behind it; only messages of
// different connections of one machine are reordered; within a connection messages keep their order, and a
// duplicate follows its original. A message is lost in a connection that lives on only when more wait than
// may (the high-water mark; in some seeds a small one): the agent connects anew, the head takes the peer for
// gone. A message that a client or an agent repeats after a reconnect is the other duplicate, and overtakes
// what the old connection still brings. While a direction is cut messages wait; after 3 s both ends that can
// notice close and the waiting messages are lost. A half-open connection is one whose head end has not
// noticed.
#pragma once
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "runtime/core/values/messages.h"
#include "tests/sim/kernel.h"

namespace gtrain::sim {

struct NetworkFaults {
  int64_t delay_min = kMs / 5, delay_spread = 2 * kMs;
  double loss = 0, duplicate = 0;  // of messages
  double reorder = 0;              // of connections that are slow, so that their successors overtake them
  double half_open = 0;            // of broken connections, at the head's end
  size_t queue_max = 10'000;       // messages that may wait each way of a connection
  bool through_codec = false;      // every message is encoded and decoded
};

struct Connection {
  uint64_t id = 0;
  int machine = 0;
  core::Peer peer;
  std::string route;  // the head's name of it
  bool near = true;   // the machine's end is open
  bool far = true;    // the head's end is open
  uint64_t head_life = 0;
  int64_t slowness = 0;
  int64_t last[2] = {0, 0};  // newest arrival scheduled, by direction
  // By direction: the messages that were sent and have not arrived, in order, and for how many of them the
  // time of arrival came while the direction was cut.
  std::deque<core::Message> under_way[2];
  size_t held_up[2] = {0, 0};
  std::function<void(core::Message)> deliver;  // at the machine; empty: its process is gone
  std::function<void()> closed;                // the machine's end was closed by the network
};

// Describes one message for a trace.
std::string Describe(const core::Message& message);

class Network {
 public:
  enum Direction { kToHead = 0, kFromHead = 1 };
  Network(Kernel& kernel, NetworkFaults faults) : kernel_(kernel), faults_(faults) {}

  // The head's process, while one serves.
  struct HeadEnd {
    uint64_t life = 0;
    std::function<void(const Connection&, core::Message)> deliver;
  };
  void Serve(HeadEnd head) { head_ = std::move(head); }
  // The head's process is gone: its ends close; peers see it at once, or after 3 s when its machine is gone.
  void HeadGone(bool machine_gone);
  // The head's process is stopped: peers give their connections up after 3 s.
  void HeadStalled();
  bool serving() const { return head_.life != 0; }
  bool CanConnect(int machine) const;

  std::shared_ptr<Connection> Connect(int machine, const core::Peer& peer);
  // Sends from the machine. False: the connection is closed, or too many messages wait.
  bool Send(Connection& connection, core::Message message);
  bool SendTo(const std::string& route, core::Message message);  // from the head; likewise
  void CloseNear(Connection& connection, bool crashed_machine);  // the machine's process closed or died
  void Reset(int machine);                                       // RST: both ends close
  void BreakHalfOpen(int machine);                               // only the machine's end closes

  void Cut(int machine, bool to_head, bool from_head);
  void Heal(int machine);
  // A message that this head did not send, on the machine's connection.
  void Inject(int machine, core::Message message);
  void Clog(int machine, int64_t duration);
  bool IsCut(int machine) const;
  // Called with each message that an open connection takes; may be empty.
  std::function<void(const Connection& connection, Direction direction, const core::Message& message)>
      on_sent;
  void CalmDown();  // no loss, duplicates or reordering any more
  size_t waiting_max() const { return waiting_max_; }

 private:
  struct Link {
    bool cut[2] = {false, false};
    uint64_t cut_number = 0;
    int64_t clogged_until = 0;
  };
  bool Put(Connection& connection, Direction direction, core::Message message);
  void Travel(const std::shared_ptr<Connection>& connection, Direction direction);
  void Arrive(const std::shared_ptr<Connection>& connection, Direction direction);
  void GiveUp(int machine);
  void CloseFar(Connection& connection);
  Link& LinkOf(int machine) { return links_[machine]; }

  Kernel& kernel_;
  NetworkFaults faults_;
  HeadEnd head_;
  uint64_t next_ = 1;
  std::map<int, Link> links_;
  std::map<std::string, std::shared_ptr<Connection>> by_route_;
  std::map<int, std::vector<std::shared_ptr<Connection>>> by_machine_;
  size_t waiting_max_ = 0;
};

}  // namespace gtrain::sim
