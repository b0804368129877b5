#include <utility>

#include "topology/place/policy.h"

namespace gtrain::topology {

std::vector<int32_t> PlaceSpread(const Fabric& fabric, const Mesh& mesh, const std::vector<int32_t>& usable) {
  std::vector<std::pair<size_t, size_t>> machines;  // what is left of each, in `usable`
  for (size_t i = 0; i < usable.size();) {
    const size_t from = i;
    const int32_t machine = fabric.slots[usable[i]].machine;
    while (i < usable.size() && fabric.slots[usable[i]].machine == machine) ++i;
    machines.emplace_back(from, i);
  }
  std::vector<int32_t> slot_of_rank;
  const size_t ranks = static_cast<size_t>(mesh.ranks());
  while (slot_of_rank.size() < ranks) {
    for (auto& [next, end] : machines) {
      if (next < end && slot_of_rank.size() < ranks) slot_of_rank.push_back(usable[next++]);
    }
  }
  return slot_of_rank;
}

}  // namespace gtrain::topology
