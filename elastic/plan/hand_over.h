// Who gives which pieces of a part of the model to whom, when ranks of it are new. PURE.
//
// Piece p goes from source p % sources to taker p % takers, once; the takers then hand it to each other. So
// all sources together send the part once, whatever the number of takers, and each of them its share.
#pragma once
#include <cstddef>
#include <vector>

#include "absl/types/span.h"
#include "elastic/plan/agree.h"

namespace gtrain::elastic {

// Ranks, ascending. Of one cell: those of it that have its state, or the one of another cell that has a copy;
// and those that need it.
struct PartHandOver {
  std::vector<int> sources, takers;
  bool from_copy = false;
};

// `cells`: index = rank. O(ranks).
PartHandOver HandOverOf(const Agreement& agreement, absl::Span<const int> cells, int cell);

// The pieces, of 0 to `pieces` - 1, that `source` sends to `taker`, which are indices of a PartHandOver's.
std::vector<size_t> PiecesBetween(const PartHandOver& hand_over, size_t source, size_t taker, size_t pieces);

struct BatchShare {
  int share = 0, shares = 1;  // `share` -1: none. `shares` 0: of what was computed nothing is left
  bool operator==(const BatchShare&) const = default;
};

// Which share of the first step's batch `rank` has: those that have the state share it, so that they compute
// while those that are new get theirs.
BatchShare FirstShareOf(const PartHandOver& hand_over, int rank);

// Whether the step that is next was computed whole before its generation ended: each share by one rank that
// is still there and has its gradients. Then it is reduced, and not computed again. `computed`: index = rank.
bool IsComputed(const Agreement& agreement, absl::Span<const BatchShare> computed);

// Index = cell: the cell whose first rank keeps the step copies of this one. `machines`, index = cell: where
// its first rank runs. All are shifted by one number, so that each keeps one part: by the least that puts the
// most copies on other machines. Empty where there is one cell alone. O(cells^2) at worst, O(cells) where
// each has a machine of its own.
std::vector<int> StepCopyKeepers(absl::Span<const int> machines);

}  // namespace gtrain::elastic
