#include "actors/plan/placement.h"

#include <gtest/gtest.h>

#include <map>

namespace gtrain::actors {
namespace {

// Two machines of three processes each.
std::vector<Place> Six() {
  std::vector<Place> places;
  for (int rank = 0; rank < 6; ++rank) places.push_back({rank, rank < 3 ? "a" : "b", 0});
  return places;
}

std::vector<int> Made(std::vector<Place> places, Spread spread, int own, int count) {
  std::vector<int> ranks;
  for (int i = 0; i < count; ++i) {
    const auto at = PickPlace(places, spread, own);
    if (!at) return ranks;
    ++places[*at].mine;
    ranks.push_back(places[*at].rank);
  }
  return ranks;
}

TEST(Placement, TheOwnersProcessIsTheLastOfEquals) {
  EXPECT_EQ(Made(Six(), Spread::kProcesses, 0, 7), (std::vector<int>{1, 2, 3, 4, 5, 0, 1}));
  EXPECT_EQ(Made(Six(), Spread::kProcesses, 4, 6), (std::vector<int>{5, 0, 1, 2, 3, 4}));
}

TEST(Placement, MachinesHaveTheirTurnBeforeProcesses) {
  EXPECT_EQ(Made(Six(), Spread::kNodes, 0, 4), (std::vector<int>{1, 3, 2, 4}));
}

TEST(Placement, PackingStaysOnTheOwnersMachine) {
  EXPECT_EQ(Made(Six(), Spread::kPack, 4, 4), (std::vector<int>{5, 3, 4, 5}));
}

TEST(Placement, WhereItIsSaidThereItIs) {
  EXPECT_EQ(Made(Six(), Spread::kHere, 2, 2), (std::vector<int>{2, 2}));
  EXPECT_EQ(PlaceOfRank(Six(), 5), 5u);
  EXPECT_EQ(PlaceOfRank(Six(), 6), std::nullopt);
  EXPECT_EQ(PickPlace(Six(), Spread::kProcesses, 9), std::nullopt);  // the owner is no member
}

TEST(Placement, WhoHasFewerIsNext) {
  auto places = Six();
  for (Place& place : places) place.mine = 3;
  places[2].mine = 1;
  EXPECT_EQ(Made(places, Spread::kProcesses, 0, 3), (std::vector<int>{2, 2, 1}));
}

}  // namespace
}  // namespace gtrain::actors
