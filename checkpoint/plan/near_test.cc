#include "checkpoint/plan/near.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace gtrain::ckpt {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

constexpr uint64_t kPlenty = 1 << 20;

SaveId At(int64_t step, uint64_t timeline = 1) {
  return {.epoch = 1, .timeline = timeline, .step = step, .generation = timeline, .attempt = 1};
}

NearCopy Of(int64_t step, const char* file = "rank-00000-of-00002.safetensors", uint64_t timeline = 1) {
  return {.job = "a", .attempt = At(step, timeline), .file = file, .bytes = 100, .age = absl::Seconds(9)};
}

NearCopy OfJob(const char* job, absl::Duration age, uint64_t bytes = 100) {
  return {.job = job, .attempt = At(1), .file = "f", .bytes = bytes, .age = age};
}

TEST(Near, KeepsTheNewestCommittedAndTheOneUnderWay) {
  const std::vector<NearCopy> held = {Of(10), Of(20), Of(30)};
  const NearPlan plan = PlanNear(held, Of(40), At(30), kPlenty);
  EXPECT_TRUE(plan.fits);
  EXPECT_THAT(plan.drop, ElementsAre(0, 1));
  EXPECT_EQ(plan.bytes, 100u);
}

TEST(Near, AnAttemptThatCameToNothingGoesWithTheNextOne) {
  const std::vector<NearCopy> held = {Of(30), Of(40)};  // 40 failed
  EXPECT_THAT(PlanNear(held, Of(50), At(30), kPlenty).drop, ElementsAre(1));
}

// A writer that does not know that 40 is committed must not drop the copies of ranks that know.
TEST(Near, FilesOfOtherRanksThatMayBeCommittedStay) {
  const std::vector<NearCopy> held = {Of(40, "rank-00001-of-00002.safetensors"), Of(40)};
  EXPECT_THAT(PlanNear(held, Of(50), At(30), kPlenty).drop, ElementsAre(1));
}

TEST(Near, WithoutACommittedOneNothingGoes) {
  EXPECT_THAT(PlanNear({Of(10), Of(20)}, Of(30), std::nullopt, kPlenty).drop, IsEmpty());
}

TEST(Near, ALateWriterOfAnEarlierTimelineDropsNothingNewer_C3) {
  const std::vector<NearCopy> held = {Of(110, "rank-00000-of-00002.safetensors", 2)};
  EXPECT_THAT(PlanNear(held, Of(200), At(100), kPlenty).drop, IsEmpty());
}

TEST(Near, TheCapHolds) {
  const std::vector<NearCopy> held = {Of(10), Of(20)};
  EXPECT_TRUE(PlanNear(held, Of(30), At(20), 200).fits);
  EXPECT_FALSE(PlanNear(held, Of(30), At(20), 199).fits);
  EXPECT_FALSE(PlanNear({}, Of(30), {}, 99).fits);
  NearCopy huge = Of(30);
  huge.bytes = UINT64_MAX;
  EXPECT_FALSE(PlanNear(held, huge, At(20), kPlenty).fits);
  NearCopy writing = Of(5);
  writing.whole = false;  // its writer is at it, whatever we think of it
  const NearPlan plan = PlanNear({writing}, Of(30), At(20), 150);
  EXPECT_FALSE(plan.fits);
  EXPECT_THAT(plan.drop, IsEmpty());
}

TEST(Near, ForRoomTheLongestIdleJobGoesFirstAndNoneThatIsAtIt) {
  std::vector<NearCopy> held = {OfJob("b", 2 * kNearIdle), OfJob("c", 3 * kNearIdle),
                                OfJob("c", 4 * kNearIdle), OfJob("d", kNearIdle - absl::Seconds(1))};
  EXPECT_THAT(PlanNear(held, Of(30), {}, 500).drop, IsEmpty());
  EXPECT_THAT(PlanNear(held, Of(30), {}, 400).drop, UnorderedElementsAre(1, 2));
  EXPECT_THAT(PlanNear(held, Of(30), {}, 200).drop, UnorderedElementsAre(0, 1, 2));
  EXPECT_FALSE(PlanNear(held, Of(30), {}, 199).fits);
  held[0].whole = false;
  EXPECT_THAT(PlanNear(held, Of(30), {}, 200).drop, UnorderedElementsAre(1, 2));
}

TEST(Near, NamesOfFiles_C10) {
  for (const std::string& name : {ShardName(3, 8), IndexName(3, 8), OrderName(8)})
    EXPECT_TRUE(IsNearFile(name)) << name;
  for (const char* name : {"", "rank-00003-of-00008.json", "rank-/../x.safetensors", "x.safetensors"})
    EXPECT_FALSE(IsNearFile(name)) << name;
}

}  // namespace
}  // namespace gtrain::ckpt
