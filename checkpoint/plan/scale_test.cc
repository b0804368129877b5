// A terabyte on paper: every plan of a save and of a reshard for 4,096 ranks and 10,000 tensors. Memory is
// counted and bounded; seconds of CPU are printed.
#include <gtest/gtest.h>

#include <cstdio>
#include <ctime>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/memory_count_fake.h"
#include "base/rng.h"
#include "checkpoint/format/hash.h"
#include "checkpoint/plan/load_plan.h"
#include "checkpoint/plan/save_plan.h"

namespace gtrain::ckpt {
namespace {

constexpr int kTensors = 10'000;
constexpr int64_t kMemoryMax = int64_t{1} << 30;

double CpuSeconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

// 102 MB each. Weights lie on their pipeline stage, split over tp and replicated over dp; every other tensor
// is optimizer state, split over dp as well.
std::vector<Registered> Model(const std::vector<MeshAxis>& mesh, int split_dim) {
  std::vector<Registered> out;
  const int64_t stages = mesh[1].size;
  for (int i = 0; i < kTensors; ++i) {
    Registered r;
    r.tensor = {
        .name = absl::StrCat("layers.", i / 2, i % 2 == 0 ? ".weight" : ".exp_avg"),
        .layout = Layout::kSharded,
        .dtype = i % 2 == 0 ? DType::kBFloat16 : DType::kFloat32,
        .shape = {5120, i % 2 == 0 ? 10000 : 5000},
        .sharding = {.mesh = mesh, .splits = {{split_dim, "tp"}}, .only = {{"pp", i * stages / kTensors}}}};
    if (i % 2 == 1) r.tensor.sharding.splits.push_back({0, "dp"});
    out.push_back(std::move(r));
  }
  return out;
}

// A manifest as the ranks would commit it. The headers are left out: a file then begins with its data.
Manifest Committed(const std::vector<Registered>& registered, int world) {
  Manifest m{.world_size = world};
  std::vector<GlobalTensor>& tensors = m.tensors;
  for (const Registered& r : registered) tensors.push_back(r.tensor);
  auto shares = Shares::Make(tensors, world);
  uint64_t bytes = 0;
  size_t pieces = 0;
  for (int rank = 0; rank < world; ++rank) {
    for (const Piece& piece : shares->PiecesOf(rank)) {
      bytes += piece.bytes;
      ++pieces;
    }
    m.files.push_back({.name = ShardName(rank, world), .bytes = shares->DataBytes(rank)});
  }
  EXPECT_EQ(bytes, uint64_t{kTensors} * 102'400'000);  // every byte once
  std::printf("  save: %zu pieces on %d ranks\n", pieces, world);
  return m;
}

TEST(Scale, ATerabyteOn4096RanksIsPlannedInAGibibyte) {
  const std::vector<MeshAxis> from = {{"dp", 64}, {"pp", 8}, {"tp", 8}};
  const std::vector<MeshAxis> to = {{"dp", 64}, {"pp", 4}, {"tp", 16}};
  constexpr int kWorld = 4096;
  const int64_t before = AllocatedBytes();
  ResetPeakAllocatedBytes();
  const double start = CpuSeconds();
  const Manifest m = Committed(Model(from, 1), kWorld);
  const double saved = CpuSeconds();
  std::vector<Registered> registered = Model(to, 1);
  LoadPlanner planner(&m, registered, kWorld);
  uint64_t needed = 0, read = 0, largest = 0;
  size_t copies = 0;
  for (int rank = 0; rank < kWorld; ++rank) {
    const auto plan = planner.Plan(rank);
    ASSERT_TRUE(plan.ok()) << plan.status();
    needed += plan->needed_bytes;
    read += plan->read_bytes;
    largest = std::max(largest, plan->needed_bytes);
    for (const FileRead& file : plan->reads) copies += file.copies.size();
  }
  const double planned = CpuSeconds();
  // Weights go to each of 64 replicas, optimizer state to one rank.
  EXPECT_EQ(needed, uint64_t{kTensors / 2} * 102'400'000 * 65);
  const int64_t peak = PeakAllocatedBytes() - before;
  std::printf("  reshard: %zu copies on %d ranks, at most %.1f GB a rank, %.3f times the needed bytes read\n",
              copies, kWorld, static_cast<double>(largest) / 1e9,
              static_cast<double>(read) / static_cast<double>(needed));
  std::printf("  %.2f s for the plans of all saves, %.2f s for those of all reshards; at most %.0f MiB\n",
              saved - start, planned - saved, static_cast<double>(peak) / (1 << 20));
  EXPECT_LE(peak, kMemoryMax);
}

// Irregular cuts: weights in 64 boxes of rows on 64 ranks each, optimizer state in 4,096 boxes of 64 x 64.
std::vector<Registered> BoxedModel(int world) {
  Rng rng(5);
  const auto cuts = [&](int64_t n) {  // 64 parts, none alike
    std::vector<int64_t> at = {0};
    for (int i = 1; i < 64; ++i) at.push_back(n * i / 64 + static_cast<int64_t>(rng.Below(20)) - 10);
    at.push_back(n);
    return at;
  };
  const std::vector<int64_t> rows = cuts(5120), columns = cuts(5000);
  std::vector<sharding::Box> weights, optimizer;
  for (int rank = 0; rank < world; ++rank) {
    const auto r = static_cast<size_t>(rank) % 64, c = static_cast<size_t>(rank) / 64;
    const sharding::Interval mine = {rows[r], rows[r + 1] - rows[r]};
    weights.push_back({mine, {0, 10000}});
    optimizer.push_back({mine, {columns[c], columns[c + 1] - columns[c]}});
  }
  const auto weight_boxes = *sharding::RankBoxes::Make({5120, 10000}, weights);
  const auto optimizer_boxes = *sharding::RankBoxes::Make({5120, 5000}, optimizer);
  std::vector<Registered> out;
  for (int i = 0; i < kTensors; ++i) {
    const bool weight = i % 2 == 0;
    out.push_back({{.name = absl::StrCat("layers.", i / 2, weight ? ".weight" : ".exp_avg"),
                    .layout = Layout::kBoxes,
                    .dtype = weight ? DType::kBFloat16 : DType::kFloat32,
                    .shape = {5120, weight ? 10000 : 5000},
                    .boxes = weight ? weight_boxes : optimizer_boxes}});
  }
  return out;
}

TEST(Scale, IrregularBoxesOn4096RanksArePlannedWithoutMessages) {
  constexpr int kWorld = 4096, kEach = 64;  // every 64th rank plans its restore
  const int64_t before = AllocatedBytes();
  ResetPeakAllocatedBytes();
  const double start = CpuSeconds();
  const Manifest m = Committed(BoxedModel(kWorld), kWorld);
  const double saved = CpuSeconds();
  // The same model as DTensor would cut it on a mesh of 64 x 64.
  std::vector<Registered> registered;
  for (const Registered& r : BoxedModel(kWorld)) {
    registered.push_back({r.tensor});
    GlobalTensor& t = registered.back().tensor;
    t.layout = Layout::kSharded;
    t.boxes = nullptr;
    t.sharding = {.mesh = {{"dp", 64}, {"tp", 64}}, .splits = {{0, "tp", SplitRule::kChunk}}};
    if (t.dtype == DType::kFloat32) t.sharding.splits.push_back({1, "dp", SplitRule::kChunk});
  }
  LoadPlanner planner(&m, registered, kWorld);
  uint64_t needed = 0;
  size_t copies = 0;
  for (int rank = 0; rank < kWorld; rank += kEach) {
    const auto plan = planner.Plan(rank);
    ASSERT_TRUE(plan.ok()) << plan.status();
    needed += plan->needed_bytes;
    for (const FileRead& file : plan->reads) copies += file.copies.size();
  }
  const double planned = CpuSeconds();
  // Ranks 0, 64, 128 ... are tp 0, which has the first 80 rows of everything.
  EXPECT_EQ(needed, uint64_t{kTensors / 2} * 80 * (64 * 10000 * 2 + 5000 * 4));
  const int64_t peak = PeakAllocatedBytes() - before;
  std::printf("  %.2f s for the plans of all saves, %.2f s and %zu copies for %d of the restores; %.0f MiB\n",
              saved - start, planned - saved, copies, kWorld / kEach, static_cast<double>(peak) / (1 << 20));
  EXPECT_LE(peak, kMemoryMax);
}

}  // namespace
}  // namespace gtrain::ckpt
