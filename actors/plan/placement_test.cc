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

TEST(Placement, StrictlyApartIsAPlaceOfItsOwnOrNone) {
  const std::vector<Place> places = {{0, "a", 0}, {1, "a", 1}, {2, "b", 0}, {3, "c", 0}};
  EXPECT_EQ(PickPlace(places, Spread::kProcesses, 2, {.strict = true}), 3u);
  EXPECT_EQ(PickPlace(places, Spread::kNodes, 3, {.strict = true}), 2u);  // rank 0 has a machine beside it
  EXPECT_EQ(PickPlace({{0, "a", 1}, {1, "b", 1}}, Spread::kProcesses, 0, {.strict = true}), std::nullopt);
  EXPECT_EQ(PickPlace({{0, "a", 1}, {1, "a", 0}}, Spread::kNodes, 0, {.strict = true}), std::nullopt);
  EXPECT_EQ(PickPlace({{0, "a", 1}, {1, "a", 0}}, Spread::kNodes, 0), 1u);
}

TEST(Placement, AwayIsTheOwnersProcessOnlyWhereThereIsNoOther) {
  EXPECT_EQ(PickPlace({{0, "a", 0}, {1, "a", 9}}, Spread::kProcesses, 0, {.away = true}), 1u);
  EXPECT_EQ(PickPlace({{0, "a", 0}, {1, "b", 9}}, Spread::kPack, 0, {.away = true}), 0u);
  EXPECT_EQ(PickPlace({{0, "a", 0}, {1, "b", 9}}, Spread::kHere, 0, {.away = true}), 0u);
}

}  // namespace
}  // namespace gtrain::actors
