// Checkpoints of every version of the format that was ever written are restored bit by bit, at other world
// sizes too. tests/fixtures/checkpoint holds one directory a version; its README says how each was made.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>

#include "base/test_folder.h"
#include "checkpoint/engine/admin.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/engine_test_world.h"
#include "sharding/local_box.h"

namespace gtrain::ckpt {
namespace {

constexpr char kFixtures[] = "tests/fixtures/checkpoint";  // tests run in the root of the repository

struct Tensor {
  const char* name;
  DType dtype;
  std::vector<int64_t> shape;
  int split = -1;  // this dimension over all ranks; -1: replicated
};

const std::vector<Tensor>& Tensors() {
  static const auto* const tensors = new std::vector<Tensor>{
      {"w", DType::kFloat32, {3, 5}},          {"half", DType::kBFloat16, {7}},
      {"counter", DType::kInt64, {}},          {"rows", DType::kFloat32, {5, 4}, 0},
      {"columns", DType::kFloat16, {4, 7}, 1},
  };
  return *tensors;
}

// Element `index` of a whole tensor as training had it at `step`.
std::string Element(const Tensor& tensor, int64_t step, int64_t index) {
  std::string out(DTypeSize(tensor.dtype), '\0');
  const auto put = [&](auto value) { std::memcpy(out.data(), &value, sizeof(value)); };
  if (tensor.dtype == DType::kInt64) {
    put(step + index);
  } else if (tensor.dtype == DType::kFloat32) {
    put(static_cast<float>(step * 1000 + index));
  } else {
    put(static_cast<uint16_t>((step * 16 + index) & 0x3fff));  // a finite number of either type
  }
  return out;
}

std::string RngOf(int64_t step, int rank) {
  std::string out;
  for (int i = 0; i < 5 + rank; ++i) out.push_back(static_cast<char>(step * 31 + rank * 7 + i));
  return out;
}

// The state of one rank.
class RankState {
 public:
  RankState(int rank, int world, bool with_sharded)
      : rank_(rank), world_(world), with_sharded_(with_sharded) {}

  absl::Status Register(Checkpointer* c) {
    data_.reserve(Tensors().size());  // what is registered stays where it is
    for (const Tensor& t : Tensors()) {
      if (t.split >= 0 && !with_sharded_) continue;
      data_.push_back(Expected(t, 0));
      for (char& byte : data_.back()) byte = '\xee';
      GT_RETURN_IF_ERROR(c->AddSharded(t.name, MemoryOf(&data_.back()), t.shape, ShardingOf(t), t.dtype));
    }
    rng_.assign(static_cast<size_t>(5 + rank_), '\xee');
    return c->AddPerRank("rng", MemoryOf(&rng_));
  }
  void Fill(int64_t step) {
    size_t i = 0;
    for (const Tensor& t : Tensors()) {
      if (t.split < 0 || with_sharded_) data_[i++].replace(0, std::string::npos, Expected(t, step));
    }
    rng_ = RngOf(step, rank_);
  }
  void ExpectStep(int64_t step, int saved_world) const {
    size_t i = 0;
    for (const Tensor& t : Tensors()) {
      if (t.split >= 0 && !with_sharded_) continue;
      EXPECT_EQ(data_[i++], Expected(t, step)) << t.name << " on rank " << rank_ << " of " << world_;
    }
    const std::string untouched(rng_.size(), '\xee');
    EXPECT_EQ(rng_, rank_ < saved_world ? RngOf(step, rank_) : untouched) << "rank " << rank_;
  }

 private:
  Sharding ShardingOf(const Tensor& t) const {
    Sharding out{.mesh = {{"dp", world_}}};
    if (t.split >= 0) out.splits = {{t.split, "dp"}};
    return out;
  }
  std::string Expected(const Tensor& t, int64_t step) const {
    const LocalBox box = *LocalBoxOf(t.shape, ShardingOf(t), rank_);
    int64_t count = 1;
    for (const int64_t n : box.shape) count *= n;
    std::string out;
    for (int64_t local = 0; local < count; ++local) {
      int64_t left = local, index = 0, stride = 1;
      for (size_t d = t.shape.size(); d-- > 0;) {
        index += (box.begin[d] + left % box.shape[d]) * stride;
        left /= box.shape[d];
        stride *= t.shape[d];
      }
      out += Element(t, step, index);
    }
    return out;
  }

  const int rank_, world_;
  const bool with_sharded_;
  std::vector<std::string> data_;
  std::string rng_;
};

void SaveTwoSteps(const std::string& folder) {
  const FakeJob job{.world_size = 2};
  RunRanks(job, [&](FakeSession* session) {
    auto c = OpenCheckpointer(session, {.uri = folder, .commit_timeout = kLong}, EnvironmentOf(job),
                              &OpenDirectoryStore);
    ASSERT_TRUE(c.ok()) << c.status();
    RankState state(session->rank(), 2, true);
    ASSERT_TRUE(state.Register(c->get()).ok());
    for (const int64_t step : {10, 20}) {
      state.Fill(step);
      ASSERT_TRUE(*(*c)->Save(step));
      ASSERT_TRUE((*c)->Wait(kLong).ok());
    }
  });
}

void ExpectRestores(const std::string& folder, int64_t step, int world, bool with_sharded) {
  // A later job that was told which step: what it wrote itself would come first.
  const FakeJob job{.job = "later", .resume = absl::StrCat(step), .world_size = world};
  RunRanks(job, [&](FakeSession* session) {
    auto c = OpenCheckpointer(session, {.uri = folder, .commit_timeout = kLong}, EnvironmentOf(job),
                              &OpenDirectoryStore);
    ASSERT_TRUE(c.ok()) << c.status();
    RankState state(session->rank(), world, with_sharded);
    ASSERT_TRUE(state.Register(c->get()).ok());
    const auto restored = (*c)->Restore();
    ASSERT_TRUE(restored.ok() && *restored) << restored.status();
    EXPECT_EQ((*restored)->step, step);
    state.ExpectStep(step, 2);
  });
}

class Versions : public testing::TestWithParam<int> {};

TEST_P(Versions, AreRestoredBitByBitAtAnyWorldSize) {
  const int version = GetParam();
  const std::string folder = TestFolder() + "/ckpt";
  if (version == kManifestVersion) {
    SaveTwoSteps(folder);
  } else {
    std::filesystem::copy(absl::StrCat(kFixtures, "/v", version), folder,
                          std::filesystem::copy_options::recursive);
  }
  const auto store = *OpenDirectoryStore(folder);
  for (const int64_t step : {10, 20}) {
    const absl::StatusOr<Manifest> manifest = FindCheckpoint(store.get(), absl::StrCat(step));
    ASSERT_TRUE(manifest.ok()) << manifest.status();
    EXPECT_EQ(manifest->version, version);
    const absl::Status intact =
        VerifyAll(store.get(), *manifest, [](uint64_t, uint64_t) { return absl::OkStatus(); });
    EXPECT_TRUE(intact.ok()) << intact;
    for (const int world : {2, 1, 3, 5}) {
      SCOPED_TRACE(absl::StrCat("step ", step, " in a world of ", world));
      ExpectRestores(folder, step, world, version > 1);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Versions, testing::Range(1, kManifestVersion + 1));

}  // namespace
}  // namespace gtrain::ckpt
