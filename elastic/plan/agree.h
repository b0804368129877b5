// What the members of a new generation make of what each of them has: which step is the newest, who has it,
// who rolls forward to it, and who needs the state of another. PURE.
//
// A step has two halves. Its gradients are reduced, which may be done again; its update is applied, which may
// not. Between them all ranks meet once more, so whoever applies step k knows that every rank of its
// generation held the reduced gradients of k. Nobody is more than one step behind who was there, and nobody
// has to undo anything: who holds the gradients of the newest step applies them.
#pragma once
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace gtrain::elastic {

struct MemberState {
  int64_t applied = -1;  // the last step whose update it made; -1: it has no state, or half a copy
  int64_t held = -1;     // the step of which it holds the reduced gradients; -1: of none
  bool as_made = true;   // its memory is as the program made it: no byte of a copy has ever landed there
  bool operator==(const MemberState&) const = default;
};

enum class Part {
  kHas,           // the newest step
  kRollsForward,  // it applies the gradients that it holds, and then has it
  kNeeds,         // the state of another
};

struct Agreement {
  // The newest that anybody applied; -1: nobody has a state, or a part of it is lost with all that had it.
  int64_t step = -1;
  // Index = cell, the part of the model (elastic/plan/mesh_place.h). The lowest rank that has `step`, or else
  // that rolls forward to it. With `step` -1 the lowest whose memory is as the program made it; -1: there is
  // none, and what the run began with is lost.
  std::vector<int> sources;
  std::vector<Part> parts;  // index = rank
  bool AnyNeeds() const;
  // The lowest of the sources; -1: a cell has none.
  int source() const;
};

// `members` and `cells` (each of 0 to `count` - 1): index = rank. Gradients of a later step than `step` are
// worth nothing in another generation: nobody applied them, and the step is computed again. O(ranks).
Agreement Agree(absl::Span<const MemberState> members, absl::Span<const int> cells, int count);

}  // namespace gtrain::elastic
