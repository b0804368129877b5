// Layouts against brute force: every element of every tensor is looked at on its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/rng.h"
#include "sharding/local_box.h"
#include "sharding/overlap.h"
#include "sharding/partition.h"
#include "sharding/random_boxes.h"

namespace gtrain::sharding {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::vector<MeshAxis> kMesh = {{"dp", 2}, {"pp", 2}, {"tp", 3}};

TEST(LocalBox, UnevenSplitsGiveTheFirstPartsOneMore) {
  const Sharding columns{.mesh = {{"dp", 2}, {"tp", 3}}, .splits = {{1, "tp"}}};
  for (int rank = 0; rank < 6; ++rank) {
    const auto box = LocalBoxOf({4, 8}, columns, rank);
    ASSERT_TRUE(box.ok()) << box.status();
    const int tp = rank % 3;
    EXPECT_THAT(box->begin, ElementsAre(0, tp * 3));
    EXPECT_THAT(box->shape, ElementsAre(4, tp < 2 ? 3 : 2));
  }
}

TEST(LocalBox, ASecondSplitOfADimensionCutsWhatTheFirstLeft) {
  const Sharding nested{.mesh = {{"dp", 2}, {"tp", 2}}, .splits = {{0, "tp"}, {0, "dp"}}};
  const int64_t begin[] = {0, 3, 2, 5}, size[] = {2, 2, 1, 1};  // 6 into tp 3+3, each into dp 2+1
  for (int rank = 0; rank < 4; ++rank) {
    const auto box = LocalBoxOf({6}, nested, rank);
    ASSERT_TRUE(box.ok());
    EXPECT_THAT(box->begin, ElementsAre(begin[rank])) << rank;
    EXPECT_THAT(box->shape, ElementsAre(size[rank])) << rank;
  }
}

TEST(LocalBox, APinnedTensorIsNowhereElse) {
  const Sharding stage{.mesh = kMesh, .splits = {{0, "tp"}}, .only = {{"pp", 1}}};
  for (int rank = 0; rank < 12; ++rank) {
    const auto box = LocalBoxOf({9, 2}, stage, rank);
    ASSERT_TRUE(box.ok());
    const bool holds = MeshCoordinates(kMesh, rank)[1] == 1;
    EXPECT_EQ(box->holds, holds) << rank;
    EXPECT_EQ(box->shape[0], holds ? 3 : 0) << rank;
  }
}

TEST(LocalBox, WhatIsWrongIsNamed) {
  const auto fails = [](Sharding sharding) {
    return std::string(LocalBoxOf({8, 8}, sharding, 0).status().message());
  };
  EXPECT_THAT(fails({.mesh = kMesh, .splits = {{2, "tp"}}}), HasSubstr("dimension 2"));
  EXPECT_THAT(fails({.mesh = kMesh, .splits = {{-1, "tp"}}}), HasSubstr("dimension -1"));
  EXPECT_THAT(fails({.mesh = kMesh, .splits = {{0, "ep"}}}), HasSubstr("no axis \"ep\""));
  EXPECT_THAT(fails({.mesh = kMesh, .splits = {{0, "tp"}, {1, "tp"}}}), HasSubstr("used twice"));
  EXPECT_THAT(fails({.mesh = kMesh, .only = {{"pp", 2}}}), HasSubstr("coordinate 2 of axis \"pp\""));
  EXPECT_THAT(fails({.mesh = {{"dp", 2}, {"dp", 3}}}), HasSubstr("\"dp\" twice"));
  EXPECT_THAT(fails({.mesh = {{"d p", 2}}}), HasSubstr("impossible name"));
  EXPECT_THAT(fails({.mesh = {{"dp", 0}}}), HasSubstr("size 0"));
  EXPECT_THAT(fails({.mesh = {{"a", 1 << 20}, {"b", 1 << 20}}}), HasSubstr("has the size"));
  EXPECT_FALSE(LocalBoxOf({8}, {.mesh = kMesh}, 12).ok());
  EXPECT_FALSE(LocalBoxOf({-8}, {.mesh = kMesh}, 0).ok());
  const auto world = Partition::Make({.mesh = {{"dp", 4}, {"tp", 2}}}, 1, 6);
  EXPECT_THAT(std::string(world.status().message()), HasSubstr("dp=4 x tp=2 has 8 ranks, the job has 6"));
}

// --- a reference that follows one element at a time, straight from the words in sharding.h

bool HoldsElement(const std::vector<int64_t>& shape, const Sharding& sharding, int rank,
                  const std::vector<int64_t>& element) {
  std::map<std::string, int64_t> at, size;
  const std::vector<int64_t> coordinates = MeshCoordinates(sharding.mesh, rank);
  for (size_t i = 0; i < sharding.mesh.size(); ++i) {
    at[sharding.mesh[i].name] = coordinates[i];
    size[sharding.mesh[i].name] = sharding.mesh[i].size;
  }
  for (const Only& only : sharding.only) {
    if (at[only.axis] != only.index) return false;
  }
  for (size_t d = 0; d < shape.size(); ++d) {
    std::vector<int64_t> mine(shape[d]);
    std::iota(mine.begin(), mine.end(), 0);
    for (const Split& split : sharding.splits) {
      if (split.dim != static_cast<int>(d)) continue;
      const int64_t n = static_cast<int64_t>(mine.size()), p = size[split.axis];
      std::vector<int64_t> part;
      int64_t begin = 0;
      for (int64_t i = 0; i < p; ++i) {
        int64_t length = n / p + (i < n % p ? 1 : 0);
        if (split.rule == SplitRule::kChunk) length = std::min((n + p - 1) / p, n - begin);
        if (i == at[split.axis]) part.assign(mine.begin() + begin, mine.begin() + begin + length);
        begin += length;
      }
      mine = part;
    }
    if (std::find(mine.begin(), mine.end(), element[d]) == mine.end()) return false;
  }
  return true;
}

std::vector<std::vector<int64_t>> AllElements(const std::vector<int64_t>& shape) {
  std::vector<std::vector<int64_t>> out = {{}};
  for (int64_t n : shape) {
    std::vector<std::vector<int64_t>> next;
    for (const auto& prefix : out) {
      for (int64_t i = 0; i < n; ++i) {
        next.push_back(prefix);
        next.back().push_back(i);
      }
    }
    out = next;
  }
  return out;
}

Sharding RandomSharding(Rng* rng, size_t dimensions) {
  Sharding s{.mesh = {{"dp", 1 + static_cast<int64_t>(rng->Below(3))},
                      {"pp", 1 + static_cast<int64_t>(rng->Below(3))},
                      {"tp", 1 + static_cast<int64_t>(rng->Below(4))}}};
  std::vector<MeshAxis> axes = s.mesh;
  while (!axes.empty()) {
    const size_t i = rng->Below(axes.size());
    const uint64_t use = rng->Below(4);
    if (use == 0) {
      s.only.push_back({axes[i].name, static_cast<int64_t>(rng->Below(axes[i].size))});
    } else if (use < 3 && dimensions > 0) {
      s.splits.push_back({static_cast<int>(rng->Below(dimensions)), axes[i].name,
                          rng->Below(2) == 0 ? SplitRule::kBalanced : SplitRule::kChunk});
    }
    axes.erase(axes.begin() + static_cast<ptrdiff_t>(i));
  }
  return s;
}

std::vector<int64_t> RandomShape(Rng* rng) {
  std::vector<int64_t> shape(rng->Below(4));
  for (int64_t& n : shape) n = static_cast<int64_t>(rng->Below(10) == 0 ? 0 : 1 + rng->Below(7));
  return shape;
}

int WorldOf(const Sharding& s) {
  int64_t world = 1;
  for (const MeshAxis& axis : s.mesh) world *= axis.size;
  return static_cast<int>(world);
}

bool Inside(const Box& box, const std::vector<int64_t>& element) {
  for (size_t d = 0; d < box.size(); ++d) {
    if (element[d] < box[d].begin || element[d] >= box[d].end()) return false;
  }
  return true;
}

TEST(Partition, BoxesAreWhatTheWordsSay) {
  Rng rng(11);
  for (int round = 0; round < 150; ++round) {
    const std::vector<int64_t> shape = RandomShape(&rng);
    const Sharding sharding = RandomSharding(&rng, shape.size());
    const int world = WorldOf(sharding);
    const auto p = Partition::Make(sharding, shape.size(), world);
    ASSERT_TRUE(p.ok()) << p.status();
    const auto elements = AllElements(shape);
    for (int rank = 0; rank < world; ++rank) {
      const auto local = LocalBoxOf(shape, sharding, rank);
      ASSERT_TRUE(local.ok());
      for (const auto& element : elements) {
        const bool holds = HoldsElement(shape, sharding, rank, element);
        EXPECT_EQ(holds, p->Holds(rank) && Inside(p->BoxOf(shape, p->CellOf(rank)), element));
        bool inside = local->holds;
        for (size_t d = 0; d < shape.size(); ++d) {
          inside &= element[d] >= local->begin[d] && element[d] < local->begin[d] + local->shape[d];
        }
        EXPECT_EQ(holds, inside);
      }
    }
  }
}

TEST(Partition, EveryRankIsOneReplicaOfOneCell) {
  Rng rng(12);
  for (int round = 0; round < 150; ++round) {
    const std::vector<int64_t> shape = RandomShape(&rng);
    const Sharding sharding = RandomSharding(&rng, shape.size());
    const int world = WorldOf(sharding);
    const auto p = Partition::Make(sharding, shape.size(), world);
    ASSERT_TRUE(p.ok());
    std::set<int> seen;
    for (int64_t cell = 0; cell < p->cells(); ++cell) {
      EXPECT_EQ(p->ElementsOf(shape, cell), Elements(p->BoxOf(shape, cell)));
      int before = -1;
      for (int64_t replica = 0; replica < p->replicas(cell); ++replica) {
        const int rank = p->RankOf(cell, replica);
        EXPECT_TRUE(seen.insert(rank).second);
        EXPECT_GT(rank, before);  // replicas are in rank order
        before = rank;
        EXPECT_TRUE(p->Holds(rank));
        EXPECT_EQ(p->CellOf(rank), cell);
        EXPECT_EQ(p->ReplicaOf(rank), replica);
      }
    }
    for (int rank = 0; rank < world; ++rank) EXPECT_EQ(p->Holds(rank), seen.contains(rank));
  }
}

TEST(Partition, CellsCoverEveryElementOnce) {
  Rng rng(13);
  for (int round = 0; round < 150; ++round) {
    const std::vector<int64_t> shape = RandomShape(&rng);
    const Sharding sharding = RandomSharding(&rng, shape.size());
    const auto p = Partition::Make(sharding, shape.size(), WorldOf(sharding));
    ASSERT_TRUE(p.ok());
    for (const auto& element : AllElements(shape)) {
      int in = 0;
      for (int64_t cell = 0; cell < p->cells(); ++cell) in += Inside(p->BoxOf(shape, cell), element);
      EXPECT_EQ(in, 1);
    }
  }
}

Box RandomBox(Rng* rng, const std::vector<int64_t>& shape) {
  Box box;
  for (int64_t n : shape) {
    const auto begin = static_cast<int64_t>(rng->Below(n + 1));
    box.push_back({begin, static_cast<int64_t>(rng->Below(n - begin + 1))});
  }
  return box;
}

TEST(Partition, OverlapsAreExactlyTheCellsThatShareElements) {
  Rng rng(14);
  for (int round = 0; round < 300; ++round) {
    const std::vector<int64_t> shape = RandomShape(&rng);
    const Sharding sharding = RandomSharding(&rng, shape.size());
    const auto p = Partition::Make(sharding, shape.size(), WorldOf(sharding));
    ASSERT_TRUE(p.ok());
    const Box wanted = RandomBox(&rng, shape);
    std::multiset<int64_t> found, expected;
    p->ForEachOverlap(shape, wanted, [&](int64_t cell, const Box& box) {
      found.insert(cell);
      EXPECT_EQ(box, p->BoxOf(shape, cell));
    });
    for (int64_t cell = 0; cell < p->cells(); ++cell) {
      if (Overlap::Of(p->BoxOf(shape, cell), wanted, 1).bytes() > 0) expected.insert(cell);
    }
    EXPECT_EQ(found, expected);
  }
}

TEST(Partition, KeysAreEqualWhenTheRanksOfCellsAre) {
  const std::vector<MeshAxis> mesh = {{"dp", 4}, {"one", 1}, {"tp", 2}};
  const auto key = [&](Sharding s) { return Partition::Make(s, 2, 8)->Key(); };
  const std::string rows = key({.mesh = mesh, .splits = {{0, "tp"}}});
  EXPECT_EQ(rows, key({.mesh = mesh, .splits = {{1, "tp"}}}));
  EXPECT_EQ(rows, key({.mesh = {{"a", 2}, {"b", 2}, {"c", 2}}, .splits = {{0, "c"}}}));
  EXPECT_EQ(rows, key({.mesh = mesh, .splits = {{0, "one"}, {0, "tp"}}}));
  EXPECT_NE(rows, key({.mesh = mesh, .splits = {{0, "dp"}}}));
  EXPECT_NE(rows, key({.mesh = mesh, .only = {{"tp", 0}}}));
  EXPECT_EQ(key({.mesh = mesh}), Partition::Replicated(8).Key());
}

// The chunks of torch.chunk, and of DTensor's Shard.
TEST(Partition, ChunksAreThoseOfTorch) {
  const auto sizes = [](int64_t n, int64_t parts) {
    std::vector<int64_t> out;
    for (int64_t i = 0; i < parts; ++i) out.push_back(Part(n, parts, i, SplitRule::kChunk).size);
    return out;
  };
  EXPECT_THAT(sizes(10, 4), testing::ElementsAre(3, 3, 3, 1));
  EXPECT_THAT(sizes(9, 8), testing::ElementsAre(2, 2, 2, 2, 1, 0, 0, 0));
  EXPECT_THAT(sizes(8, 4), testing::ElementsAre(2, 2, 2, 2));
  EXPECT_THAT(sizes(0, 2), testing::ElementsAre(0, 0));
  for (int64_t n : {1, 9, 10, 17}) {
    for (int64_t parts : {1, 4, 8, 20}) {
      for (int64_t x = 0; x < n; ++x) {
        const Interval part = Part(n, parts, PartHolding(n, parts, x, SplitRule::kChunk), SplitRule::kChunk);
        EXPECT_TRUE(part.begin <= x && x < part.end());
      }
    }
  }
}

bool IsEmpty(const Box& box) { return !box.empty() && Elements(box) == 0; }

TEST(RankBoxes, AreWhatTheRanksSaid) {
  Rng rng(16);
  for (int round = 0; round < 300; ++round) {
    std::vector<int64_t> shape(rng.Below(4));
    for (int64_t& n : shape) n = static_cast<int64_t>(1 + rng.Below(9));
    const size_t world = 1 + rng.Below(12);
    const std::vector<Box> by_rank = RandomBoxes(&rng, shape, static_cast<int>(world));
    const auto boxes = RankBoxes::Make(shape, by_rank);
    ASSERT_TRUE(boxes.ok()) << boxes.status();
    const Partition p = Partition::Of(*boxes);
    std::set<int> seen;
    for (int64_t cell = 0; cell < p.cells(); ++cell) {
      int before = -1;
      for (int64_t replica = 0; replica < p.replicas(cell); ++replica) {
        const int rank = p.RankOf(cell, replica);
        EXPECT_TRUE(seen.insert(rank).second);
        EXPECT_GT(rank, before);
        before = rank;
        EXPECT_EQ(p.CellOf(rank), cell);
        EXPECT_EQ(p.ReplicaOf(rank), replica);
        EXPECT_EQ(p.BoxOf(shape, cell), by_rank[static_cast<size_t>(rank)]);
      }
    }
    for (size_t rank = 0; rank < world; ++rank) {
      EXPECT_EQ(p.Holds(static_cast<int>(rank)), !IsEmpty(by_rank[rank]));
      EXPECT_EQ(seen.contains(static_cast<int>(rank)), !IsEmpty(by_rank[rank]));
    }
    const Box wanted = RandomBox(&rng, shape);
    std::vector<int64_t> found, expected;
    p.ForEachOverlap(shape, wanted, [&](int64_t cell, const Box& box) {
      found.push_back(cell);
      EXPECT_EQ(box, p.BoxOf(shape, cell));
    });
    for (int64_t cell = 0; cell < p.cells(); ++cell) {
      if (Overlap::Of(p.BoxOf(shape, cell), wanted, 1).bytes() > 0) expected.push_back(cell);
    }
    EXPECT_EQ(found, expected);
  }
}

TEST(RankBoxes, WhatDoesNotFitNamesTheRanks) {
  const auto fails = [](const std::vector<int64_t>& shape, const std::vector<Box>& by_rank) {
    return std::string(RankBoxes::Make(shape, by_rank).status().message());
  };
  EXPECT_THAT(fails({10}, {{{0, 6}}, {{0, 0}}, {{5, 5}}}), HasSubstr("rank 0 holds [0:6] and rank 2 [5:10]"));
  EXPECT_THAT(fails({10}, {{{0, 4}}, {{5, 5}}}), HasSubstr("hold 9 of its 10 elements"));
  EXPECT_THAT(fails({10}, {{{0, 10}}, {{5, 6}}}),
              HasSubstr("box [5:11] of rank 1 is not in the tensor [0:10]"));
  EXPECT_THAT(fails({10}, {{{-1, 11}}}), HasSubstr("of rank 0 is not in"));
  EXPECT_THAT(fails({4, 4}, {{{0, 4}, {0, 2}}, {{0, 4}, {0, 2}}, {{2, 2}, {1, 3}}, {{0, 2}, {2, 2}}}),
              HasSubstr("rank 0 holds [0:4,0:2] and rank 2 [2:4,1:4]"));
  EXPECT_THAT(fails({4}, {{{0, 2}, {0, 1}}}), HasSubstr("is not in the tensor"));
  EXPECT_THAT(fails({4}, {{{0, 0}}, {{0, 0}}}), HasSubstr("hold 0 of its 4"));
}

// Half of them meet in one dimension, half in the other, so every two would have to be compared (C10).
TEST(RankBoxes, CutsThatTakeTooLongToCheckAreRefused) {
  constexpr int64_t kHalf = 40'000;
  std::vector<Box> by_rank;
  for (int64_t i = 0; i < kHalf; ++i) {
    by_rank.push_back({{0, kHalf}, {i, 1}});
    by_rank.push_back({{kHalf + i, 1}, {0, kHalf}});
  }
  EXPECT_THAT(std::string(RankBoxes::Make({2 * kHalf, 2 * kHalf}, by_rank).status().message()),
              HasSubstr("pairs of its 80000 boxes meet in each dimension"));
}

TEST(RankBoxes, KeysAreEqualWhenTheRanksOfCellsAre) {
  const auto key = [](const std::vector<int64_t>& shape, const std::vector<Box>& by_rank) {
    return (*RankBoxes::Make(shape, by_rank))->key();
  };
  const std::string halves = key({10}, {{{0, 5}}, {{5, 5}}});
  EXPECT_EQ(halves, key({10, 3}, {{{0, 9}, {0, 3}}, {{9, 1}, {0, 3}}}));
  EXPECT_NE(halves, key({10}, {{{5, 5}}, {{0, 5}}}));
  EXPECT_NE(halves, key({10}, {{{0, 10}}, {{0, 10}}}));
}

uint64_t OffsetIn(const Box& box, const std::vector<int64_t>& element) {
  uint64_t offset = 0;
  for (size_t d = 0; d < box.size(); ++d) {
    offset = offset * static_cast<uint64_t>(box[d].size) + static_cast<uint64_t>(element[d] - box[d].begin);
  }
  return offset;
}

// Each shared byte once, at the right place of both memories, in any window.
TEST(Overlap, RunsAreExactlyTheSharedBytes) {
  Rng rng(15);
  for (int round = 0; round < 400; ++round) {
    const std::vector<int64_t> shape = RandomShape(&rng);
    const Box from = RandomBox(&rng, shape), to = RandomBox(&rng, shape);
    const uint64_t width = uint64_t{1} << rng.Below(4);
    std::map<uint64_t, uint64_t> expected;  // byte of `from` -> byte of `to`
    for (const auto& element : AllElements(shape)) {
      if (!Inside(from, element) || !Inside(to, element)) continue;
      for (uint64_t b = 0; b < width; ++b)
        expected[OffsetIn(from, element) * width + b] = OffsetIn(to, element) * width + b;
    }
    const Overlap overlap = Overlap::Of(from, to, width);
    EXPECT_EQ(overlap.bytes(), expected.size());
    const uint64_t size = Elements(from) * width;
    const uint64_t begin = rng.Below(size + 1), end = begin + rng.Below(size - begin + 1);
    std::map<uint64_t, uint64_t> found;
    uint64_t last = 0;
    overlap.ForEachRun(begin, end, [&](uint64_t f, uint64_t t, uint64_t bytes) {
      EXPECT_GE(f, last);
      last = f + bytes;
      for (uint64_t b = 0; b < bytes; ++b) EXPECT_TRUE(found.emplace(f + b, t + b).second);
    });
    std::erase_if(expected, [&](const auto& e) { return e.first < begin || e.first >= end; });
    EXPECT_EQ(found, expected);
    EXPECT_EQ(overlap.BytesIn(begin, end), expected.size());
  }
}

TEST(Overlap, WholeRowsAreOneRun) {
  const Box whole = WholeBox({1000, 4096}), rows = {{100, 50}, {0, 4096}}, columns = {{0, 1000}, {64, 32}};
  EXPECT_EQ(Overlap::Of(whole, rows, 4).runs(), 1u);
  EXPECT_EQ(Overlap::Of(whole, columns, 4).runs(), 1000u);
  EXPECT_EQ(Overlap::Of(rows, columns, 4).runs(), 50u);
  EXPECT_EQ(Overlap::Of(rows, {{0, 100}, {0, 4096}}, 4).runs(), 0u);
}

}  // namespace
}  // namespace gtrain::sharding
