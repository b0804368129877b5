// One rank's hostile gradient, under every codec, among 2 to 64 ranks: what gtrain/compression.h and
// gtrain/reducer.h promise of the step itself and of those after it.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/rng.h"
#include "comm/exec/check_collectives.h"
#include "comm/exec/rank_test_threads.h"
#include "comm/reducer/groups.h"
#include "comm/reducer/noise_test_draws.h"
#include "comm/reducer/reducer.h"
#include "gtest/gtest.h"

namespace gtrain {
namespace {

using comm::ExpectAllOk;
using comm::FakeWorld;
using comm::RunThreads;

struct Kind {
  std::string name;
  CompressionOptions options;
};

Kind Of(const std::string& name, Codec codec) {
  Kind kind{name, {}};
  kind.options.codec = codec;
  kind.options.density = 0.1;
  return kind;
}

std::vector<Kind> EveryKind() {
  std::vector<Kind> kinds = {Of("powersgd", Codec::kPowerSgd)};
  for (const Codec codec : PacketCodecs()) {
    if (codec != Codec::kTopK) kinds.push_back(Of(std::string(CodecName(codec)), codec));
  }
  kinds.push_back(Of("top-k in two stages", Codec::kTopK));
  kinds.push_back(Of("top-k to everyone", Codec::kTopK));  // on as many ranks as that is cheap for
  kinds.back().options.density = 0.005;
  kinds.push_back(Of("exact top-k", Codec::kTopK));
  kinds.back().options.exact = true;
  for (const int warmup_steps : {0, 3}) {
    kinds.push_back(Of(absl::StrCat("DGC, warm-up ", warmup_steps), Codec::kTopK));
    kinds.back().options.momentum = 0.9f;
    kinds.back().options.warmup_steps = warmup_steps;
  }
  kinds.push_back(Of("DGC 0.1 %", Codec::kTopK));  // owners of 64 ranks begin with int8 and select then
  kinds.back().options.density = 0.001;
  kinds.back().options.momentum = 0.9f;
  kinds.back().options.warmup_steps = 3;
  for (const Codec codec : {Codec::kFloat16, Codec::kInt8, Codec::kOneBit, Codec::kTopK}) {
    kinds.push_back(Of(absl::StrCat(CodecName(codec), ", bf16 residual"), codec));
    kinds.back().options.residual = ResidualType::kBFloat16;
  }
  for (const Codec codec : {Codec::kOneBit, Codec::kInt8, Codec::kPowerSgd}) {
    kinds.push_back(Of(absl::StrCat(CodecName(codec), ", momentum"), codec));
    kinds.back().options.optimizer_momentum = 0.9f;
    kinds.back().options.warmup_steps = codec == Codec::kOneBit ? 1 : 0;
  }
  return kinds;
}

struct Hostile {
  const char* name;
  float value;
};
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr Hostile kHostile[] = {
    {"NaN", std::numeric_limits<float>::quiet_NaN()},   {"+inf", kInfinity},       {"-inf", -kInfinity},
    {"the largest", std::numeric_limits<float>::max()}, {"a denormal", 0x1p-140f}, {"zero", 0}};

// The gradient of a step, of which the last elements are a vector and the others a matrix.
struct Shapes {
  size_t rows = 0, columns = 0, rest = 0;
  size_t count() const { return rows * columns + rest; }
};

class Rank {
 public:
  Rank(Communicator& c, const Kind& kind, const Shapes& shapes)
      : c_(c), kind_(kind), shapes_(shapes), rng_(static_cast<uint64_t>(c.rank()) + 1), g_(shapes.count()) {}

  absl::Status Make() {
    auto made = CompressedCollective::Create(&c_, kind_.options, shapes_.count(), MatrixAndVector());
    RETURN_IF_BAD(made.status());
    collective_ = *std::move(made);
    return absl::OkStatus();
  }

  // One step in which the rank `victim` has `value` in one element of its gradient, or in all of them.
  absl::Status HostileStep(int victim, float value, bool everywhere) {
    Draw();
    if (c_.rank() == victim) {
      if (everywhere) std::fill(g_.begin(), g_.end(), value);
      g_[g_.size() / 2] = g_.back() = value;
    }
    return Reduce();
  }
  absl::Status OrdinaryStep() {
    Draw();
    return Reduce();
  }
  void Drop() { collective_->Drop(); }

  bool AllFinite() const {
    for (const float value : g_)
      if (!std::isfinite(value)) return false;
    return true;
  }
  // The carried state must be finite, too.
  bool CarriesFinite() {
    for (const CarriedState& state : collective_->Export()) {
      for (const float value : state.values)
        if (!std::isfinite(value)) return false;
    }
    return true;
  }

 private:
  std::vector<std::vector<int64_t>> MatrixAndVector() const {
    return {{static_cast<int64_t>(shapes_.rows), static_cast<int64_t>(shapes_.columns)},
            {static_cast<int64_t>(shapes_.rest)}};
  }
  void Draw() {
    for (float& value : g_) value = Noise(rng_);
  }
  // All ranks have the same bits behind it, or it is an error.
  absl::Status Reduce() {
    RETURN_IF_BAD(collective_->AllReduceMean(absl::MakeSpan(g_)));
    const absl::string_view bytes(reinterpret_cast<const char*>(g_.data()), g_.size() * sizeof(float));
    const auto hash = static_cast<int64_t>(comm::Fnv1a(bytes));
    int64_t most[] = {hash, ~hash};
    RETURN_IF_BAD(c_.AllReduce(most, 2, DType::kInt64, ReduceOp::kMax));
    return most[0] == ~most[1] ? absl::OkStatus() : absl::DataLossError("ranks have different bits");
  }

  Communicator& c_;
  const Kind& kind_;
  const Shapes shapes_;
  Rng rng_;
  std::vector<float> g_;
  std::unique_ptr<CompressedCollective> collective_;
};

absl::Status Wrong(const Kind& kind, const Hostile& hostile, bool everywhere, bool drops,
                   const std::string& what) {
  return absl::InternalError(absl::StrCat(kind.name, ", ", hostile.name,
                                          everywhere ? " everywhere" : " in two elements",
                                          drops ? ", dropped: " : ": ", what));
}

// Top-k sends what is large as it is, so gradient, residual and momentum may add up to no number: that step
// is poisoned, and its carried values are clipped for the next one (compression.h).
bool MayOverflow(const Kind& kind, const Hostile& hostile) {
  return kind.options.momentum > 0 && hostile.value == std::numeric_limits<float>::max();
}

absl::Status TryOne(Communicator& c, const Kind& kind, const Shapes& shapes, const Hostile& hostile,
                    bool everywhere, bool drops) {
  const auto wrong = [&](const std::string& what) { return Wrong(kind, hostile, everywhere, drops, what); };
  Rank rank(c, kind, shapes);
  RETURN_IF_BAD(rank.Make());
  RETURN_IF_BAD(rank.OrdinaryStep());
  RETURN_IF_BAD(rank.OrdinaryStep());
  if (!rank.AllFinite()) return wrong("not finite before");
  const absl::Status ended = rank.HostileStep(c.size() - 1, hostile.value, everywhere);
  if (!ended.ok()) return wrong(std::string(ended.message()));
  if (rank.AllFinite() != std::isfinite(hostile.value)) return wrong("is not what the step's mean says");
  if (drops) rank.Drop();
  const absl::Status next = rank.OrdinaryStep();
  if (!next.ok()) return wrong(std::string(next.message()));
  if (!rank.AllFinite()) {
    if (drops || !MayOverflow(kind, hostile)) return wrong("the step after it is not finite");
    RETURN_IF_BAD(rank.OrdinaryStep());
  }
  if (!rank.AllFinite()) return wrong("no step after it is finite");
  return rank.CarriesFinite() ? absl::OkStatus() : wrong("carries over what is not finite");
}

// `sparing`: half of the cases.
void TryAll(const std::vector<std::string>& nodes, const Shapes& shapes, bool sparing = false) {
  SCOPED_TRACE(testing::Message() << nodes.size() << " ranks, the last on machine " << nodes.back());
  FakeWorld world(nodes);
  ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
    for (const Kind& kind : EveryKind()) {
      for (const Hostile& hostile : kHostile) {
        for (const bool everywhere : {false, true}) {
          for (const bool drops : {false, true}) {
            if (sparing && drops == everywhere) continue;
            RETURN_IF_BAD(TryOne(c, kind, shapes, hostile, everywhere, drops));
          }
        }
      }
    }
    return absl::OkStatus();
  }));
}

// Elements enough that compressing them pays, also in two stages with a shard for each rank.
TEST(HostileValues, OnTwoRanks) { TryAll(FakeWorld::OneNode(2), {64, 64, 700}); }
TEST(HostileValues, OnEightRanks) { TryAll(FakeWorld::OneNode(8), {64, 64, 700}); }
TEST(HostileValues, OnSixteenRanks) { TryAll(FakeWorld::OneNode(16), {64, 64, 700}); }
TEST(HostileValues, OnSixteenRanksOfFourMachines) {
  std::vector<std::string> nodes;
  for (int rank = 0; rank < 16; ++rank) nodes.push_back(absl::StrCat("m", rank / 4));
  TryAll(nodes, {64, 64, 700}, /*sparing=*/true);
}
TEST(HostileValues, OnSixtyFourRanks) { TryAll(FakeWorld::OneNode(64), {96, 96, 500}, /*sparing=*/true); }

}  // namespace
}  // namespace gtrain
