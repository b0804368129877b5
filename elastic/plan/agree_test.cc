#include "elastic/plan/agree.h"

#include <algorithm>

#include "base/rng.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain::elastic {
namespace {

using ::testing::ElementsAre;

// All hold the same.
Agreement AgreeAlike(const std::vector<MemberState>& members) {
  return Agree(members, std::vector<int>(members.size()), 1);
}

TEST(Agree, NobodyHasAState) {
  const Agreement fresh = AgreeAlike({{-1, -1}, {-1, -1}});
  EXPECT_EQ(fresh.step, -1);
  EXPECT_EQ(fresh.source(), 0);
  EXPECT_TRUE(fresh.AnyNeeds());
}

// Half a copy of a state that died with its owners is nothing to begin with.
TEST(Agree, ARunBeginsWithMemoryThatNoCopyHasTouched) {
  EXPECT_EQ(AgreeAlike({{-1, -1, false}, {-1, -1, true}}).source(), 1);
  EXPECT_EQ(AgreeAlike({{-1, -1, false}, {-1, -1, false}}).source(), -1);
  EXPECT_EQ(AgreeAlike({{-1, -1, true}, {4, -1, false}}).source(), 1);
}

TEST(Agree, WhoHoldsTheNewestStepRollsForward) {
  const Agreement agreement = AgreeAlike({{6, 7}, {7, 7}, {-1, -1}, {6, 7}});
  EXPECT_EQ(agreement.step, 7);
  EXPECT_EQ(agreement.source(), 1);
  EXPECT_THAT(agreement.parts,
              ElementsAre(Part::kRollsForward, Part::kHas, Part::kNeeds, Part::kRollsForward));
}

TEST(Agree, GradientsThatNobodyAppliedAreWorthNothing) {
  const Agreement agreement = AgreeAlike({{6, 7}, {6, -1}});
  EXPECT_EQ(agreement.step, 6);
  EXPECT_THAT(agreement.parts, ElementsAre(Part::kHas, Part::kHas));
  EXPECT_FALSE(agreement.AnyNeeds());
}

// A copy that was torn, a member of an old generation that returns, and gradients without a state to apply
// them to.
TEST(Agree, WhoIsBehindNeedsTheState) {
  const Agreement agreement = AgreeAlike({{9, -1}, {7, 8}, {-1, 9}, {8, -1}, {8, 8}});
  EXPECT_THAT(agreement.parts,
              ElementsAre(Part::kHas, Part::kNeeds, Part::kNeeds, Part::kNeeds, Part::kNeeds));
}

// Cell 1 is lost with its only rank; rank 0 has its copies, and can take back its last step.
TEST(Agree, WithoutAWholeNewestStepAllGoBackByOne) {
  const std::vector<int> cells = {0, 1, 2};
  const Agreement back = Agree({{8, -1, false, 7, {{1, 7}, {1, 6}}}, {-1}, {7, 8, false, 6}}, cells, 3);
  EXPECT_EQ(back.step, 7);
  EXPECT_THAT(back.sources, ElementsAre(0, 0, 2));
  EXPECT_THAT(back.parts, ElementsAre(Part::kUndoes, Part::kNeeds, Part::kHas));
  EXPECT_TRUE(back.AnyUndoes());

  const Agreement stays = Agree({{8, -1, false, 7, {{1, 7}, {1, 8}}}, {-1}, {7, 8, false, 6}}, cells, 3);
  EXPECT_EQ(stays.step, 8);
  EXPECT_THAT(stays.parts, ElementsAre(Part::kHas, Part::kNeeds, Part::kRollsForward));
  EXPECT_FALSE(stays.AnyUndoes());
}

// A copy that is two steps old is of no use: nobody can go back as far. Neither is one of another part.
TEST(Agree, ACopyOfNoUseIsNone) {
  const std::vector<int> cells = {0, 1, 2};
  EXPECT_EQ(Agree({{8, -1, false, 7, {{1, 6}}}, {-1}, {8, -1, false, 7}}, cells, 3).step, -1);
  EXPECT_EQ(Agree({{8, -1, false, 7, {{2, 8}, {2, 7}}}, {-1}, {8, -1, false, 7}}, cells, 3).step, -1);
}

// Who cannot take back its step needs the state of that step, and so its copy.
TEST(Agree, WhoCannotGoBackNeedsTheState) {
  const std::vector<int> cells = {0, 1};
  const Agreement lost = Agree({{8, -1, false, -1, {{1, 7}}}, {-1}}, cells, 2);
  EXPECT_EQ(lost.step, -1);
  const std::vector<int> two_copies = {0, 1, 0, 1};
  const Agreement found = Agree({{8, -1, false, -1}, {-1}, {8, -1, false, 7, {{1, 7}}}, {-1}}, two_copies, 2);
  EXPECT_EQ(found.step, 7);
  EXPECT_THAT(found.parts, ElementsAre(Part::kNeeds, Part::kNeeds, Part::kUndoes, Part::kNeeds));
  EXPECT_THAT(found.sources, ElementsAre(2, 2));
}

// A process that waited for a place has step 4 as it was made before the others went back to 3.
TEST(Agree, WhatIsOfAnOlderLineIsNothing) {
  const std::vector<int> cells = {0, 1, 0};
  const Agreement agreement =
      Agree({{4, -1, false, 3, {}, 1}, {4, -1, false, 3, {}, 1}, {4, -1, false, 3, {{1, 4}}, 0}}, cells, 2);
  EXPECT_EQ(agreement.step, 4);
  EXPECT_EQ(agreement.line, 1);
  EXPECT_THAT(agreement.parts, ElementsAre(Part::kHas, Part::kHas, Part::kNeeds));
  const Agreement lost = Agree({{4, -1, false, 3, {}, 1}, {-1}, {5, -1, false, 4, {{1, 4}}, 0}}, cells, 2);
  EXPECT_EQ(lost.step, -1);
  EXPECT_EQ(lost.line, 2) << "what was is to be made again";
  const Agreement back = Agree({{8, -1, false, 7, {{1, 7}}, 2}, {-1}, {8, -1, false, 7, {}, 2}}, cells, 2);
  EXPECT_EQ(back.step, 7);
  EXPECT_EQ(back.line, 3);
}

// Generations of any length in which anybody may be lost at any point: a rank that was there never needs the
// state of another one.
TEST(Agree, SurvivorsOfAGenerationNeverNeedAState) {
  Rng rng(1);
  for (int life = 0; life < 2000; ++life) {
    std::vector<MemberState> ranks(1 + rng.Below(6), {0, -1});
    for (int generation = 0; generation < 8; ++generation) {
      const Agreement agreement = AgreeAlike(ranks);
      ASSERT_FALSE(agreement.AnyNeeds());
      ASSERT_GE(agreement.source(), 0);
      for (MemberState& rank : ranks) rank = {agreement.step, -1};
      const int64_t steps = rng.Below(3);
      for (MemberState& rank : ranks) rank.applied += steps;
      // The step in which the generation ends: each rank gets as far as the others let it.
      const int64_t last = ranks[0].applied + 1;
      if (rng.Below(4) != 0) {
        for (MemberState& rank : ranks) rank.held = rng.Below(2) == 0 ? last : -1;
        const bool all_hold =
            std::ranges::all_of(ranks, [&](const MemberState& rank) { return rank.held == last; });
        for (MemberState& rank : ranks) rank.applied += all_hold && rng.Below(2) == 0 ? 1 : 0;
      }
      while (ranks.size() > 1 && rng.Below(2) == 0)
        ranks.erase(ranks.begin() + static_cast<ptrdiff_t>(rng.Below(ranks.size())));
    }
  }
}

// Ranks 0 and 2 hold one half of the model, 1 and 3 the other.
TEST(Agree, EachPartHasItsOwnSource) {
  const std::vector<int> cells = {0, 1, 0, 1};
  const Agreement agreement = Agree({{-1, -1}, {6, 7}, {7, 7}, {6, 7}}, cells, 2);
  EXPECT_EQ(agreement.step, 7);
  EXPECT_THAT(agreement.sources, ElementsAre(2, 1)) << "who rolls forward has it by then";
  EXPECT_THAT(agreement.parts,
              ElementsAre(Part::kNeeds, Part::kRollsForward, Part::kHas, Part::kRollsForward));
}

TEST(Agree, APartThatIsLostTakesTheOthersWithIt) {
  const std::vector<int> cells = {0, 1, 0, 1};
  const Agreement agreement =
      Agree({{7, 7, false}, {-1, -1, false}, {7, 7, false}, {-1, -1, true}}, cells, 2);
  EXPECT_EQ(agreement.step, -1);
  EXPECT_THAT(agreement.sources, ElementsAre(-1, 3))
      << "training has changed what the first part was made of";
  EXPECT_EQ(agreement.source(), -1);
  EXPECT_THAT(agreement.parts, ElementsAre(Part::kNeeds, Part::kNeeds, Part::kNeeds, Part::kNeeds));
}

TEST(Agree, ARunOfPartsBeginsWithTheLowestOfEach) {
  const std::vector<int> cells = {0, 1, 0, 1};
  EXPECT_THAT(Agree({{}, {-1, -1, false}, {}, {}}, cells, 2).sources, ElementsAre(0, 3));
}

}  // namespace
}  // namespace gtrain::elastic
