#include "checkpoint/plan/garbage.h"

#include <gtest/gtest.h>

namespace gtrain::ckpt {
namespace {

constexpr SaveId Id(uint64_t epoch, int64_t step) { return {.epoch = epoch, .step = step}; }

TEST(Garbage, ANewerCommitOfItsEpochOvertakesAnAttempt_C2) {
  EXPECT_EQ(IsAbandoned(Id(2, 10), {{Id(2, 20)}}), Abandoned::kYes);
  EXPECT_EQ(IsAbandoned(Id(2, 10), {{Id(2, 5)}}), Abandoned::kNo);
  EXPECT_EQ(IsAbandoned(Id(2, 10), {{Id(1, 20)}}), Abandoned::kNo);
  EXPECT_EQ(IsAbandoned(Id(2, 10), {}), Abandoned::kNo);
}

TEST(Garbage, AnAttemptOfALowerEpochMayBeUnderWay_C2) {
  EXPECT_EQ(IsAbandoned(Id(1, 10), {{Id(2, 5)}}), Abandoned::kWhenOld);
  EXPECT_EQ(IsAbandoned(Id(1, 10), {{Id(2, 5)}, {Id(1, 20)}}), Abandoned::kYes);
}

TEST(Garbage, OfAPut) {
  const StoredCheckpoints stored{.committed = {{Id(2, 20)}}, .pinned = {Id(2, 10)}};
  const auto put = [&](absl::string_view key) { return IsPutAbandoned(key, stored); };
  EXPECT_EQ(put(AttemptKey(Id(2, 5), ShardName(0, 1))), Abandoned::kYes);
  EXPECT_EQ(put(ManifestKey(Id(2, 5))), Abandoned::kYes);
  EXPECT_EQ(put(AttemptKey(Id(2, 25), ShardName(0, 1))), Abandoned::kNo);
  EXPECT_EQ(put(AttemptKey(Id(1, 25), ShardName(0, 1))), Abandoned::kWhenOld);
  EXPECT_EQ(put(AttemptKey(Id(2, 10), ShardName(0, 1))), Abandoned::kWhenOld) << "pinned: a copy";
  for (const std::string& key : {OwnerKey(3), PinKey(Id(2, 5)), ProbeKey(1, 2), std::string("leases/x")})
    EXPECT_EQ(put(key), Abandoned::kWhenOld) << key;
}

TEST(Garbage, OfALease) {
  EXPECT_EQ(IsLeaseAbandoned({.epoch = 1, .renewal = 99}, 2), Abandoned::kWhenOld);
  EXPECT_EQ(IsLeaseAbandoned({.epoch = 2, .renewal = 1}, 2), Abandoned::kNo);
  EXPECT_EQ(IsLeaseAbandoned({.epoch = 3, .renewal = 1}, 2), Abandoned::kNo) << "claimed since the listing";
}

}  // namespace
}  // namespace gtrain::ckpt
