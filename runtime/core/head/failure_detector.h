// FailureDetector: decides from silence alone which nodes are suspect or dead. PURE.
#pragma once
#include <optional>
#include <vector>

#include "absl/container/node_hash_map.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/ids.h"

namespace gtrain::core {

// Loop-owned, not thread-safe. Silence is measured on the head's own monotonic clock, and only while
// the head itself was awake (fault H12). At n nodes a word of one costs a look into a table, and a tick n
// where somebody's time may have come: about once in suspect_after.
class FailureDetector {
 public:
  struct Options {
    absl::Duration interval = absl::Seconds(1);  // of heartbeats, and of our own ticks
    absl::Duration suspect_after = absl::Seconds(3);
    absl::Duration dead_after = absl::Seconds(10);
  };
  enum class Level { kAlive, kSuspect, kDead };
  struct Change {
    NodeId node;
    Level to = Level::kAlive;
    absl::Duration silence;
  };

  // What it keeps of a node. Only a FailureDetector looks into it.
  struct Entry {
    Instant heard;
    Level level = Level::kAlive;
    std::optional<Instant> spared_until;
    absl::Duration extra;  // of patience
  };

  explicit FailureDetector(Options options) : options_(options) {}

  // At the start of every step: notices that this process was not running for a while and takes
  // that time off everybody's silence. Returns true when it did.
  bool Awake(Instant now);
  // The time that the last Awake took off; zero when no node was listened to, since nothing is due each
  // interval then.
  absl::Duration slept() const { return slept_; }
  // Returns where the node is, until it is forgotten: so the next word of it takes no search.
  Entry* Heard(const NodeId& node, Instant now);
  void Heard(Entry& entry, Instant now);
  // Counts the node as heard `extra` later than now: a longer first patience, also if it is heard meanwhile.
  // A head that has just been started has the hellos of all nodes to read, and their other messages wait
  // behind them.
  void Expect(const NodeId& node, Instant now, absl::Duration extra);
  // Called when the transport says that the connection is gone: suspect now, dead when its time comes.
  // Returns the change of this node, if it is one.
  std::optional<Change> Suspect(const NodeId& node, Instant now);
  // Takes a death back until `until`, when it is reported again unless the node was heard: for a silence that
  // other evidence speaks against (fault P4).
  void Spare(const NodeId& node, Instant until);
  // It may be silent for `extra` longer before it is dead: its cloud said that it will stand still.
  void Patience(const NodeId& node, absl::Duration extra);
  void Forget(const NodeId& node);

  std::vector<Change> Advance(Instant now);  // by node
  // Nothing is due before; by then it may be due later, because a node was heard since the last Advance.
  std::optional<Instant> NextDeadline() const;

 private:
  Instant DeathOf(const Entry& entry) const;
  std::optional<Instant> FirstDue() const;

  const Options options_;
  absl::node_hash_map<NodeId, Entry> nodes_;
  std::optional<Instant> awake_;
  absl::Duration slept_;
  // FirstDue() or earlier; forgotten by what may bring it forward or take the last one away.
  mutable std::optional<std::optional<Instant>> first_due_;
};

}  // namespace gtrain::core
