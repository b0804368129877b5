// Save, load and retention plans as values.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "absl/strings/str_cat.h"
#include "base/rng.h"
#include "checkpoint/format/hash.h"
#include "checkpoint/plan/load_plan.h"
#include "checkpoint/plan/retention.h"
#include "checkpoint/plan/save_plan.h"

namespace gtrain::ckpt {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Registered Tensor(std::string name, std::vector<int64_t> shape, DType dtype = DType::kFloat32) {
  const uint64_t bytes = *ElementCount(shape, dtype) * DTypeSize(dtype);
  return {{.name = std::move(name), .dtype = dtype, .shape = std::move(shape)}, bytes};
}

Registered Blob(std::string name, uint64_t bytes) {
  return {{.name = std::move(name), .layout = Layout::kPerRank}, bytes};
}

// A manifest as `world` ranks would commit it; hashes are of no interest here.
Manifest Committed(const std::vector<Registered>& registered, int world) {
  Manifest m{.world_size = world};
  for (const Registered& r : registered) m.tensors.push_back(r.tensor);
  for (int rank = 0; rank < world; ++rank) {
    const ShardPlan plan = PlanShard(registered, rank, world);
    ShardFile file{.name = ShardName(rank, world), .bytes = plan.file_bytes(), .xxh3 = Xxh3Hex("")};
    file.chunks.assign((file.bytes + kChunkBytes - 1) / kChunkBytes, Xxh3Hex(""));
    file.slices = plan.slices;
    m.files.push_back(file);
  }
  return m;
}

TEST(SavePlan, OneRankWritesEverythingWideFirst) {
  const ShardPlan plan = PlanShard({Tensor("b", {3}, DType::kBFloat16), Blob("rng", 5), Tensor("w", {2, 2}),
                                    Tensor("step", {}, DType::kInt64)},
                                   0, 1);
  EXPECT_THAT(plan.pieces, ElementsAre(Piece{3, 0, 8}, Piece{2, 0, 16}, Piece{0, 0, 6}, Piece{1, 0, 5}));
  const auto header = ParseShardHeader(plan.header, plan.file_bytes());
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->tensors[1].name, "w");
  EXPECT_THAT(header->tensors[1].shape, ElementsAre(2, 2));
  for (const TensorEntry& t : header->tensors) EXPECT_EQ(t.begin % DTypeSize(t.dtype), 0u) << t.name;
}

TEST(SavePlan, LargeTensorsAreCutSmallOnesAreNot) {
  const std::vector<Registered> registered = {Tensor("large", {1 << 20}), Tensor("small", {1000})};
  const ShardPlan first = PlanShard(registered, 0, 2);
  ASSERT_EQ(first.pieces.size(), 1u);
  const auto header = ParseShardHeader(first.header, first.file_bytes());
  ASSERT_TRUE(header.ok());
  EXPECT_EQ(header->tensors[0].name, "large[0:524784]");
  EXPECT_TRUE(IsPieceName(header->tensors[0].name));
  EXPECT_EQ(PlanShard(registered, 1, 2).pieces.size(), 2u);
}

TEST(SavePlan, SharesAreDisjointCompleteAndBalanced) {
  Rng rng(7);
  for (int round = 0; round < 60; ++round) {
    std::vector<Registered> registered;
    const int count = static_cast<int>(rng.Below(12));
    uint64_t largest_whole = 0, total = 0;
    for (int i = 0; i < count; ++i) {
      const DType dtype = static_cast<DType>(rng.Below(7));
      registered.push_back(
          Tensor(absl::StrCat("t", i),
                 {static_cast<int64_t>(rng.Below(3) == 0 ? rng.Below(3000000) : rng.Below(2000))}, dtype));
      const uint64_t bytes = registered.back().bytes;
      total += bytes;
      largest_whole = std::max(largest_whole, std::min(bytes, kWholeTensorBytesMax));
    }
    registered.push_back(Blob("rng", rng.Below(100)));
    const int world = 1 + static_cast<int>(rng.Below(9));
    const Manifest m = Committed(registered, world);
    EXPECT_TRUE(Validate(m).ok()) << Validate(m);
    for (int rank = 0; rank < world; ++rank) {
      const ShardPlan plan = PlanShard(registered, rank, world);
      EXPECT_LE(plan.data_bytes, total / world + largest_whole + 64 + 100 + world);
      EXPECT_TRUE(ParseShardHeader(plan.header, plan.file_bytes()).ok());
    }
  }
}

TEST(SavePlan, PieceNamesAreReserved) {
  EXPECT_TRUE(IsPieceName("w[0:4096]"));
  for (const char* name : {"w", "w[0]", "layers[0].w", "w[:4]", "[0:4", "w[a:4]", "]", ":]"}) {
    EXPECT_FALSE(IsPieceName(name)) << name;
  }
}

TEST(SavePlan, RegistrationHashSeesNamesTypesAndShapes) {
  const std::string hash = RegistrationHash({Tensor("w", {2, 3}), Blob("rng", 8)});
  EXPECT_EQ(hash, RegistrationHash({Tensor("w", {2, 3}), Blob("rng", 9)}));
  EXPECT_NE(hash, RegistrationHash({Tensor("w", {3, 2}), Blob("rng", 8)}));
  EXPECT_NE(hash, RegistrationHash({Tensor("w", {2, 3}, DType::kInt32), Blob("rng", 8)}));
  EXPECT_NE(hash, RegistrationHash({Blob("rng", 8), Tensor("w", {2, 3})}));
}

// Whatever world wrote it, every rank of any other world reads every replicated byte once (C6).
TEST(LoadPlan, AnyWorldSizeReadsEveryByteOnce_C6) {
  const std::vector<Registered> registered = {Tensor("a", {700000}), Tensor("b", {333}, DType::kUint8),
                                              Blob("rng", 40)};
  for (int wrote : {1, 3, 8}) {
    const Manifest m = Committed(registered, wrote);
    for (int rank : {0, 2, 5}) {
      const auto plan = PlanLoad(m, registered, rank);
      ASSERT_TRUE(plan.ok()) << plan.status();
      std::map<size_t, uint64_t> bytes;
      for (const FileRead& read : plan->reads) {
        for (const Copy& c : read.copies) {
          bytes[c.registered] += c.bytes;
          EXPECT_LE(read.chunks.front() * kChunkBytes, c.file_begin);
          EXPECT_GE((read.chunks.back() + 1) * kChunkBytes, c.file_begin + c.bytes);
        }
      }
      EXPECT_EQ(bytes[0], registered[0].bytes);
      EXPECT_EQ(bytes[1], registered[1].bytes);
      EXPECT_EQ(plan->restored[2], rank < wrote);
      EXPECT_EQ(bytes[2], rank < wrote ? 40u : 0u);
    }
  }
}

TEST(LoadPlan, WhatDoesNotFitIsNamed_C4_C6) {
  const Manifest m = Committed({Tensor("w", {2, 3}), Tensor("old", {1}), Blob("rng", 8)}, 2);
  const auto missing = PlanLoad(m, {Tensor("w", {3, 2}), Tensor("adam.m", {6}), Blob("rng", 9)}, 0);
  ASSERT_TRUE(absl::IsFailedPrecondition(missing.status()));
  const std::string text(missing.status().message());
  EXPECT_THAT(text, HasSubstr("\"w\" is F32[2,3] there and F32[3,2] here"));
  EXPECT_THAT(text, HasSubstr("\"adam.m\" is not in it"));
  EXPECT_THAT(text, HasSubstr("\"rng\" has 8 bytes there and 9 here"));
  const auto extra = PlanLoad(m, {Tensor("w", {2, 3})}, 0);
  ASSERT_TRUE(extra.ok());
  EXPECT_THAT(extra->unknown, ElementsAre("old", "rng"));
}

SaveId At(int64_t step, uint64_t timeline = 1, uint64_t epoch = 1) {
  return {.epoch = epoch, .timeline = timeline, .step = step};
}

TEST(Retention, KeepsTheNewestN) {
  const StoredCheckpoints stored{.just_committed = At(50),
                                 .committed = {{At(10)}, {At(50)}, {At(30)}, {At(20)}, {At(40)}},
                                 .folders = {At(10), At(20), At(30), At(40), At(50)}};
  const RetentionPlan plan = PlanRetention(stored, 3);
  EXPECT_THAT(plan.manifests, ElementsAre(At(10), At(20)));
  EXPECT_THAT(plan.folders, ElementsAre(At(10), At(20)));
  EXPECT_THAT(PlanRetention(stored, 0).manifests, ElementsAre(At(10), At(20), At(30), At(40)));
  EXPECT_THAT(PlanRetention(stored, 9).manifests, IsEmpty());
}

TEST(Retention, ALateCommitOfAnOldTimelineDeletesNothingNewer_C3) {
  const StoredCheckpoints stored{.just_committed = At(200, 1),
                                 .committed = {{At(90, 1)}, {At(200, 1)}, {At(110, 2)}, {At(120, 2)}},
                                 .folders = {At(90, 1), At(200, 1), At(110, 2), At(120, 2), At(130, 2)}};
  const RetentionPlan plan = PlanRetention(stored, 2);
  EXPECT_THAT(plan.manifests, ElementsAre(At(90, 1)));
  EXPECT_THAT(plan.folders, ElementsAre(At(90, 1)));
}

TEST(Retention, TheLastFiniteOneStays_C14) {
  const StoredCheckpoints stored{
      .just_committed = At(40),
      .committed = {{At(10), true}, {At(20), true}, {At(30), false}, {At(40), false}},
      .folders = {At(10), At(20), At(30), At(40)}};
  EXPECT_THAT(PlanRetention(stored, 1).manifests, ElementsAre(At(10), At(30)));
}

TEST(Retention, DeadAttemptsGoOnceSomethingNewerIsCommitted) {
  const StoredCheckpoints stored{.just_committed = At(40),
                                 .committed = {{At(30)}, {At(40)}},
                                 .aborted = {At(25), At(35)},
                                 .damaged = {At(26), At(36)},
                                 .folders = {At(20), At(25), At(26), At(30), At(35), At(36), At(40), At(50)}};
  const RetentionPlan plan = PlanRetention(stored, 3);
  EXPECT_THAT(plan.manifests, ElementsAre(At(25), At(26)));  // older than all that is kept
  EXPECT_THAT(plan.folders, ElementsAre(At(20), At(25), At(26), At(35)));
}

}  // namespace
}  // namespace gtrain::ckpt
