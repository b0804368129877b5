// What the members of a new generation make of what each of them has: which step is the newest, who has it,
// who rolls forward to it, and who needs the state of another. PURE.
//
// A step has two halves. Its gradients are reduced, which may be done again; its update is applied, which may
// not. Between them all ranks meet once more, so whoever applies step k knows that every rank of its
// generation held the reduced gradients of k. Nobody is more than one step behind who was there, and nobody
// has to undo anything: who holds the gradients of the newest step applies them.
//
// With step copies (elastic/exec/step_copies.h) a part of the model that is lost with all its ranks is left
// in the memory of another rank, as it was after the newest step or the one before. Then all go back to that
// one.
#pragma once
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace gtrain::elastic {

// A copy of a part of the model, as it was after a step. Such copies lie in the memory of a rank that has
// another part.
struct PartCopy {
  int cell = -1;
  int64_t step = -1;  // -1: there is none
  bool operator==(const PartCopy&) const = default;
};

struct MemberState {
  int64_t applied = -1;  // the last step whose update it made; -1: it has no state, or half a copy
  int64_t held = -1;     // the step of which it holds the reduced gradients; -1: of none
  bool as_made = true;   // its memory is as the program made it: no byte of a copy has ever landed there
  int64_t undo = -1;     // the step after which it could have its own state again; -1: none
  std::vector<PartCopy> copies = {};
  // Where training has gone back a step is made again, maybe with other bits, while a process that waits for
  // a place still has the first one. So each going back begins another line of steps.
  int64_t line = 0;
  bool operator==(const MemberState&) const = default;
};

enum class Part {
  kHas,           // the newest step
  kRollsForward,  // it applies the gradients that it holds, and then has it
  kUndoes,        // it takes back its last update, and then has it
  kNeeds,         // the state of another
};

struct Agreement {
  // The newest that anybody applied, or the one before it; -1: nobody has a state, or a part of it is lost
  // with all that had it, in both.
  int64_t step = -1;
  // Index = cell, the part of the model (elastic/plan/mesh_place.h). The lowest rank that has `step`, or else
  // that rolls forward or goes back to it, or else a rank of another cell that has a copy. With `step` -1 the
  // lowest whose memory is as the program made it; -1: there is none, and what the run began with is lost.
  std::vector<int> sources;
  std::vector<Part> parts;  // index = rank
  bool AnyNeeds() const;
  bool AnyUndoes() const;
  // The lowest of the sources; -1: a cell has none.
  int source() const;
  int64_t line = 0;  // that all are on from here on
};

// What is of an older line than the newest one is nothing. `members` and `cells` (each of 0 to `count` - 1):
// index = rank. Gradients of a later step than `step` are worth nothing in another generation: nobody applied
// them, and the step is computed again. O(ranks) and O(copies).
Agreement Agree(absl::Span<const MemberState> members, absl::Span<const int> cells, int count);

}  // namespace gtrain::elastic
