// Save, load and retention plans as values.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/rng.h"
#include "checkpoint/format/hash.h"
#include "checkpoint/plan/interval.h"
#include "checkpoint/plan/limits.h"
#include "checkpoint/plan/load_plan.h"
#include "checkpoint/plan/retention.h"
#include "checkpoint/plan/save_plan.h"
#include "sharding/random_boxes.h"

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

Registered Sharded(std::string name, std::vector<int64_t> shape, Sharding sharding,
                   DType dtype = DType::kFloat32) {
  return {{.name = std::move(name),
           .layout = Layout::kSharded,
           .dtype = dtype,
           .shape = std::move(shape),
           .sharding = std::move(sharding)}};
}

// A manifest as `world` ranks would commit it; hashes are of no interest here.
Manifest Committed(const std::vector<Registered>& registered, int world) {
  Manifest m{.world_size = world};
  for (const Registered& r : registered) m.tensors.push_back(r.tensor);
  for (int rank = 0; rank < world; ++rank) {
    const ShardPlan plan = PlanShard(registered, rank, world);
    ShardFile file{.name = ShardName(rank, world), .bytes = plan.file_bytes()};
    file.chunks.assign((file.bytes + kChunkBytes - 1) / kChunkBytes, Xxh3Hex(""));
    file.data_begin = plan.header.size();
    file.per_rank = plan.per_rank;
    file.kept = plan.kept;
    m.files.push_back(file);
  }
  return m;
}

TEST(SavePlan, OneRankWritesEverythingWideFirst) {
  const ShardPlan plan = PlanShard({Tensor("b", {3}, DType::kBFloat16), Blob("rng", 5), Tensor("w", {2, 2}),
                                    Tensor("step", {}, DType::kInt64)},
                                   0, 1);
  EXPECT_THAT(plan.pieces,
              ElementsAre(Piece{3, 0, 8, 0}, Piece{2, 0, 16, 8}, Piece{0, 0, 6, 24}, Piece{1, 0, 5, 30}));
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
      largest_whole = std::max(largest_whole, std::min(bytes, kWholeBoxBytesMax));
    }
    registered.push_back(Blob("rng", rng.Below(100)));
    const int world = 1 + static_cast<int>(rng.Below(9));
    const Manifest m = Committed(registered, world);
    EXPECT_TRUE(Validate(m).ok()) << Validate(m);
    for (int rank = 0; rank < world; ++rank) {
      const ShardPlan plan = PlanShard(registered, rank, world);
      constexpr uint64_t kWidths = 4;  // each is shared out on its own
      EXPECT_LE(plan.data_bytes, total / world + kWidths * (largest_whole + 64) + 100 + world);
      EXPECT_TRUE(ParseShardHeader(plan.header, plan.file_bytes()).ok());
    }
  }
}

TEST(SavePlan, PartsOfTensorsSayWhichTheyAre) {
  const std::vector<MeshAxis> mesh = {{"dp", 2}, {"tp", 2}};
  const std::vector<Registered> registered = {
      Sharded("rows", {3, 8}, {.mesh = mesh, .splits = {{0, "tp"}, {0, "dp"}}}),
      Sharded("large", {600, 2000}, {.mesh = mesh, .splits = {{1, "tp"}}}),
      Sharded("stage", {4}, {.mesh = mesh, .only = {{"tp", 1}}}),
      Sharded("scalar", {}, {.mesh = mesh, .only = {{"tp", 1}}}),
      Sharded("none", {0, 4}, {.mesh = mesh, .splits = {{1, "tp"}}})};
  std::vector<std::vector<std::string>> names(4);
  for (int rank = 0; rank < 4; ++rank) {
    const ShardPlan plan = PlanShard(registered, rank, 4);
    const auto header = ParseShardHeader(plan.header, plan.file_bytes());
    ASSERT_TRUE(header.ok()) << header.status();
    for (const TensorEntry& t : header->tensors) {
      names[rank].push_back(absl::StrCat(t.name, " ", absl::StrJoin(t.shape, "x")));
      EXPECT_EQ(IsPieceName(t.name), t.name.find('[') != std::string::npos) << t.name;
    }
  }
  EXPECT_THAT(names[0], ElementsAre("rows[0:1,0:8] 1x8", "none 0x4", "large[0:600,0:1000][0:300000] 300000"));
  EXPECT_THAT(names[1],
              ElementsAre("rows[2:3,0:8] 1x8", "large[0:600,1000:2000][0:300000] 300000", "stage 4"));
  EXPECT_THAT(names[2], ElementsAre("rows[1:2,0:8] 1x8", "large[0:600,0:1000][300000:600000] 300000"));
  EXPECT_THAT(names[3], ElementsAre("large[0:600,1000:2000][300000:600000] 300000", "scalar "));
}

TEST(SavePlan, PieceNamesAreReserved) {
  for (const char* name :
       {"w[0:4096]", "w[@3]", "rng[@1234]", "w[0:4,8:16]", "w[0:4,8:16][2:5]", "w[0:4,8:16,1:2]", "[0:4]"}) {
    EXPECT_TRUE(IsPieceName(name)) << name;
  }
  for (const char* name : {"w", "w[0]", "w[@]", "w[@1a]", "w@1]", "layers[0].w", "w[:4]", "[0:4", "w[a:4]",
                           "]", ":]", "w[,0:4]", "w[0:4,]", "w0:4,5:6]", ",0:4]", "0:4]", "4]"}) {
    EXPECT_FALSE(IsPieceName(name)) << name;
  }
}

TEST(SavePlan, RegistrationHashSeesNamesTypesAndShapes) {
  const std::string hash = RegistrationHash({Tensor("w", {2, 3}), Blob("rng", 8)});
  EXPECT_EQ(hash, RegistrationHash({Tensor("w", {2, 3}), Blob("rng", 9)}));
  EXPECT_NE(hash, RegistrationHash({Tensor("w", {3, 2}), Blob("rng", 8)}));
  EXPECT_NE(hash, RegistrationHash({Tensor("w", {2, 3}, DType::kInt32), Blob("rng", 8)}));
  EXPECT_NE(hash, RegistrationHash({Blob("rng", 8), Tensor("w", {2, 3})}));
  const auto sharded = [](Sharding s) {
    return RegistrationHash({Sharded("w", {2, 3}, std::move(s)), Blob("rng", 8)});
  };
  const std::vector<MeshAxis> mesh = {{"dp", 2}, {"tp", 3}};
  EXPECT_NE(hash, sharded({.mesh = mesh, .splits = {{1, "tp"}}}));
  EXPECT_NE(sharded({.mesh = mesh, .splits = {{0, "tp"}}}), sharded({.mesh = mesh, .splits = {{1, "tp"}}}));
  EXPECT_NE(sharded({.mesh = mesh, .only = {{"dp", 0}}}), sharded({.mesh = mesh, .only = {{"dp", 1}}}));
}

// One file read by one rank, byte by byte: which tensor byte each of its wanted bytes becomes.
void CheckReads(const Manifest& m, const LoadPlan& plan, int rank, std::vector<std::vector<int>>* times) {
  uint64_t needed = 0, read = 0;
  for (const FileRead& file : plan.reads) {
    const uint64_t length = m.files[file.file].bytes;
    uint64_t at = 0, chunk_at = 0;
    std::vector<bool> in_chunks((length + kChunkBytes - 1) / kChunkBytes, false);
    for (const ChunkRange& range : file.chunks) {
      EXPECT_TRUE(range.count > 0 && (chunk_at == 0 || range.first > chunk_at)) << "not coalesced";
      chunk_at = range.first + range.count;
      ASSERT_LE(chunk_at, in_chunks.size());
      for (uint64_t c = range.first; c < chunk_at; ++c) in_chunks[c] = true;
      read += std::min(chunk_at * kChunkBytes, length) - range.first * kChunkBytes;
    }
    std::vector<bool> wanted_chunk(in_chunks.size(), false);
    for (const Copy& c : file.copies) {
      EXPECT_GE(c.file_begin, at);
      at = c.file_begin + c.bytes;
      EXPECT_LE(at, length);
      uint64_t bytes = 0;
      c.overlap.ForEachRun(c.begin, c.begin + c.bytes, [&](uint64_t from, uint64_t to, uint64_t n) {
        const uint64_t first = c.file_begin + (from - c.begin);
        for (uint64_t chunk = first / kChunkBytes; chunk <= (first + n - 1) / kChunkBytes; ++chunk)
          wanted_chunk[chunk] = true;
        const bool tensor = c.registered < plan.restored.size();
        const size_t of = tensor ? c.registered : plan.blobs[c.registered - plan.restored.size()].registered;
        for (uint64_t b = 0; b < n; ++b) ++(*times)[of].at(to + b);
        bytes += n;
      });
      EXPECT_EQ(bytes, c.needed);
      needed += bytes;
    }
    EXPECT_EQ(in_chunks, wanted_chunk) << "rank " << rank << " reads what it does not need, or less";
  }
  EXPECT_EQ(needed, plan.needed_bytes);
  EXPECT_EQ(read, plan.read_bytes);
}

std::vector<Registered> OnRank(std::vector<Registered> registered, int rank, int world) {
  std::vector<GlobalTensor> tensors;
  for (const Registered& r : registered) tensors.push_back(r.tensor);
  const auto shares = Shares::Make(tensors, world);
  for (size_t i = 0; i < registered.size(); ++i) {
    if (registered[i].tensor.layout != Layout::kPerRank) registered[i].bytes = shares->BytesOn(i, rank);
  }
  return registered;
}

// Whatever world wrote it, every rank of any other world reads every replicated byte once (C6).
TEST(LoadPlan, AnyWorldSizeReadsEveryByteOnce_C6) {
  const std::vector<Registered> registered = {Tensor("a", {700000}), Tensor("b", {333}, DType::kUint8),
                                              Blob("rng", 40)};
  for (int wrote : {1, 3, 8}) {
    const Manifest m = Committed(registered, wrote);
    for (int rank : {0, 2, 5}) {
      const auto plan = PlanLoad(m, registered, rank, 6);
      ASSERT_TRUE(plan.ok()) << plan.status();
      std::vector<std::vector<int>> times;
      for (const Registered& r : registered) times.emplace_back(r.bytes, 0);
      CheckReads(m, *plan, rank, &times);
      const auto once = [](const std::vector<int>& t) {
        return std::all_of(t.begin(), t.end(), [](int n) { return n == 1; });
      };
      EXPECT_TRUE(once(times[0]) && once(times[1]));
      EXPECT_EQ(plan->restored[2], rank < wrote);
      EXPECT_EQ(once(times[2]), rank < wrote);
    }
  }
}

Sharding RandomSharding(Rng* rng, const std::vector<MeshAxis>& mesh, size_t dimensions) {
  Sharding out{.mesh = mesh};
  for (const MeshAxis& axis : mesh) {
    const uint64_t use = rng->Below(5);
    if (use == 0) out.only.push_back({axis.name, static_cast<int64_t>(rng->Below(axis.size))});
    if (use > 2 && dimensions > 0)
      out.splits.push_back({static_cast<int>(rng->Below(dimensions)), axis.name,
                            rng->Below(2) == 0 ? SplitRule::kBalanced : SplitRule::kChunk});
  }
  if (rng->Below(2) == 0) std::reverse(out.splits.begin(), out.splits.end());
  return out;
}

Registered Boxed(Rng* rng, std::string name, const std::vector<int64_t>& shape, int world, DType dtype) {
  auto boxes = *sharding::RankBoxes::Make(shape, sharding::RandomBoxes(rng, shape, world));
  return {{.name = std::move(name),
           .layout = Layout::kBoxes,
           .dtype = dtype,
           .shape = shape,
           .boxes = std::move(boxes)}};
}

// N ranks to M ranks, any layout to any layout: each byte of each box is read once, and nothing else (C6).
TEST(LoadPlan, AnyLayoutReadsEveryByteOfAnyOtherOnce_C6) {
  Rng rng(31);
  const std::vector<std::vector<MeshAxis>> meshes = {
      {{"dp", 8}}, {{"dp", 4}, {"tp", 2}},           {{"dp", 2}, {"tp", 4}}, {{"dp", 6}}, {{"dp", 3}},
      {{"a", 1}},  {{"dp", 2}, {"pp", 2}, {"tp", 3}}};
  const auto world_of = [](const std::vector<MeshAxis>& mesh) {
    int64_t world = 1;
    for (const MeshAxis& axis : mesh) world *= axis.size;
    return static_cast<int>(world);
  };
  for (int round = 0; round < 80; ++round) {
    const std::vector<MeshAxis>& from = meshes[rng.Below(meshes.size())];
    const std::vector<MeshAxis>& to = meshes[rng.Below(meshes.size())];
    std::vector<Registered> saved, wanted;
    for (int t = 0; t < 5; ++t) {
      std::vector<int64_t> shape(rng.Below(4));
      for (int64_t& n : shape) n = static_cast<int64_t>(rng.Below(11));
      if (!shape.empty() && rng.Below(60) == 0) shape.assign({1700, 1300});
      const auto dtype = static_cast<DType>(rng.Below(16));
      const std::string name = absl::StrCat("t", t);
      const auto any = [&](const std::vector<MeshAxis>& mesh) {
        const uint64_t how = rng.Below(4);
        if (how == 0) return Tensor(name, shape, dtype);
        if (how == 1 && *ElementCount(shape, dtype) > 0)
          return Boxed(&rng, name, shape, world_of(mesh), dtype);
        return Sharded(name, shape, RandomSharding(&rng, mesh, shape.size()), dtype);
      };
      saved.push_back(any(from));
      wanted.push_back(any(to));
    }
    std::reverse(wanted.begin(), wanted.end());  // the order of registration may change too
    const Manifest m = Committed(saved, world_of(from));
    LoadPlanner planner(&m, wanted, world_of(to));
    for (int rank = 0; rank < world_of(to); ++rank) {
      const std::vector<Registered> mine = OnRank(wanted, rank, world_of(to));
      const auto plan = planner.Plan(rank);
      ASSERT_TRUE(plan.ok()) << plan.status();
      std::vector<std::vector<int>> times;
      uint64_t bytes = 0;
      for (const Registered& r : mine) {
        times.emplace_back(r.bytes, 0);
        bytes += r.bytes;
      }
      CheckReads(m, *plan, rank, &times);
      EXPECT_EQ(plan->needed_bytes, bytes);
      for (const auto& t : times)
        EXPECT_EQ(std::count(t.begin(), t.end(), 1), static_cast<ptrdiff_t>(t.size()));
    }
  }
}

// A rank that wants an eighth of each long row leaves the chunks between alone.
TEST(LoadPlan, ChunksWithoutWantedBytesAreNotRead) {
  constexpr int64_t kRow = 4 * static_cast<int64_t>(kChunkBytes);
  const Manifest m = Committed({Tensor("w", {3, kRow}, DType::kUint8)}, 1);
  const std::vector<Registered> wanted = {
      Sharded("w", {3, kRow}, {.mesh = {{"tp", 8}}, .splits = {{1, "tp"}}}, DType::kUint8)};
  const auto plan = PlanLoad(m, wanted, 2, 8);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->needed_bytes, 3u * kRow / 8);
  ASSERT_EQ(plan->reads.size(), 1u);
  EXPECT_EQ(plan->reads[0].chunks.size(), 3u);  // one place a row
  std::vector<std::vector<int>> times = {std::vector<int>(3 * kRow / 8)};
  CheckReads(m, *plan, 2, &times);
  EXPECT_EQ(std::count(times[0].begin(), times[0].end(), 1), 3 * kRow / 8);
}

std::string LimitFound(const std::vector<Registered>& registered, int rank, int world,
                       uint64_t file_bytes_max = kFileBytesMax) {
  const absl::Status status = CheckLimits(registered, rank, world, file_bytes_max);
  EXPECT_TRUE(status.ok() || absl::IsResourceExhausted(status)) << status;
  return std::string(status.message());
}

constexpr int64_t kGiB = int64_t{1} << 30;

// Each rank's `gib` GiB of one tensor that is split over all of them.
std::vector<Registered> Large(int64_t gib, int world) {
  return {
      Sharded("w", {gib * kGiB * world}, {.mesh = {{"dp", world}}, .splits = {{0, "dp"}}}, DType::kUint8)};
}

TEST(Limits, AreNamedBeforeAnythingIsWritten) {
  EXPECT_EQ(LimitFound({Tensor("w", {2, 2}), Blob("rng", 5)}, 0, 1), "");
  // The limit is the largest file that the storage takes.
  EXPECT_EQ(LimitFound(Large(5, 4), 3, 4, 6 * kGiB), "");
  EXPECT_THAT(LimitFound(Large(7, 4), 3, 4, 6 * kGiB),
              AllOf(HasSubstr("the file of rank 3 would have 7"), HasSubstr("over the limit of 6GiB"),
                    HasSubstr("shard the state over more ranks")));
  EXPECT_THAT(LimitFound({Blob("state", uint64_t{1} << 60)}, 0, 1), HasSubstr("the file of rank 0"));
  // 102 GiB a rank of 64 is what a part can describe, whatever the world.
  EXPECT_EQ(LimitFound(Large(100, 4096), 4000, 4096), "");
  EXPECT_THAT(LimitFound(Large(110, 4096), 4000, 4096),
              HasSubstr("the part of the manifest that describes ranks 3968 to 4031"));
  // Ranks of a smaller part may have more each.
  EXPECT_EQ(LimitFound(Large(800, 8), 0, 8), "");
  EXPECT_EQ(LimitFound({Tensor("w", {6400 * kGiB}, DType::kUint8)}, 0, 1), "");
  EXPECT_THAT(LimitFound({Tensor("w", {7000 * kGiB}, DType::kUint8)}, 0, 1), HasSubstr("ranks 0 to 0"));
  // State whose size may change in each save counts with its bound.
  Registered free = Blob("loader", 0);
  free.any_length = true;
  EXPECT_EQ(LimitFound({free}, 0, 1, 65 << 20), "");
  EXPECT_THAT(LimitFound({free}, 0, 1, 64 << 20), HasSubstr("the file of rank 0 would have 64"));
  // Boxes stand in the root.
  std::vector<sharding::Box> cut(8192);
  for (size_t rank = 0; rank < cut.size(); ++rank) cut[rank] = {{static_cast<int64_t>(rank), 1}};
  const GlobalTensor boxed = {.name = "boxed",
                              .layout = Layout::kBoxes,
                              .shape = {8192},
                              .boxes = *sharding::RankBoxes::Make({8192}, cut)};
  EXPECT_EQ(LimitFound({{.tensor = boxed, .bytes = 1}}, 77, 8192), "");
  // Names.
  std::vector<Registered> many;
  for (int i = 0; i < 250'000; ++i) many.push_back(Tensor(absl::StrCat(i, std::string(250, 'n')), {1}));
  EXPECT_THAT(LimitFound(many, 0, 1),
              AllOf(HasSubstr("the header of the file of rank 0, which names 250000 tensors,"),
                    HasSubstr("register fewer, larger tensors")));
  // Each of 4,096 ranks writes few of them, but the manifest names them all.
  EXPECT_THAT(LimitFound(many, 1, 4096), HasSubstr("the manifest, which names 250000 tensors,"));
}

// FilesFor returns the files that a manifest with parts must have before a plan can be made, and no more.
TEST(LoadPlan, FilesForAreThoseThatThePlanReads) {
  const std::vector<Registered> state = {Sharded("w", {640}, {.mesh = {{"dp", 320}}, .splits = {{0, "dp"}}}),
                                         Tensor("b", {3}), Blob("rng", 5)};
  const Manifest m = Committed(state, 320);
  for (const int world : {1, 7, 320}) {
    std::vector<Registered> wanted = state;
    wanted[0].tensor.sharding.mesh[0].size = world;
    if (world == 1) wanted[0].tensor = Tensor("w", {640}).tensor;
    LoadPlanner planner(&m, wanted, world);
    for (const int rank : {0, world / 2, world - 1}) {
      const auto plan = planner.Plan(rank);
      ASSERT_TRUE(plan.ok()) << plan.status();
      std::vector<int> read;
      for (const FileRead& file : plan->reads) read.push_back(file.file);
      EXPECT_EQ(planner.FilesFor(rank, 0, wanted.size()), read);
    }
    EXPECT_EQ(planner.FilesFor(0, 2, 3), std::vector<int>{0});  // its own bytes alone
  }
}

// Which files keep state of ranks that are no more stands in parts: of those the root says only how many do.
TEST(LoadPlan, FilesForAreThoseThatMayKeepStateOfRanks_C6) {
  std::vector<Registered> state = {Tensor("b", {3}), Blob("rng", 5)};
  state[1].rule = PerRankRule::kKeep;
  Manifest m = Committed(state, 130);
  for (const int orphan : {150, 195, 200}) {
    ShardFile& file = m.files[static_cast<size_t>(orphan % 130)];
    file.kept = {{0, orphan, 5}};
    file.bytes += 5;
  }
  Manifest root = m;
  root.parts.assign(3, {});
  root.parts[0].kept = 1;
  root.parts[1].kept = 2;
  root.files.assign(130, {});
  for (const int world : {1, 7, 65, 130, 150, 201}) {
    for (int rank = 0; rank < world; ++rank) {
      const std::vector<int> files = LoadPlanner(&root, state, world).FilesFor(rank, 0, state.size());
      const auto plan = LoadPlanner(&m, state, world).Plan(rank);
      ASSERT_TRUE(plan.ok()) << plan.status();
      for (const FileRead& read : plan->reads) EXPECT_THAT(files, ::testing::Contains(read.file));
      // Its own file, that has what it keeps, and that of "b".
      if (world == 130 && rank > 0) {
        EXPECT_LE(files.size(), 2u) << rank;
      }
    }
  }
  // The log of rank 0 names all of them.
  EXPECT_THAT(LoadPlanner(&root, state, 130).FilesFor(0, 0, state.size()),
              ::testing::AllOf(::testing::Contains(20), ::testing::Contains(65), ::testing::Contains(70)));
}

// The first version of the format describes files byte range by byte range.
TEST(LoadPlan, SlicesOfVersion1AreReadIntoAnyLayout) {
  Manifest m{.version = 1, .world_size = 2};
  m.tensors = {Tensor("w", {6, 4}).tensor, {.name = "rng", .layout = Layout::kPerRank}};
  for (int rank = 0; rank < 2; ++rank) {
    ShardFile file{.name = ShardName(rank, 2), .bytes = 200, .xxh3 = Xxh3Hex(""), .chunks = {Xxh3Hex("")}};
    file.slices = {{"w", rank * 40u, rank == 0 ? 40u : 56u, 100}, {"rng", 0, 7, 180}};
    m.files.push_back(file);
  }
  ASSERT_TRUE(Validate(m).ok()) << Validate(m);
  std::vector<Registered> registered = {Sharded("w", {6, 4}, {.mesh = {{"tp", 3}}, .splits = {{1, "tp"}}}),
                                        Blob("rng", 7)};
  for (int rank = 0; rank < 3; ++rank) {
    const auto plan = PlanLoad(m, registered, rank, 3);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const std::vector<Registered> mine = OnRank(registered, rank, 3);
    std::vector<std::vector<int>> times = {std::vector<int>(mine[0].bytes), std::vector<int>(7)};
    CheckReads(m, *plan, rank, &times);
    for (int n : times[0]) EXPECT_EQ(n, 1);
    EXPECT_EQ(plan->restored[1], rank < 2);
    EXPECT_EQ(plan->reads.size(), 2u);
  }
}

// State of ranks that are no more goes where its rule says, through any number of worlds (C6).
TEST(LoadPlan, StateOfRanksThatAreNoMoreFollowsItsRule_C6) {
  std::vector<Registered> registered = {Tensor("w", {8}), Blob("drop", 3), Blob("keep", 5)};
  registered.push_back(Blob("merge", 0));
  registered[2].rule = PerRankRule::kKeep;
  registered[3].rule = PerRankRule::kMerge;
  registered[3].any_length = true;
  Manifest m{.world_size = 7};
  const auto commit = [&](int world, const std::vector<SaveTail>& tails) {
    m = {.world_size = world};
    for (const Registered& r : registered) m.tensors.push_back(r.tensor);
    for (int rank = 0; rank < world; ++rank) {
      const ShardPlan plan = PlanShard(registered, rank, world, tails[static_cast<size_t>(rank)]);
      EXPECT_EQ(plan.header.size() % kTailHeaderBytes, 0u);
      ShardFile file{.name = ShardName(rank, world), .bytes = plan.file_bytes()};
      file.chunks.assign((file.bytes + kChunkBytes - 1) / kChunkBytes, Xxh3Hex(""));
      file.data_begin = plan.header.size();
      file.per_rank = plan.per_rank;
      file.kept = plan.kept;
      m.files.push_back(file);
    }
    m.id = {.epoch = 1, .timeline = 1, .step = 1, .generation = 1, .attempt = 1};
    EXPECT_TRUE(Validate(m).ok()) << Validate(m);
  };
  std::vector<SaveTail> tails;
  for (uint64_t rank = 0; rank < 7; ++rank) tails.push_back({.per_rank = {3, 5, rank}});
  commit(7, tails);
  const auto read = [&](int world, int rank) {
    const auto plan = PlanLoad(m, registered, rank, world);
    EXPECT_TRUE(plan.ok()) << plan.status();
    std::vector<BlobRead> blobs = plan->blobs;
    if (rank == 0) {
      EXPECT_EQ(plan->orphans.size(), world < 7 ? 3u : 0u);
      if (world == 3) {
        EXPECT_EQ(plan->orphans[0], "\"drop\" of ranks 3,4,5,6, not in this world, is dropped");
        EXPECT_THAT(plan->orphans[1], HasSubstr("\"keep\" of ranks 3,4,5,6, not in this world, is kept"));
        EXPECT_THAT(plan->orphans[2], HasSubstr("\"merge\" of ranks 3,4,5,6, not in this world, is merged"));
      }
    }
    return blobs;
  };
  EXPECT_THAT(read(3, 0),
              ElementsAre(BlobRead{1, 0, 3}, BlobRead{2, 0, 5}, BlobRead{2, 3, 5}, BlobRead{2, 6, 5},
                          BlobRead{3, 0, 0}, BlobRead{3, 3, 3}, BlobRead{3, 6, 6}));
  EXPECT_THAT(read(3, 1), ElementsAre(BlobRead{1, 1, 3}, BlobRead{2, 1, 5}, BlobRead{2, 4, 5},
                                      BlobRead{3, 1, 1}, BlobRead{3, 4, 4}));
  // Saved by three ranks, which carry the state of 3 to 6; then read by two, by five and by seven.
  commit(3, {{.per_rank = {3, 5, 1}, .kept = {{1, 3, 5}, {1, 6, 5}}},
             {.per_rank = {3, 5, 1}, .kept = {{1, 4, 5}}},
             {.per_rank = {3, 5, 1}, .kept = {{1, 5, 5}}}});
  const auto header = ParseShardHeader(
      PlanShard(registered, 0, 3, {.per_rank = {3, 5, 1}, .kept = {{1, 3, 5}}}).header,
      PlanShard(registered, 0, 3, {.per_rank = {3, 5, 1}, .kept = {{1, 3, 5}}}).file_bytes());
  ASSERT_TRUE(header.ok());
  EXPECT_EQ(header->tensors.back().name, "keep[@3]");
  const auto kept_by = [&](int world, int rank) {
    std::vector<int> ranks;
    const auto plan = PlanLoad(m, registered, rank, world);
    EXPECT_TRUE(plan.ok()) << plan.status();
    for (const BlobRead& blob : plan->blobs) {
      if (blob.registered == 2) ranks.push_back(blob.rank);
    }
    return ranks;
  };
  EXPECT_THAT(kept_by(2, 0), ElementsAre(0, 2, 4, 6));
  EXPECT_THAT(kept_by(2, 1), ElementsAre(1, 3, 5));
  EXPECT_THAT(kept_by(5, 3), ElementsAre(3));
  EXPECT_THAT(kept_by(5, 0), ElementsAre(0, 5));
  EXPECT_THAT(kept_by(5, 1), ElementsAre(1, 6));
  for (int rank = 0; rank < 7; ++rank) EXPECT_THAT(kept_by(7, rank), ElementsAre(rank));
}

TEST(LoadPlan, WhatMayBeMissingIsLeftAsItIs_C4) {
  const Manifest m = Committed({Tensor("w", {2})}, 1);
  const std::vector<Registered> registered = {Tensor("w", {2}), Tensor("lora_a", {3}), Tensor("lora_b", {4})};
  EXPECT_THAT(std::string(PlanLoad(m, registered, 0, 1).status().message()),
              HasSubstr("\"lora_a\" is not in it"));
  const auto one = PlanLoad(m, registered, 0, 1, {"lora_a"});
  EXPECT_THAT(std::string(one.status().message()), HasSubstr("\"lora_b\" is not in it"));
  const auto all = PlanLoad(m, registered, 0, 1, {"lora_*", "other"});
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_THAT(all->missing, ElementsAre("lora_a", "lora_b"));
  EXPECT_THAT(all->restored, ElementsAre(true, false, false));
  EXPECT_EQ(all->needed_bytes, 8u);
  // A tensor of another shape is not a missing one.
  EXPECT_FALSE(PlanLoad(m, {Tensor("w", {3})}, 0, 1, {"*"}).ok());
}

TEST(LoadPlan, Globs) {
  for (const auto& [name, pattern] :
       std::vector<std::pair<const char*, const char*>>{{"lora_a", "lora_*"},
                                                        {"lora_", "lora_*"},
                                                        {"a.lora_b.w", "*lora_?.*"},
                                                        {"x", "*"},
                                                        {"", "*"},
                                                        {"abcabd", "*abd"},
                                                        {"w", "w"},
                                                        {"w", "?"},
                                                        {"a*b", "a*b"}}) {
    EXPECT_TRUE(MatchesGlob(name, pattern)) << name << " " << pattern;
  }
  for (const auto& [name, pattern] : std::vector<std::pair<const char*, const char*>>{
           {"lora", "lora_*"}, {"x.lora_a", "lora_*"}, {"w", ""}, {"", "?"}, {"abc", "a*d"}, {"W", "w"}}) {
    EXPECT_FALSE(MatchesGlob(name, pattern)) << name << " " << pattern;
  }
}

TEST(LoadPlan, WhatDoesNotFitIsNamed_C4_C6) {
  const Manifest m = Committed({Tensor("w", {2, 3}), Tensor("old", {1}), Blob("rng", 8)}, 2);
  const auto missing = PlanLoad(m, {Tensor("w", {3, 2}), Tensor("adam.m", {6}), Blob("rng", 9)}, 0, 1);
  ASSERT_TRUE(absl::IsFailedPrecondition(missing.status()));
  const std::string text(missing.status().message());
  EXPECT_THAT(text, HasSubstr("\"w\" is F32[2,3] there and F32[3,2] here"));
  EXPECT_THAT(text, HasSubstr("\"adam.m\" is not in it"));
  EXPECT_THAT(text, HasSubstr("\"rng\" has 8 bytes there and 9 here"));
  const auto extra = PlanLoad(m, {Tensor("w", {2, 3})}, 0, 1);
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

// ------------------------------------------------------------------ the interval

// Lost time a second of training when saving costs `cost`, is done every `every` and interruptions come at
// random once in `mtbf`, without the time a restart takes: Daly's model, equation 20.
double Lost(double every, double cost, double mtbf) {
  return mtbf * (std::exp((every + cost) / mtbf) - 1) / every - 1;
}

TEST(Interval, IsTheBestOfDalysModel) {
  for (const double cost : {0.001, 0.1, 3.0, 60.0}) {
    for (const int interruptions : {0, 3, 40}) {
      const IntervalInput input{
          .stall = absl::Seconds(cost), .interruptions = interruptions, .observed = absl::Hours(2)};
      const double mtbf = 10 * 3600.0 / (1 + interruptions);
      const double every = absl::ToDoubleSeconds(ChooseInterval(input).every);
      if (every == 1 || every == 3600) continue;  // the bounds
      for (const double other : {every * 0.9, every * 1.1})
        EXPECT_LT(Lost(every, cost, mtbf), Lost(other, cost, mtbf)) << cost << " " << interruptions;
    }
  }
}

TEST(Interval, FollowsWhatIsSeen) {
  const IntervalInput calm{
      .stall = absl::Milliseconds(100), .writing = absl::Seconds(1), .observed = absl::Hours(100)};
  IntervalInput rough = calm, dear = calm, slow = calm;
  rough.interruptions = 50;
  dear.stall = absl::Seconds(10);
  slow.writing = absl::Minutes(50);
  EXPECT_LT(ChooseInterval(rough).every, ChooseInterval(calm).every / 5);
  EXPECT_GT(ChooseInterval(dear).every, ChooseInterval(calm).every * 5);
  EXPECT_EQ(ChooseInterval(slow).every, absl::Minutes(100));  // no save is skipped
  EXPECT_EQ(ChooseInterval({}).every, absl::Seconds(1));
  IntervalInput hopeless{.stall = absl::Hours(9), .interruptions = 99, .observed = absl::Hours(2)};
  EXPECT_EQ(ChooseInterval(hopeless).every, absl::Minutes(6));  // the time between two interruptions
}

TEST(Interval, SaysWhy) {
  const Interval interval = ChooseInterval({.stall = absl::Milliseconds(100),
                                            .writing = absl::Seconds(2),
                                            .interruptions = 3,
                                            .observed = absl::Hours(2)});
  EXPECT_EQ(interval.reason,
            "every 60 s: a save costs 0.200 s and is written in 2.0 s, one interruption in 2.5 h is expected "
            "(3 seen in "
            "2.0 h)");
}

}  // namespace
}  // namespace gtrain::ckpt
