// The keepers of this node: started, connected, reconnected, cleaned up after. Owner thread only; never
// blocks.
#pragma once
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/ids.h"
#include "runtime/core/agent/agent_core.h"
#include "runtime/core/values/keeper_messages.h"
#include "runtime/host/keeper_client.h"

struct pollfd;

namespace gtrain::agent {

class KeeperSet {
 public:
  KeeperSet(std::string dir, std::string binary, absl::Duration lease);

  // Takes up the keepers an earlier agent left in the directory. Returns how many of them live.
  absl::StatusOr<int> AdoptAll(Instant now);

  // BeginGeneration starts the job's keeper if it has none; any other command for a job without one is
  // dropped.
  void Send(const JobId& job, const keeper::Command& command, Instant now);

  // Returns what arrived since the last call, as events for the core.
  std::vector<core::AgentEvent> Poll(Instant now);

  void AddPollFds(std::vector<pollfd>* fds) const;
  bool starting() const;  // a keeper is: poll again at once
  bool busy() const;      // something is being started or cleaned up: poll again soon
  bool unsent() const;    // a keeper has not been given all that was sent to it
  bool empty() const { return keepers_.empty(); }
  bool Has(const JobId& job) const { return keepers_.contains(job); }

 private:
  enum class Phase { kConnecting, kUp, kSweeping };
  struct Handle {
    std::string dir;
    Phase phase = Phase::kConnecting;
    std::unique_ptr<host::KeeperClient> client;
    std::deque<keeper::Command> pending;  // until connected
    Instant deadline;
    bool quitting = false;
    bool was_up = false;  // its process existed: if it does not any more, it died
    std::string reason;
  };

  void Connect(Handle& handle, Instant now);
  void Receive(const JobId& job, Handle& handle, Instant now, std::vector<core::AgentEvent>* events);
  bool Sweep(const JobId& job, Handle& handle, Instant now, std::vector<core::AgentEvent>* events);
  void Lose(Handle& handle, Instant now, const std::string& reason);

  const std::string dir_, binary_;
  const absl::Duration lease_;
  std::map<JobId, Handle> keepers_;
};

}  // namespace gtrain::agent
