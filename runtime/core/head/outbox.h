// Outbox: the durability gate between HeadCore and the world. PURE.
//
// "Revoke before durable, grant after durable": Persist effects become numbered batches for the
// disk thread; everything that promises something waits until the batch holding the state it was
// computed from is on disk; what takes authority away passes at once, and drops held grants that it
// covers, so a slow fsync can neither delay the news of a death nor let a dead grant out afterwards.
//
//   Add(step)      -> effects to do now
//   NextBatch()    -> the next batch for the disk, nullopt while one is out or nothing is pending
//   Durable(n)     -> effects that batch n released, in order
//   TakeAnswers()  -> what clients wait for, while the disk is full and batch n has to wait
#pragma once
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "runtime/core/values/effects.h"

namespace gtrain::core {

struct OutboxBatch {
  uint64_t sequence = 0;
  std::vector<RecordWrite> writes;  // one per key, applied atomically
  std::vector<AuditEntry> audit;    // written before them
};

struct OutboxStats {
  uint64_t batches = 0;
  uint64_t writes_merged = 0;   // overwritten by a later write of the same batch
  uint64_t grants_dropped = 0;  // covered by a revoke before they could leave
  size_t held_now = 0;
};

// Loop-owned, not thread-safe, never blocks. A failed commit has no method here: the outcome is unknown, the
// process must stop (fault H4). A batch that was not tried for want of room is handed out again by its
// holder.
class Outbox {
 public:
  std::vector<Effect> Add(StepResult step);
  std::optional<OutboxBatch> NextBatch();
  // All that the next batch would hold may wait for more (StepResult::may_wait), for as long as its holder
  // wants: a loss and the grant after it are one commit.
  bool MayWait() const { return Pending() && !urgent_; }
  std::vector<Effect> Durable(uint64_t sequence);
  // Held replies to clients, requests for the service and reads of logs, which are no longer held: for a disk
  // that is full nobody waits. They rest on what is not durable, and who sends them says so. Replies that
  // promise that a change is stored keep `changes` only where it is not: one that is repeated is true.
  std::vector<Effect> TakeAnswers();

  bool Idle() const { return !Pending() && !in_flight_ && held_.empty(); }
  const OutboxStats& stats() const { return stats_; }

 private:
  struct Held {
    uint64_t after;  // batch that must be durable first
    Effect effect;
  };

  void Queue(Persist persist, bool may_wait);
  void DropCovered(const NodeId& node, const Revoke& revoke);
  bool Stored(const ReplyToClient& reply) const;
  bool Pending() const { return !pending_.empty() || !pending_audit_.empty(); }
  uint64_t Newest() const;  // newest batch that effects made now depend on

  std::vector<RecordWrite> pending_;  // becomes batch next_
  absl::flat_hash_map<std::string, size_t>
      pending_at_;  // by key: a head may delete 100,000 records in one step
  std::vector<AuditEntry> pending_audit_;
  bool urgent_ = false;  // one of them may not wait
  uint64_t next_ = 1;
  bool in_flight_ = false;                               // batch next_ - 1 is with the disk
  absl::flat_hash_set<std::string> requests_in_flight_;  // keys of the answers in it
  uint64_t durable_ = 0;
  std::deque<Held> held_;
  OutboxStats stats_;
};

}  // namespace gtrain::core
