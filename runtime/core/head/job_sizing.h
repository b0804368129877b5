// The head's memory of the sizes of one job (sizing.h). It is lost with the head. PURE.
#pragma once
#include <map>
#include <optional>

#include "base/clock.h"
#include "base/ids.h"

namespace gtrain::core {

// Ranks on machines, in the lives that these had.
struct SizeTried {
  size_t ranks = 0;
  std::map<NodeId, Incarnation> nodes;
  bool operator==(const SizeTried&) const = default;
};

struct JobSizing {
  std::optional<Instant> room_since;  // for another number of ranks than it has
  Instant look_again_at;              // whether it may grow in place
  bool asked = false;                 // a person asked for that, since this head's start
  bool at_once = false;               // and not to wait for a checkpoint: as soon as all ranks run
  bool never_fits = false;            // it waits, and would do so if nothing else ran on these machines

  Generation worked;       // the newest that got somewhere; 0: none that this head knows
  bool planned = false;    // a resize was planned behind it, and nothing has got anywhere since
  bool goes_back = false;  // the next generation takes the places of that one
  bool alone = false;      // nothing is started beside the next generation

  // The size with which it failed. Meanwhile JobStatus::size_wanted is the size that works; `wish` is what it
  // was before.
  std::optional<SizeTried> failed;
  int wish = 0;
  Instant again_at;  // not tried by itself before
  int failures = 0;  // in a row
};

}  // namespace gtrain::core
