#include "elastic/plan/hand_over.h"

#include <algorithm>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain::elastic {
namespace {

using ::testing::ElementsAre;

TEST(HandOver, WhoHasAPartGivesItToThoseThatNeedIt) {
  const std::vector<int> cells = {0, 1, 0, 1, 0, 1};
  const Agreement agreement = Agree({{7}, {7}, {-1}, {-1}, {6, 7}, {-1}}, cells, 2);
  const PartHandOver first = HandOverOf(agreement, cells, 0);
  EXPECT_THAT(first.sources, ElementsAre(0, 4));
  EXPECT_THAT(first.takers, ElementsAre(2));
  EXPECT_FALSE(first.from_copy);
  const PartHandOver second = HandOverOf(agreement, cells, 1);
  EXPECT_THAT(second.sources, ElementsAre(1));
  EXPECT_THAT(second.takers, ElementsAre(3, 5));
}

TEST(HandOver, ThatOfAPartWithoutRanksComesFromACopy) {
  const std::vector<int> cells = {0, 1};
  const Agreement agreement = Agree({{7, -1, false, 6, {{1, 7}, {1, 6}}}, {-1}}, cells, 2);
  EXPECT_EQ(agreement.step, 7);
  const PartHandOver hand_over = HandOverOf(agreement, cells, 1);
  EXPECT_THAT(hand_over.sources, ElementsAre(0));
  EXPECT_THAT(hand_over.takers, ElementsAre(1));
  EXPECT_TRUE(hand_over.from_copy);
  EXPECT_TRUE(HandOverOf(agreement, cells, 0).takers.empty());
}

// n = 1,000 ranks: all sources together send each piece once, and no source more than its share.
TEST(HandOver, EachPieceLeavesOnceAndReachesOneTaker) {
  for (const auto& [sources, takers] :
       {std::pair<int, int>{1, 1}, {3, 1}, {1, 3}, {3, 7}, {999, 1}, {1, 999}}) {
    PartHandOver hand_over;
    hand_over.sources.resize(static_cast<size_t>(sources));
    hand_over.takers.resize(static_cast<size_t>(takers));
    constexpr size_t kPieces = 2'500;
    std::set<size_t> seen;
    size_t most = 0;
    for (size_t source = 0; source < hand_over.sources.size(); ++source) {
      size_t sent = 0;
      for (size_t taker = 0; taker < hand_over.takers.size(); ++taker) {
        const std::vector<size_t> pieces = PiecesBetween(hand_over, source, taker, kPieces);
        sent += pieces.size();
        for (const size_t piece : pieces) {
          EXPECT_TRUE(seen.insert(piece).second) << "piece " << piece << " is sent twice";
          EXPECT_EQ(piece % hand_over.takers.size(), taker) << "who hands it on to the other takers";
        }
      }
      most = std::max(most, sent);
    }
    EXPECT_EQ(seen.size(), kPieces) << sources << " to " << takers;
    EXPECT_LE(most, kPieces / hand_over.sources.size() + 1);
  }
}

// A step counts as computed where each share of it is there once.
TEST(HandOver, AStepIsComputedOrIsNot) {
  const std::vector<int> cells(4);
  const Agreement grows = Agree({{7}, {-1}, {7}, {-1}}, cells, 1);
  EXPECT_TRUE(IsComputed(grows, {{1, 2}, {0, 0}, {0, 2}, {0, 0}}));
  EXPECT_FALSE(IsComputed(grows, {{1, 2}, {0, 0}, {0, 0}, {0, 0}})) << "the gradients of one are not whole";
  EXPECT_FALSE(IsComputed(grows, {{1, 3}, {0, 0}, {0, 3}, {0, 0}})) << "a third rank is lost";
  EXPECT_FALSE(IsComputed(grows, {{0, 2}, {0, 0}, {0, 2}, {0, 0}})) << "one share twice, and one never";
  EXPECT_TRUE(IsComputed(grows, {{0, 1}, {0, 0}, {-1, 1}, {0, 0}})) << "who was new had no share";
  const Agreement back = Agree({{7}, {7}, {7}}, {0, 0, 0}, 1);
  EXPECT_FALSE(IsComputed(back, {{2, 3}, {0, 2}, {1, 2}}))
      << "the first was left out while the others computed again";
  EXPECT_FALSE(IsComputed(back, {{0, 2}, {1, 2}, {2, 3}}));
  const Agreement rolls = Agree({{7}, {6, 7}}, {0, 0}, 1);
  EXPECT_FALSE(IsComputed(rolls, {{0, 2}, {1, 2}}));
  EXPECT_FALSE(IsComputed(Agree({{-1}, {-1}}, {0, 0}, 1), {{0, 0}, {0, 0}}));
}

TEST(StepCopyKeepers, CopiesLieOnOtherMachines) {
  EXPECT_THAT(StepCopyKeepers({0, 1}), ElementsAre(1, 0));
  EXPECT_THAT(StepCopyKeepers({0, 0, 1, 1}), ElementsAre(2, 3, 0, 1));
  EXPECT_THAT(StepCopyKeepers({0, 1, 2}), ElementsAre(1, 2, 0));
}

TEST(StepCopyKeepers, OnOneMachineTheyLieWithAnotherProcess) {
  EXPECT_THAT(StepCopyKeepers({0, 0, 0}), ElementsAre(1, 2, 0));
  EXPECT_TRUE(StepCopyKeepers({0}).empty());
}

// Three of four parts on one machine: two of them have no other machine than that of the fourth's.
TEST(StepCopyKeepers, AsManyAsCanAreElsewhere) {
  const std::vector<int> machines = {0, 0, 0, 1};
  const std::vector<int> keepers = StepCopyKeepers(machines);
  int elsewhere = 0;
  for (size_t cell = 0; cell < machines.size(); ++cell)
    elsewhere += machines[cell] != machines[static_cast<size_t>(keepers[cell])] ? 1 : 0;
  EXPECT_EQ(elsewhere, 2);
}

}  // namespace
}  // namespace gtrain::elastic
