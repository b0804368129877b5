#include "actors/plan/placement.h"

#include <map>
#include <tuple>

namespace gtrain::actors {

std::optional<size_t> PlaceOfRank(const std::vector<Place>& places, int rank) {
  for (size_t i = 0; i < places.size(); ++i) {
    if (places[i].rank == rank) return i;
  }
  return std::nullopt;
}

std::optional<size_t> PickPlace(const std::vector<Place>& places, Spread spread, int own_rank,
                                PlaceRules rules) {
  const std::optional<size_t> own = PlaceOfRank(places, own_rank);
  if (spread == Spread::kHere || !own) return own;
  std::map<absl::string_view, size_t> on_node;
  if (spread == Spread::kNodes) {
    for (const Place& place : places) on_node[place.node] += place.mine;
  }
  // Of equals the next behind the owner, and the owner itself last.
  const auto order = [&](size_t i) {
    const size_t behind = (i + places.size() - *own - 1) % places.size();
    const size_t node = spread == Spread::kNodes ? on_node[places[i].node] : 0;
    return std::tuple(rules.away && i == *own, node, places[i].mine, behind);
  };
  std::optional<size_t> best;
  for (size_t i = 0; i < places.size(); ++i) {
    if (spread == Spread::kPack && places[i].node != places[*own].node) continue;
    if (rules.strict && (places[i].mine > 0 || on_node[places[i].node] > 0)) continue;
    if (!best || order(i) < order(*best)) best = i;
  }
  return best;
}

}  // namespace gtrain::actors
