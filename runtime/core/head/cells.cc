#include "runtime/core/head/cells.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "base/probe.h"

namespace gtrain::core {

std::optional<int> CellOf(const GenerationGrant& grant, int number, int unit) {
  if (number < grant.world_size) return number % unit;
  return PlaceOfRank(grant, number).cell;
}

int CopiesOf(absl::Span<const std::optional<int>> cells, int unit, int most) {
  std::vector<int> held(static_cast<size_t>(unit));
  int free = 0;
  for (const std::optional<int>& cell : cells) {
    if (cell && *cell < unit) ++held[static_cast<size_t>(*cell)];
    if (!cell) ++free;
  }
  // Each further copy needs no fewer free ones than the one before.
  for (int copies = 0; copies < most; ++copies) {
    int lacking = 0;
    for (const int have : held) lacking += std::max(0, copies + 1 - have);
    if (lacking > free) return copies;
  }
  return most;
}

void FreeSurplus(const std::vector<size_t>& order, int unit, int copies, std::vector<RankPlace>& places) {
  std::vector<int> held(static_cast<size_t>(unit));
  int free = 0;
  for (RankPlace& place : places) {
    if (place.cell && *place.cell >= unit) {  // of another mesh
      place.process = ProcessId();
      place.cell.reset();
    }
    if (place.cell) ++held[static_cast<size_t>(*place.cell)];
    free += place.cell ? 0 : 1;
  }
  int lacking = 0;
  for (const int have : held) lacking += std::max(0, copies - have);
  for (size_t i = order.size(); i-- > 0 && lacking > free;) {
    RankPlace& place = places[order[i]];
    if (!place.cell || held[static_cast<size_t>(*place.cell)] <= copies) continue;
    GT_PROBE("head.frees_a_part_of_which_there_is_enough");
    --held[static_cast<size_t>(*place.cell)];
    place.process = ProcessId();
    place.cell.reset();
    ++free;
  }
}

std::vector<bool> ChooseByCell(const std::vector<RankPlace>& places, const std::vector<size_t>& order,
                               int unit, int copies) {
  std::vector<bool> members(places.size());
  std::vector<int> left(static_cast<size_t>(unit), copies);
  int lacking = unit * copies;
  for (const size_t i : order) {
    if (!places[i].cell || *places[i].cell >= unit) continue;
    int& of_cell = left[static_cast<size_t>(*places[i].cell)];
    if (of_cell == 0) continue;
    --of_cell;
    --lacking;
    members[i] = true;
  }
  for (const size_t i : order) {
    if (lacking == 0) break;
    if (places[i].cell) continue;
    --lacking;
    members[i] = true;
  }
  return members;
}

namespace {

// Gives the free ones the cells that are lacking: where that can be, those that the placement had in mind,
// which numbers its ranks copy by copy; else, where whole copies lie on each node, first those of the node.
void FillCells(int unit, std::vector<RankPlace>& members) {
  const int copies = static_cast<int>(members.size()) / unit;
  std::vector<int> lacking(static_cast<size_t>(unit), copies);
  std::map<NodeId, std::vector<int>> of_node;  // how many of each cell
  std::map<NodeId, int> ranks_of;
  for (const RankPlace& place : members) {
    ++ranks_of[place.node];
    std::vector<int>& here = of_node[place.node];
    here.resize(static_cast<size_t>(unit));
    if (!place.cell) continue;
    ++here[static_cast<size_t>(*place.cell)];
    --lacking[static_cast<size_t>(*place.cell)];
  }
  for (size_t i = 0; i < members.size(); ++i) {
    RankPlace& place = members[i];
    if (place.cell) continue;
    std::vector<int>& here = of_node[place.node];
    const int each = std::max(1, ranks_of[place.node] / unit);
    int chosen = -1;
    for (int turn = 0; turn < unit; ++turn) {
      const int cell = static_cast<int>((i + static_cast<size_t>(turn)) % static_cast<size_t>(unit));
      if (lacking[static_cast<size_t>(cell)] == 0) continue;
      if (chosen < 0) chosen = cell;
      if (here[static_cast<size_t>(cell)] >= each) continue;
      chosen = cell;
      break;
    }
    place.cell = chosen;
    ++here[static_cast<size_t>(chosen)];
    --lacking[static_cast<size_t>(chosen)];
  }
}

}  // namespace

void SortByCell(const GenerationGrant* last, int unit, std::vector<RankPlace>& members) {
  if (members.size() % static_cast<size_t>(unit) != 0) return;  // no copies: ranks say so themselves
  std::vector<size_t> all(members.size());
  std::iota(all.begin(), all.end(), size_t{0});
  FreeSurplus(all, unit, static_cast<int>(members.size()) / unit, members);
  FillCells(unit, members);
  const int copies = static_cast<int>(members.size()) / unit;
  std::map<ProcessId, int> copy_of;  // of those that were members
  if (last != nullptr) {
    for (const RankPlace& place : last->ranks) copy_of[ProcessOf(*last, place.rank)] = place.rank / unit;
  }
  std::vector<int> rank_of(members.size(), -1);
  std::vector<bool> taken(members.size());
  const auto take = [&](size_t member, int copy) {
    const int rank = copy * unit + members[member].cell.value();
    if (taken[static_cast<size_t>(rank)]) return false;
    taken[static_cast<size_t>(rank)] = true;
    rank_of[member] = rank;
    return true;
  };
  for (size_t i = 0; i < members.size(); ++i) {
    const auto was = copy_of.find(members[i].process);
    if (members[i].process.generation.value == 0 || was == copy_of.end() || was->second >= copies) continue;
    take(i, was->second);
  }
  std::vector<int> next(static_cast<size_t>(unit));  // of each cell, the first copy that may be free
  for (size_t i = 0; i < members.size(); ++i) {
    if (rank_of[i] >= 0) continue;
    int& copy = next[static_cast<size_t>(members[i].cell.value())];
    while (!take(i, copy)) ++copy;
  }
  std::vector<RankPlace> sorted(members.size());
  for (size_t i = 0; i < members.size(); ++i) sorted[static_cast<size_t>(rank_of[i])] = std::move(members[i]);
  members = std::move(sorted);
  for (RankPlace& place : members) place.cell.reset();  // it follows from the rank
}

}  // namespace gtrain::core
