// Agents by the thousand, as one process can play them: they speak the real protocol over real, authenticated
// connections, and decide nothing. There is no AgentCore and no keeper: ranks "run" once they are granted,
// report their part of the entry barrier, and end when they are revoked.
//
// Children of relays live in memory beside their relay: what is played is what reaches the head. Each opens
// its own session and its own sealed messages; of a message to many (a grant, a table) one opens the body for
// all, since ten thousand machines would do that at the same time and one cannot.
//
// Not thread-safe. An agent that has a connection costs 9 descriptors.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/clock.h"
#include "base/unique_fd.h"
#include "net/zmq/client.h"
#include "net/zmq/end_to_end.h"
#include "net/zmq/keys.h"
#include "runtime/core/values/messages.h"

namespace gtrain::bench {

// What a process plays: some of the agents of a cluster.
struct FleetPlan {
  std::string endpoint;
  std::string head_public_key;
  ClusterId cluster;
  std::vector<net::KeyPair> keys;  // of all its agents
  int first = 0;                   // number of the first of them
  int children = 0;                // of each relay; 0: all are connected directly
};

struct FleetCounters {
  int welcomed = 0;
  int64_t started = 0;             // ranks
  int64_t tables = 0;              // agents that have the entry barrier's table
  int64_t sent = 0, received = 0;  // bytes of the head's connections, without ZeroMQ's and TCP's own
  Instant last_part;               // of an entry barrier left
  std::map<std::pair<JobId, Generation>, int64_t> starts;  // ranks
};

class Fleet {
 public:
  explicit Fleet(FleetPlan plan);
  ~Fleet();

  // ResourceExhausted: this process may not open so many files.
  absl::Status Connect();
  // Takes what has come, sends what is due; waits at most so long. Heartbeats are spread over each second.
  void Turn(absl::Duration wait);

  const FleetCounters& counters() const { return counters_; }
  void Watch(const std::string& job) { watched_ = JobId(job); }
  const JobId& watched() const { return watched_; }
  // Ranks of this generation of the watched job that have started.
  int64_t StartsOf(uint64_t generation) const {
    const auto it = counters_.starts.find({watched_, Generation{generation}});
    return it == counters_.starts.end() ? 0 : it->second;
  }
  // The agent of this number says nothing more.
  void Silence(int number) { agents_[static_cast<size_t>(number)].silent = true; }
  // Its rank of the watched job is lost with its keeper. NotFound: it has none.
  absl::Status LoseRankOf(int number);
  std::vector<int> AgentsOfWatched() const;

 private:
  struct Agent {
    NodeId id;
    int number = 0;
    bool welcomed = false, silent = false;
    uint64_t order = 0;
    std::string secret, half;
    std::optional<net::SealedSession> session;
    uint32_t session_number = 0;
    std::map<JobId, std::pair<Generation, int>> ranks;  // the live one of each job
  };
  struct Connection {  // of an agent that is connected itself
    std::unique_ptr<net::ZmqClient> client;
    size_t agent = 0;
    size_t first_child = 0, children = 0;
    bool up = false;
    core::RelayedUp out;
    bool hurry = false;
  };
  struct Grant {  // one that is read once for all
    JobId job;
    Generation generation;
    std::map<NodeId, int> ranks;
  };

  void OnConnection(Connection& connection);
  void OnBytes(Connection& connection, const std::string& bytes);
  void OnDown(Connection& connection, const core::RelayedDown& down);
  void OnPart(Connection& connection, Agent& agent, const core::RelayedDown& down,
              const core::RelayPart& part);
  void OnMessage(Connection& connection, Agent& agent, const core::Message& message);
  void OnGrant(Connection& connection, Agent& agent, const Grant& grant);
  void OnShared(Connection& connection, Agent& agent, const core::RelayedDown& down, uint32_t body,
                const std::string& key);
  void Say(Connection& connection, Agent& agent, const core::Message& message, bool waits = false);
  void Open(Connection& connection, Agent& agent);
  void Flush(Connection& connection);
  void Beats(Instant now);
  void Beat(size_t index, int64_t round);
  core::AgentHello HelloOf(Agent& agent) const;
  Connection& ConnectionOf(size_t agent);

  const FleetPlan plan_;
  std::shared_ptr<void> context_;
  UniqueFd epoll_;
  std::vector<Agent> agents_;
  std::vector<Connection> connections_;
  std::vector<uint32_t> connection_of_;
  FleetCounters counters_;
  JobId watched_;
  std::string shared_key_;  // of the body that was read last
  std::optional<core::Message> shared_;
  std::optional<Grant> grant_;
  Instant began_, next_sweep_;
  int64_t beats_done_ = 0, flushes_done_ = 0;
};

}  // namespace gtrain::bench
