// KeeperOrder: the order in which an agent's commands reach the keeper of a job whose file system is slow.
// PURE.
//
// The files of a job may answer late or never (fault P8), and ranks may not begin before their directories
// hold what they need. So commands that begin ranks wait behind the file work of their job. Commands that end
// ranks wait for nothing: they overtake, and are sent once more behind what waits, because a keeper answers
// only for a generation that it has heard of. A rank whose end has overtaken its start is never started.
// Everything else is sent at once.
//
// The caller keeps the waiting commands, one queue a job, and asks again when their turn has come;
// runtime/agent and tests/sim do that with the same object. Loop-owned, not thread-safe; never blocks.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "base/ids.h"
#include "runtime/core/agent/agent_core.h"

namespace gtrain::core {

class KeeperOrder {
 public:
  struct Way {
    bool now = false;                // to the keeper at once
    std::optional<uint64_t> ticket;  // behind the file work of the job; Passes decides when that is done
  };
  // The way of what AgentCore has just ordered. `files_wait`: file work of the job, or something behind it,
  // is not done. `has_keeper`: the job has one on this machine.
  Way Send(const ToKeeper& order, bool files_wait, bool has_keeper);

  // All that waited before this ticket of the job is done: whether the command goes to the keeper now.
  // Tickets of a job come here in the order in which Send gave them; one for which the caller found no room
  // never does.
  bool Passes(const ToKeeper& order, uint64_t ticket);

  // AgentCore is about to hear that the job's keeper is gone. It declares every generation of the job gone
  // for it, so nothing that waits may begin one.
  void KeeperLost(const JobId& job);

  // A grant waits for file work, too, before AgentCore hears it. The hello of a newer connection does not
  // name such a grant, so the head may have begun without this node; it sends the grant again if it still
  // holds.
  void Connected() { ++connection_; }
  uint64_t connection() const { return connection_; }
  bool GrantHolds(uint64_t connection) const { return connection == connection_; }

 private:
  struct Ended {  // every generation <= `generation` whose start has a lower ticket
    uint64_t ticket = 0;
    uint64_t generation = 0;
  };
  struct Waiting {
    uint64_t newest = 0;       // ticket
    uint64_t void_before = 0;  // ticket: the keeper was lost then
    std::vector<Ended> ended;  // falling generations, growing tickets
  };

  uint64_t next_ticket_ = 1;
  uint64_t connection_ = 0;
  std::map<JobId, Waiting> jobs_;  // for which a ticket is out
};

}  // namespace gtrain::core
