#include "elastic/plan/hand_over.h"

#include <algorithm>

namespace gtrain::elastic {

PartHandOver HandOverOf(const Agreement& agreement, absl::Span<const int> cells, int cell) {
  PartHandOver hand_over;
  for (size_t rank = 0; rank < cells.size(); ++rank) {
    if (cells[rank] != cell) continue;
    const bool needs = agreement.parts[rank] == Part::kNeeds;
    (needs ? hand_over.takers : hand_over.sources).push_back(static_cast<int>(rank));
  }
  if (hand_over.sources.empty()) {
    hand_over.sources.push_back(agreement.sources[static_cast<size_t>(cell)]);
    hand_over.from_copy = true;
  }
  return hand_over;
}

std::vector<size_t> PiecesBetween(const PartHandOver& hand_over, size_t source, size_t taker, size_t pieces) {
  std::vector<size_t> result;
  for (size_t piece = source; piece < pieces; piece += hand_over.sources.size()) {
    if (piece % hand_over.takers.size() == taker) result.push_back(piece);
  }
  return result;
}

BatchShare FirstShareOf(const PartHandOver& hand_over, int rank) {
  const auto& sources = hand_over.sources;
  const auto at = std::ranges::find(sources, rank);
  const int share = at == sources.end() ? -1 : static_cast<int>(at - sources.begin());
  return {share, static_cast<int>(sources.size())};
}

bool IsComputed(const Agreement& agreement, absl::Span<const BatchShare> computed) {
  std::vector<bool> there;
  for (size_t rank = 0; rank < computed.size(); ++rank) {
    if (agreement.parts[rank] == Part::kNeeds) continue;
    const BatchShare& mine = computed[rank];
    if (agreement.parts[rank] != Part::kHas || mine.shares == 0) return false;
    if (mine.share < 0) continue;
    // Who was left out meanwhile may hold a share of another division: 2/3 with 0/2 and 1/2 would be 4/3 of
    // the batch.
    if (!there.empty() && there.size() != static_cast<size_t>(mine.shares)) return false;
    there.resize(static_cast<size_t>(mine.shares));
    if (there[static_cast<size_t>(mine.share)]) return false;
    there[static_cast<size_t>(mine.share)] = true;
  }
  return !there.empty() && std::ranges::count(there, false) == 0;
}

std::vector<int> StepCopyKeepers(absl::Span<const int> machines) {
  const size_t cells = machines.size();
  size_t best_shift = 0, best = 0;
  for (size_t shift = 1; shift < cells && best < cells; ++shift) {
    size_t elsewhere = 0;
    for (size_t cell = 0; cell < cells; ++cell)
      elsewhere += machines[cell] != machines[(cell + shift) % cells] ? 1 : 0;
    if (best_shift > 0 && elsewhere <= best) continue;
    best_shift = shift;
    best = elsewhere;
  }
  std::vector<int> keepers;
  for (size_t cell = 0; best_shift > 0 && cell < cells; ++cell)
    keepers.push_back(static_cast<int>((cell + best_shift) % cells));
  return keepers;
}

}  // namespace gtrain::elastic
