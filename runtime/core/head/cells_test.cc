// Tests which processes are members where a copy of the model lies on several ranks.
#include "runtime/core/head/cells.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "base/rng.h"

namespace gtrain::core {
namespace {

using ::testing::ElementsAre;

RankPlace Place(const std::string& node, int process, std::optional<int> cell) {
  RankPlace place;
  place.node = NodeId(node);
  if (process >= 0) place.process = {{1}, process};
  place.cell = cell;
  return place;
}

std::vector<int> ProcessRanks(const std::vector<RankPlace>& places) {
  std::vector<int> ranks;
  for (const RankPlace& place : places)
    ranks.push_back(place.process.generation.value == 0 ? -1 : place.process.rank);
  return ranks;
}

TEST(Cells, CopiesAreWholeAndFreeOnesFillWhatIsLacking) {
  using Cell = std::optional<int>;
  EXPECT_EQ(CopiesOf(std::vector<Cell>{0, 1, 0, 1}, 2, 8), 2);
  EXPECT_EQ(CopiesOf(std::vector<Cell>{0, 1, 0}, 2, 8), 1) << "nobody has the other half of the second";
  EXPECT_EQ(CopiesOf(std::vector<Cell>{0, 1, 0, std::nullopt}, 2, 8), 2);
  EXPECT_EQ(CopiesOf(std::vector<Cell>{0, 0, 0}, 2, 8), 0);
  EXPECT_EQ(CopiesOf(std::vector<Cell>{std::nullopt, std::nullopt, std::nullopt}, 2, 8), 1);
  EXPECT_EQ(CopiesOf(std::vector<Cell>{0, 1, 0, 1}, 2, 1), 1) << "and no more than may be";
  EXPECT_EQ(CopiesOf(std::vector<Cell>{0, 1, 5}, 2, 8), 1) << "of another mesh";
}

TEST(Cells, WhoStaysKeepsItsCellAndWhereItCanItsCopy) {
  GenerationGrant last;
  last.generation = {1};
  last.world_size = 4;
  for (int rank = 0; rank < 4; ++rank) {
    last.ranks.push_back(Place(rank < 2 ? "a" : "b", -1, std::nullopt));
    last.ranks.back().rank = rank;
  }
  EXPECT_EQ(CellOf(last, 3, 2), 1);
  // Rank 0 is lost: its place is taken by a new process, listed last.
  std::vector<RankPlace> members = {Place("a", 1, 1), Place("b", 2, 0), Place("b", 3, 1),
                                    Place("a", -1, std::nullopt)};
  SortByCell(&last, 2, members);
  EXPECT_THAT(ProcessRanks(members), ElementsAre(-1, 1, 2, 3));
  // One copy is left, of ranks of two copies.
  members = {Place("b", 2, 0), Place("a", 1, 1)};
  SortByCell(&last, 2, members);
  EXPECT_THAT(ProcessRanks(members), ElementsAre(2, 1));
}

// Any processes of any cells: members are whole copies, each in a rank of its cell, and none is dropped that
// could have been one.
TEST(Cells, AnyLossLeavesEachProcessInItsCell) {
  for (uint64_t seed = 1; seed <= 2000; ++seed) {
    Rng rng(seed);
    const int unit = 1 + static_cast<int>(rng.Below(4)), copies = 1 + static_cast<int>(rng.Below(4));
    std::vector<RankPlace> places;
    std::map<int, int> cell_of;
    std::vector<std::optional<int>> cells;
    for (int i = 0; i < unit * copies; ++i) {
      std::optional<int> cell;
      if (rng.Chance(0.7)) cell = static_cast<int>(rng.Below(static_cast<uint64_t>(unit)));
      places.push_back(Place(rng.Chance(0.5) ? "a" : "b", i, cell));
      cells.push_back(cell);
      cell_of[i] = cell.value_or(-1);
    }
    std::vector<size_t> order(places.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    const int whole = CopiesOf(cells, unit, copies);
    const std::vector<bool> chosen = ChooseByCell(places, order, unit, whole);
    std::vector<RankPlace> members;
    for (size_t i = 0; i < places.size(); ++i) {
      if (chosen[i]) members.push_back(places[i]);
    }
    ASSERT_EQ(std::ssize(members), unit * whole) << seed;
    SortByCell(nullptr, unit, members);
    std::set<int> seen;
    for (size_t rank = 0; rank < members.size(); ++rank) {
      const int process = members[rank].process.rank, cell = cell_of[process];
      ASSERT_TRUE(cell < 0 || cell == static_cast<int>(rank) % unit) << seed;
      ASSERT_TRUE(seen.insert(process).second) << seed;
    }
    // One more copy would lack more than there is.
    std::vector<int> held(static_cast<size_t>(unit));
    int free = 0;
    for (const auto& cell : cells) (cell ? held[static_cast<size_t>(*cell)] : free) += 1;
    int lacking = 0;
    for (const int have : held) lacking += std::max(0, whole + 1 - have);
    ASSERT_TRUE(whole == copies || lacking > free) << seed;
  }
}

// Both copies of parts 2 and 3 are lost with their machines, and the only places left are those of the
// others.
TEST(Cells, WhoHoldsAPartOfWhichThereIsEnoughMakesRoom) {
  std::vector<RankPlace> places = {Place("a", 0, 0), Place("a", 1, 1), Place("b", 4, 0), Place("b", 5, 1)};
  const std::vector<size_t> order = {0, 1, 2, 3};
  FreeSurplus(order, 4, 1, places);
  EXPECT_THAT(ProcessRanks(places), ElementsAre(0, 1, -1, -1));
  EXPECT_THAT(ChooseByCell(places, order, 4, 1), ElementsAre(true, true, true, true));
  SortByCell(nullptr, 4, places);
  EXPECT_THAT(ProcessRanks(places), ElementsAre(0, 1, -1, -1));
  // The same without anybody having looked before, and members that are no copies.
  places = {Place("a", 2, 2), Place("a", 3, 3), Place("b", 6, 2), Place("b", 7, 3)};
  SortByCell(nullptr, 4, places);
  EXPECT_THAT(ProcessRanks(places), ElementsAre(-1, -1, 2, 3));
  places = {Place("a", 2, 2), Place("a", 3, 3)};
  SortByCell(nullptr, 4, places);
  EXPECT_THAT(ProcessRanks(places), ElementsAre(2, 3));
}

// Each node has whole copies: what is lost on two nodes at once is filled on each of them.
TEST(Cells, ANewProcessTakesTheCellThatItsNodeLacks) {
  std::vector<RankPlace> members = {Place("a", -1, std::nullopt), Place("a", 1, 0),
                                    Place("b", -1, std::nullopt), Place("b", 3, 1)};
  SortByCell(nullptr, 2, members);
  std::map<std::string, std::set<int>> cells;
  for (size_t rank = 0; rank < members.size(); ++rank)
    cells[members[rank].node.value].insert(static_cast<int>(rank) % 2);
  EXPECT_THAT(cells["a"], ElementsAre(0, 1));
  EXPECT_THAT(cells["b"], ElementsAre(0, 1));
}

}  // namespace
}  // namespace gtrain::core
