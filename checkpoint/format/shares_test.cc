// Which rank writes which bytes, against brute force, and pinned: it is part of the format.
#include "checkpoint/format/shares.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/rng.h"
#include "checkpoint/format/hash.h"
#include "sharding/overlap.h"
#include "sharding/random_boxes.h"

namespace gtrain::ckpt {
namespace {

using sharding::Box;
using sharding::Overlap;

GlobalTensor Replicated(std::string name, std::vector<int64_t> shape, DType dtype = DType::kFloat32) {
  return {.name = std::move(name), .dtype = dtype, .shape = std::move(shape)};
}

GlobalTensor Sharded(std::string name, std::vector<int64_t> shape, Sharding sharding,
                     DType dtype = DType::kFloat32) {
  return {.name = std::move(name),
          .layout = Layout::kSharded,
          .dtype = dtype,
          .shape = std::move(shape),
          .sharding = std::move(sharding)};
}

const std::vector<MeshAxis> kMesh = {{"dp", 4}, {"pp", 2}, {"tp", 3}};
constexpr int kWorld = 24;

GlobalTensor Boxed(std::string name, std::vector<int64_t> shape, const std::vector<Box>& by_rank,
                   DType dtype = DType::kFloat32) {
  auto boxes = *sharding::RankBoxes::Make(shape, by_rank);
  return {.name = std::move(name),
          .layout = Layout::kBoxes,
          .dtype = dtype,
          .shape = std::move(shape),
          .boxes = std::move(boxes)};
}

std::vector<GlobalTensor> RandomTensors(Rng* rng) {
  std::vector<GlobalTensor> tensors;
  const int count = static_cast<int>(rng->Below(14));
  for (int t = 0; t < count; ++t) {
    std::vector<int64_t> shape(rng->Below(4));
    for (int64_t& n : shape) n = static_cast<int64_t>(rng->Below(12) == 0 ? 0 : 1 + rng->Below(9));
    if (!shape.empty() && rng->Below(6) == 0) shape[0] *= 200'000 / (1 + static_cast<int64_t>(rng->Below(9)));
    const auto dtype = static_cast<DType>(rng->Below(16));
    Sharding sharding{.mesh = kMesh};
    for (const MeshAxis& axis : kMesh) {
      const uint64_t use = rng->Below(4);
      if (use == 0) sharding.only.push_back({axis.name, static_cast<int64_t>(rng->Below(axis.size))});
      if (use == 1 && !shape.empty())
        sharding.splits.push_back({static_cast<int>(rng->Below(shape.size())), axis.name,
                                   rng->Below(2) == 0 ? SplitRule::kBalanced : SplitRule::kChunk});
    }
    const std::string name = absl::StrCat("t", t);
    if (rng->Below(3) == 0 && !shape.empty() && *ElementCount(shape, dtype) > 0) {
      tensors.push_back(Boxed(name, shape, sharding::RandomBoxes(rng, shape, kWorld), dtype));
      continue;
    }
    tensors.push_back(rng->Below(4) == 0 ? Replicated(name, shape, dtype)
                                         : Sharded(name, shape, sharding, dtype));
  }
  tensors.push_back({.name = "rng", .layout = Layout::kPerRank});
  return tensors;
}

// All files together hold every byte of every tensor once, as the boxes of their ranks say, without holes.
TEST(Shares, EveryByteIsWrittenOnceByARankThatHoldsIt) {
  Rng rng(21);
  for (int round = 0; round < 30; ++round) {
    const std::vector<GlobalTensor> tensors = RandomTensors(&rng);
    auto shares = Shares::Make(tensors, kWorld);
    ASSERT_TRUE(shares.ok()) << shares.status();
    std::vector<std::vector<uint8_t>> written(tensors.size());
    std::vector<int> stands(tensors.size(), 0);
    for (size_t t = 0; t < tensors.size(); ++t)
      written[t].resize(*ElementCount(tensors[t].shape, tensors[t].dtype) * DTypeSize(tensors[t].dtype));
    for (int rank = 0; rank < kWorld; ++rank) {
      uint64_t offset = 0;
      for (const Piece& piece : shares->PiecesOf(rank)) {
        const GlobalTensor& tensor = tensors[piece.tensor];
        const uint64_t width = DTypeSize(tensor.dtype);
        const auto& partition = shares->partition(piece.tensor);
        ASSERT_TRUE(partition.Holds(rank));
        EXPECT_EQ(piece.offset, offset);
        EXPECT_EQ(piece.offset % width, 0u);
        EXPECT_EQ(piece.begin % width, 0u);
        offset += piece.bytes;
        ++stands[piece.tensor];
        const Box box = partition.BoxOf(tensor.shape, partition.CellOf(rank));
        const Overlap all = Overlap::Of(box, sharding::WholeBox(tensor.shape), width);
        all.ForEachRun(piece.begin, piece.begin + piece.bytes, [&](uint64_t, uint64_t to, uint64_t bytes) {
          for (uint64_t b = 0; b < bytes; ++b) ++written[piece.tensor][to + b];
        });
        EXPECT_EQ(shares->BytesOn(piece.tensor, rank), sharding::Elements(box) * width);
      }
      EXPECT_EQ(shares->DataBytes(rank), offset);
    }
    for (size_t t = 0; t + 1 < tensors.size(); ++t) {
      EXPECT_EQ(std::count(written[t].begin(), written[t].end(), 1),
                static_cast<ptrdiff_t>(written[t].size()))
          << Describe(tensors[t]);
      EXPECT_GE(stands[t], 1) << "other programs do not see " << Describe(tensors[t]);
    }
  }
}

TEST(Shares, PiecesAreFoundWithoutLookingThroughFiles) {
  Rng rng(22);
  for (int round = 0; round < 30; ++round) {
    const std::vector<GlobalTensor> tensors = RandomTensors(&rng);
    auto shares = Shares::Make(tensors, kWorld);
    ASSERT_TRUE(shares.ok());
    for (size_t t = 0; t + 1 < tensors.size(); ++t) {
      for (int64_t cell = 0; cell < shares->partition(t).cells(); ++cell) {
        const uint64_t size =
            shares->partition(t).ElementsOf(tensors[t].shape, cell) * DTypeSize(tensors[t].dtype);
        const uint64_t begin = rng.Below(size + 1), end = begin + rng.Below(size - begin + 1);
        std::map<int, Piece> found, expected;
        shares->FindPieces(t, cell, begin, end,
                           [&](int rank, const Piece& p) { EXPECT_TRUE(found.emplace(rank, p).second); });
        for (int rank = 0; rank < kWorld && begin < end; ++rank) {
          if (!shares->partition(t).Holds(rank) || shares->partition(t).CellOf(rank) != cell) continue;
          for (const Piece& piece : shares->PiecesOf(rank)) {
            if (piece.tensor == t && piece.begin < end && piece.begin + piece.bytes > begin)
              expected[rank] = piece;
          }
        }
        EXPECT_EQ(found, expected);
      }
    }
  }
}

TEST(Shares, ReplicasShareTheWritingEvenly) {
  std::vector<GlobalTensor> tensors;
  for (int i = 0; i < 40; ++i) {
    tensors.push_back(Sharded(absl::StrCat("w", i), {600, 1000 + i}, {.mesh = kMesh, .splits = {{1, "tp"}}}));
  }
  auto shares = Shares::Make(tensors, kWorld);
  ASSERT_TRUE(shares.ok());
  uint64_t total = 0, most = 0;
  for (int rank = 0; rank < kWorld; ++rank) {
    total += shares->DataBytes(rank);
    most = std::max(most, shares->DataBytes(rank));
  }
  EXPECT_LE(most, total / kWorld + kWholeBoxBytesMax);
}

TEST(Shares, TheRuleDoesNotChange) {
  const Sharding rows{.mesh = kMesh, .splits = {{0, "tp"}}};
  const Sharding nested{.mesh = kMesh, .splits = {{0, "tp"}, {0, "dp"}}, .only = {{"pp", 1}}};
  auto shares =
      Shares::Make({Replicated("step", {}, DType::kInt64), Sharded("w", {1001, 1024}, rows),
                    Sharded("m", {1001, 1024}, nested), Sharded("b", {1001}, rows, DType::kBFloat16),
                    Replicated("embedding", {3000, 700}), Replicated("none", {0, 4})},
                   kWorld);
  ASSERT_TRUE(shares.ok());
  std::string text;
  for (int rank = 0; rank < kWorld; ++rank) {
    for (const Piece& p : shares->PiecesOf(rank))
      absl::StrAppend(&text, rank, " ", p.tensor, " ", p.begin, " ", p.bytes, " ", p.offset, "\n");
  }
  EXPECT_EQ(Xxh3Hex(text), "a8ac3c44c111afe72b614f5b412ccd24") << text;
}

// Tests the additions of version 3: chunks, and boxes with different numbers of replicas.
TEST(Shares, TheRuleOfVersion3DoesNotChange) {
  const Sharding chunks{.mesh = kMesh,
                        .splits = {{0, "tp", SplitRule::kChunk}, {1, "dp", SplitRule::kChunk}}};
  std::vector<Box> rows(kWorld, Box(2));
  for (int rank = 0; rank < 9; ++rank)
    rows[static_cast<size_t>(rank)] = {{rank / 4 * 500, rank == 8 ? 1 : 500}, {0, 1024}};
  auto shares = Shares::Make({Sharded("w", {1001, 1025}, chunks), Boxed("b", {1001, 1024}, rows),
                              Boxed("c", {1001, 1024}, rows, DType::kBool)},
                             kWorld);
  ASSERT_TRUE(shares.ok()) << shares.status();
  std::string text;
  for (int rank = 0; rank < kWorld; ++rank) {
    for (const Piece& p : shares->PiecesOf(rank))
      absl::StrAppend(&text, rank, " ", p.tensor, " ", p.begin, " ", p.bytes, " ", p.offset, "\n");
  }
  EXPECT_EQ(Xxh3Hex(text), "9f97199c1dbffb1449668456a6989953") << text;
}

TEST(Shares, WhatCannotBeIsNamed) {
  const auto fails = [](GlobalTensor tensor) {
    return std::string(Shares::Make({std::move(tensor)}, kWorld).status().message());
  };
  EXPECT_EQ(fails({.name = "w", .layout = Layout::kBoxes, .shape = {4}}),
            "tensor \"w\": its boxes are not those of 24 ranks");
  EXPECT_EQ(fails(Replicated("w", {-1})), "tensor \"w\": impossible shape");
  EXPECT_NE(fails(Sharded("w", {8}, {.mesh = {{"dp", 2}}, .splits = {{0, "dp"}}})).find("24"),
            std::string::npos);
  std::vector<GlobalTensor> many;
  for (int i = 0; i < 3000; ++i)
    many.push_back(Sharded(absl::StrCat("t", i), {8}, {.mesh = {{"dp", 99'999}}, .splits = {{0, "dp"}}}));
  EXPECT_EQ(Shares::Make(many, 99'999).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace gtrain::ckpt
