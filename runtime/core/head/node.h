// Node: a machine as the head knows it. PURE. Private to runtime/core/head.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/clock.h"
#include "runtime/core/head/failure_detector.h"
#include "runtime/core/head/head_core.h"
#include "runtime/core/values/effects.h"
#include "runtime/core/values/records.h"

namespace gtrain::core {

// Two ends of a notice that differ by less are the same.
inline constexpr absl::Duration kNearer = absl::Seconds(1);

struct Node {
  NodeRecord record;
  uint64_t revision = 0;  // of what an agent says about its machine in `record`; never used again
  // `record` as of a revision, for documents that are built elsewhere; made when one is asked for.
  mutable std::shared_ptr<const NodeRecord> shared;
  mutable uint64_t shared_revision = 0;
  std::string route;      // newest; empty: none since this head started
  bool welcomed = false;  // said hello to this head
  bool missed = false;    // a message sent to it on this connection was lost
  uint64_t hello_order = 0;
  NodeState state = NodeState::kUnknown;
  FailureDetector::Entry* watched = nullptr;  // the detector's, once it was heard
  Instant heard_at;                           // last; the start of this head, if not since then
  absl::Duration silence;                     // when it became suspect or dead
  std::vector<int> free_ports;
  int near_port = 0;  // as it said in its hello
  std::string near_key;
  bool takes_copies = false;
  bool keeps_seals = false;
  bool knows_fabric_order = false;
  bool knows_relays = false;
  int relay_port = 0;         // where others go through it; 0: nowhere
  std::string public_key;     // Z85, as it said
  NodeId via;                 // its newest route leads through that one; empty: it is a connection of its own
  Instant said_at;            // itself: what a relay says of it does not count
  Instant via_since;          // its hello came through a relay, last
  bool relay_failed = false;  // it could not listen
  Instant via_after;          // not moved before
  absl::Duration via_again;   // from its last return to the next move
  // A hello of another incarnation while this one was just heard: refused when this one speaks again,
  // accepted when it falls silent (fault N4).
  std::optional<PeerMessage> rival;
  // Deaths by silence, halved for every flap_decay without one, and what they cost it (fault N5).
  int flaps = 0;
  Instant flapped_at;
  std::optional<Instant> quarantined_until;
  std::string quarantine;  // why, for people

  // When record.notice and record.drain happen, of those that are something.
  std::optional<Instant> notice_at, drain_at;

  bool Leaving() const {
    return record.notice.kind == NoticeKind::kLeave || record.drain.kind == NoticeKind::kLeave;
  }
  const NodeNotice& Parting() const;  // while Leaving(): the one that happens first
  std::optional<Instant> PartsAt() const;

  // Why it takes no ranks; empty: it does.
  std::string WhyUnusable() const;
  bool Usable() const { return UsableUntilItLeaves() && !Leaving(); }
  bool UsableUntilItLeaves() const {
    return welcomed && state == NodeState::kAlive && !record.unclean && !quarantined_until;
  }
};

NodePlace PlaceOf(const Node& node);

// The duration in whole seconds, for people.
std::string Rounded(absl::Duration left);

}  // namespace gtrain::core
