// Compressed means on one machine, on several, and on several with several ranks each.
#include <barrier>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "comm/exec/check_collectives.h"
#include "comm/exec/rank_test_threads.h"
#include "comm/reducer/reducer.h"
#include "comm/reducer/wrapped_communicator.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain {
namespace {

using comm::ExpectAllHear;
using comm::ExpectAllOk;
using comm::FakeWorld;
using comm::kFours;
using comm::kNever;
using comm::RunThreads;
using Worlds = std::vector<std::vector<std::string>>;

const Worlds kWorlds = {{"a"},           {"a", "a"},      {"a", "a", "a", "a", "a"},
                        {"a", "b", "c"}, {"a", "a", "b"}, {"a", "b", "a", "b"}};
constexpr size_t kCount = 2000;  // no multiple of a block or a shard
// The shapes for PowerSGD: a vector, two matrices, and one that is smaller than its factors.
const std::vector<std::vector<int64_t>> kShapes = {{90}, {30, 50}, {10, 4, 10}, {2, 5}};

// The gradient of rank `rank`, different in every step, with a steady mean.
std::vector<float> Gradient(int rank, int step, size_t count = kCount) {
  std::vector<float> g(count);
  for (size_t i = 0; i < count; ++i) {
    const auto x = static_cast<float>(i);
    g[i] = std::sin(x * 0.37f + static_cast<float>(rank)) * (1 + std::fmod(x * 7, 13.0f)) +
           (step % 2 == 0 ? 0.25f : -0.25f) * std::cos(x);
  }
  return g;
}

std::vector<float> Mean(int ranks, int step, size_t count = kCount) {
  std::vector<float> mean(count);
  for (int rank = 0; rank < ranks; ++rank) {
    const auto g = Gradient(rank, step, count);
    for (size_t i = 0; i < count; ++i) mean[i] += g[i] / static_cast<float>(ranks);
  }
  return mean;
}

CompressionOptions Options(Codec codec, double density = 0.1) {
  CompressionOptions options;
  options.codec = codec;
  options.density = density;
  return options;
}

std::vector<CompressionOptions> EveryKind() {
  std::vector<CompressionOptions> kinds;
  for (Codec codec : PacketCodecs()) {
    kinds.push_back(Options(codec));
  }
  kinds.push_back(Options(Codec::kTopK, 0.01));  // small enough to go to everyone
  kinds.push_back(Options(Codec::kOneBit));
  kinds.back().optimizer_momentum = 0.9f;
  kinds.push_back(Options(Codec::kPowerSgd));
  kinds.push_back(Options(Codec::kTopK));
  kinds.back().residual = ResidualType::kBFloat16;
  kinds.push_back(Options(Codec::kInt8));
  kinds.back().residual = ResidualType::kBFloat16;
  return kinds;
}

double Norm(const std::vector<float>& v) {
  double sum = 0;
  for (float x : v) sum += double{x} * x;
  return std::sqrt(sum);
}

// The difference between the results of `steps` steps and the true means, as a share of one mean.
struct Drift {
  absl::Status status;
  double share = 0;
  std::vector<float> last;
};
Drift RunSteps(Communicator& c, const CompressionOptions& options, int steps) {
  Drift drift;
  auto collective = CompressedCollective::Create(&c, options, kCount, kShapes);
  if (drift.status = collective.status(); !drift.status.ok()) return drift;
  std::vector<float> missing(kCount);
  for (int step = 0; step < steps; ++step) {
    drift.last = Gradient(c.rank(), step);
    drift.status = (*collective)->AllReduceMean(absl::MakeSpan(drift.last));
    if (!drift.status.ok()) return drift;
    const auto mean = Mean(c.size(), step);
    for (size_t i = 0; i < kCount; ++i) missing[i] += mean[i] - drift.last[i];
  }
  drift.share = Norm(missing) / Norm(Mean(c.size(), 0));
  return drift;
}

TEST(CompressedCollective, NothingIsLostForGoodAndAllRanksHaveTheSameBits) {
  for (const auto& nodes : kWorlds) {
    for (const CompressionOptions& options : EveryKind()) {
      SCOPED_TRACE(testing::Message()
                   << testing::PrintToString(nodes) << CodecName(options.codec) << options.density);
      FakeWorld world(nodes);
      std::vector<Drift> drifts(nodes.size());
      ExpectAllOk(RunThreads(world, [&](Communicator& c) {
        Drift& drift = drifts[static_cast<size_t>(c.rank())];
        drift = RunSteps(c, options, 40);
        return drift.status;
      }));
      for (const Drift& drift : drifts) {
        EXPECT_EQ(std::memcmp(drift.last.data(), drifts[0].last.data(), kCount * sizeof(float)), 0);
      }
      // 40 means went in. The part that has not come out is bounded by a few steps of the codec's error:
      // top-k 1 % holds its smallest values back for up to all of 40 steps, and the error of a momentum is as
      // large as a momentum.
      const bool sparse = options.codec == Codec::kTopK || options.codec == Codec::kPowerSgd;
      const double dense = options.optimizer_momentum > 0 ? 25 : 6;
      EXPECT_LT(drifts[0].share, sparse ? (options.density < 0.05 ? 40 * 0.9 : 20) : dense);
    }
  }
}

TEST(CompressedCollective, WithoutErrorFeedbackItIsLost) {
  for (Codec codec : {Codec::kTopK, Codec::kOneBit}) {
    FakeWorld world({"a", "b", "c"});
    double with = 0, without = 0;
    ExpectAllOk(RunThreads(world, [&](Communicator& c) {
      CompressionOptions options = Options(codec);
      const Drift kept = RunSteps(c, options, 60);
      options.error_feedback = false;
      const Drift lost = RunSteps(c, options, 60);
      if (c.rank() == 0) with = kept.share, without = lost.share;
      return kept.status.ok() ? lost.status : kept.status;
    }));
    EXPECT_GT(without, 2 * with) << CodecName(codec);
  }
}

TEST(CompressedCollective, FewBytes) {
  FakeWorld world({"a", "b", "c", "d"});
  std::vector<double> share(4);
  ExpectAllOk(RunThreads(world, [&](Communicator& c) {
    std::vector<double> shares;
    for (const CompressionOptions& options :
         {Options(Codec::kNone), Options(Codec::kInt8), Options(Codec::kOneBit), Options(Codec::kTopK, 0.01),
          Options(Codec::kPowerSgd)}) {
      constexpr size_t kMany = 100'000;
      auto collective = CompressedCollective::Create(&c, options, kMany, {{250, 400}});
      RETURN_IF_BAD(collective.status());
      auto g = Gradient(c.rank(), 0, kMany);
      RETURN_IF_BAD((*collective)->AllReduceMean(absl::MakeSpan(g)));
      shares.push_back(static_cast<double>((*collective)->bytes_sent()) / (kMany * sizeof(float)));
    }
    if (c.rank() == 0) share = shares;
    return absl::OkStatus();
  }));
  EXPECT_DOUBLE_EQ(share[0], 1);
  EXPECT_LT(share[1], 0.27);
  EXPECT_LT(share[2], 0.05);
  EXPECT_LT(share[3], 0.025);
  EXPECT_DOUBLE_EQ(share[4], 4.0 * (250 + 400) / 100'000);
}

TEST(CompressedCollective, DroppedStepCarriesNothingOver) {
  for (const CompressionOptions& options : EveryKind()) {
    if (options.codec == Codec::kNone) continue;
    FakeWorld world({"a", "b", "c"});
    ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
      CompressionOptions same = options;
      same.exact = true;  // else the threshold that was found is kept, which carries no gradient over
      auto collective = CompressedCollective::Create(&c, same, kCount, kShapes);
      RETURN_IF_BAD(collective.status());
      std::vector<std::vector<float>> results;
      for (int turn = 0; turn < 3; ++turn) {
        results.push_back(Gradient(c.rank(), 1));
        RETURN_IF_BAD((*collective)->AllReduceMean(absl::MakeSpan(results.back())));
        if (turn == 0) (*collective)->Drop();
      }
      EXPECT_EQ(results[0], results[1]) << CodecName(options.codec);
      EXPECT_NE(results[1], results[2]) << CodecName(options.codec) << ": the second step carried over";
      return absl::OkStatus();
    }));
  }
}

TEST(CompressedCollective, OneRanksNanIsSeenByAllAndCarriedByNone) {
  for (const CompressionOptions& options : EveryKind()) {
    FakeWorld world({"a", "b", "c"});
    ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
      auto collective = CompressedCollective::Create(&c, options, kCount, kShapes);
      RETURN_IF_BAD(collective.status());
      auto g = Gradient(c.rank(), 0);
      if (c.rank() == 1) g[700] = std::numeric_limits<float>::quiet_NaN();
      RETURN_IF_BAD((*collective)->AllReduceMean(absl::MakeSpan(g)));
      EXPECT_TRUE(std::isnan(g[700])) << CodecName(options.codec);
      (*collective)->Drop();
      g = Gradient(c.rank(), 0);
      RETURN_IF_BAD((*collective)->AllReduceMean(absl::MakeSpan(g)));
      for (float value : g) {
        if (!std::isfinite(value)) return absl::DataLossError(CodecName(options.codec));
      }
      return absl::OkStatus();
    }));
  }
}

// All kinds, and more that carry something over from a step that was large: momenta, and factors after a
// warm-up.
std::vector<CompressionOptions> EveryKindWithHistory() {
  std::vector<CompressionOptions> kinds = EveryKind();
  for (Codec codec : {Codec::kOneBit, Codec::kFloat16, Codec::kPowerSgd}) {
    kinds.push_back(Options(codec));
    kinds.back().optimizer_momentum = 0.9f;
    kinds.back().warmup_steps = 5;
  }
  for (const int warmup_steps : {0, 5}) {
    kinds.push_back(Options(Codec::kTopK));
    kinds.back().momentum = 0.9f;
    kinds.back().warmup_steps = warmup_steps;
  }
  return kinds;
}

// A gradient of 65,520 under fp16, or near the largest float under the others, made a shard NaN for ever; so
// did one of 1e38 that a momentum repeats.
TEST(CompressedCollective, LargeFiniteGradientsPoisonNothing) {
  for (const auto& nodes : kWorlds) {
    for (const CompressionOptions& options : EveryKindWithHistory()) {
      if (options.codec == Codec::kNone) continue;
      SCOPED_TRACE(testing::Message()
                   << testing::PrintToString(nodes) << CodecName(options.codec) << options.optimizer_momentum
                   << options.momentum << " " << options.warmup_steps);
      FakeWorld world(nodes);
      std::vector<size_t> clipped(nodes.size());
      ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
        auto collective = CompressedCollective::Create(&c, options, kCount, kShapes);
        RETURN_IF_BAD(collective.status());
        for (int step = 0; step < 9; ++step) {
          std::vector<float> g = Gradient(c.rank(), step);
          // A sum of more than one of these is no number where nothing is compressed either.
          if (step >= 1 && step <= 4) g[5] = g[1001] = 3e38f / static_cast<float>(c.size());
          if (step == 1 || step == 5) {
            g[3] = 65520, g[1000] = -1e9f;
            if (c.rank() == 0) g[1999] = 0x1.fp126f;
          }
          RETURN_IF_BAD((*collective)->AllReduceMean(absl::MakeSpan(g)));
          clipped[static_cast<size_t>(c.rank())] += (*collective)->clipped();
          for (const float value : g)
            if (!std::isfinite(value)) return absl::InternalError(absl::StrCat("step ", step));
        }
        for (const CarriedState& state : (*collective)->Export()) {
          for (const float value : state.values) EXPECT_TRUE(std::isfinite(value)) << state.name;
        }
        return absl::OkStatus();
      }));
      const size_t sum = std::accumulate(clipped.begin(), clipped.end(), size_t{0});
      EXPECT_TRUE(sum > 0 || options.codec == Codec::kTopK || options.warmup_steps > 0);
    }
  }
}

TEST(CompressedCollective, WhatThereIsNotIsRefusedByAll) {
  FakeWorld world(FakeWorld::OneNode(2));
  ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
    CompressionOptions late{.codec = Codec::kOneBit}, none{.codec = static_cast<Codec>(42)};
    late.warmup_steps = kWarmupStepsMax + 1;
    for (const CompressionOptions& options : {late, none}) {
      EXPECT_EQ(CompressedCollective::Create(&c, options, kCount).status().code(),
                absl::StatusCode::kInvalidArgument);
    }
    return absl::OkStatus();
  }));
}

// The momentum of such a step is added to the next one as large.
TEST(CompressedCollective, HugeGradientsStayFiniteWithMomentum) {
  for (const Codec codec : {Codec::kInt8, Codec::kOneBit, Codec::kBFloat16}) {
    SCOPED_TRACE(CodecName(codec));
    CompressionOptions options{.codec = codec};
    options.optimizer_momentum = 0.9f;
    FakeWorld world({"a", "b", "c"});
    ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
      auto collective = CompressedCollective::Create(&c, options, kCount, kShapes);
      RETURN_IF_BAD(collective.status());
      for (int step = 0; step < 6; ++step) {
        std::vector<float> g = Gradient(c.rank(), step);
        if (step < 4) g[5] = std::numeric_limits<float>::max();
        RETURN_IF_BAD((*collective)->AllReduceMean(absl::MakeSpan(g)));
        for (const float value : g)
          if (!std::isfinite(value)) return absl::InternalError(absl::StrCat("step ", step));
      }
      return absl::OkStatus();
    }));
  }
}

// The second factor of a step is as large as its gradient. It begins the next step, where it met a residual
// as large: their product was infinite in every later step.
TEST(CompressedCollective, PowerSgdGoesOnAfterALargeStep) {
  for (const float large : {1e20f, 1e30f, 3e38f}) {
    FakeWorld world({"a", "a", "b", "c"});
    ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
      CompressionOptions options = Options(Codec::kPowerSgd);
      options.matrix_rank = 2;
      auto collective = CompressedCollective::Create(&c, options, 1024, {{32, 32}});
      RETURN_IF_BAD(collective.status());
      for (int step = 0; step < 20; ++step) {
        std::vector<float> g = Gradient(c.rank(), step, 1024);
        if (step == 2 && c.rank() == 1) g[3] = g[100] = g[333] = -(g[470] = g[700] = g[1001] = large);
        RETURN_IF_BAD((*collective)->AllReduceMean(absl::MakeSpan(g)));
        for (const float value : g)
          if (!std::isfinite(value)) return absl::InternalError(absl::StrCat("step ", step));
      }
      return absl::OkStatus();
    }));
  }
}

// A checkpoint of a version that could not do that.
TEST(CompressedCollective, WhatIsNotFiniteIsNotLoaded) {
  for (const Codec codec : {Codec::kPowerSgd, Codec::kInt8}) {
    FakeWorld world({"a", "b"});
    ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
      CompressionOptions options = Options(codec);
      options.optimizer_momentum = 0.9f;
      auto collective = CompressedCollective::Create(&c, options, kCount, kShapes);
      RETURN_IF_BAD(collective.status());
      for (CarriedState& state : (*collective)->Export()) {
        for (size_t i = 0; i < state.values.size(); i += 3) {
          state.values[i] = i % 2 == 0 ? std::numeric_limits<float>::infinity() : std::nanf("");
        }
        RETURN_IF_BAD((*collective)->Load(state));
      }
      std::vector<float> g = Gradient(c.rank(), 0);
      RETURN_IF_BAD((*collective)->AllReduceMean(absl::MakeSpan(g)));
      for (const float value : g) EXPECT_TRUE(std::isfinite(value));
      return absl::OkStatus();
    }));
  }
}

// The leaders compress what came of all ranks of their machine.
TEST(CompressedCollective, RanksThatShareAMachineDoNotLowerTheLimit) {
  Worlds worlds = {{"a", "a", "b"}, {"a", "a", "a", "b", "b", "b"}, {"a", "b", "a", "b"}};
  worlds.push_back({"a", "a", "a", "b"});
  worlds.push_back(std::vector<std::string>(15, "a")), worlds.back().push_back("b");
  worlds.push_back(std::vector<std::string>(8, "a"));
  for (const char* alone : {"b", "c", "d"}) worlds.back().push_back(alone);
  for (const auto& nodes : worlds) {
    SCOPED_TRACE(testing::PrintToString(nodes));
    FakeWorld world(nodes);
    ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
      auto collective = CompressedCollective::Create(&c, Options(Codec::kFloat16), kCount);
      RETURN_IF_BAD(collective.status());
      for (int step = 0; step < 3; ++step) {
        std::vector<float> g(kCount, 60000);
        RETURN_IF_BAD((*collective)->AllReduceMean(absl::MakeSpan(g)));
        EXPECT_EQ((*collective)->clipped(), 0);
        EXPECT_THAT(g, testing::Each(testing::FloatNear(60000, 64)));
      }
      return absl::OkStatus();
    }));
  }
}

// An optimiser that gets these results has the same momentum as with dense means: exactly while warming up
// and, but for a few steps' worth still on its way, after the warm-up.
TEST(CompressedCollective, OptimizersMomentumIsWhatTravels) {
  constexpr float kMomentum = 0.8f;
  constexpr int kSteps = 40, kWarmup = 4;
  for (const auto& nodes : kWorlds) {
    for (Codec codec : {Codec::kNone, Codec::kOneBit, Codec::kInt8}) {
      SCOPED_TRACE(testing::Message() << testing::PrintToString(nodes) << CodecName(codec));
      FakeWorld world(nodes);
      std::vector<std::vector<float>> momenta(nodes.size());
      ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
        CompressionOptions options = Options(codec);
        options.optimizer_momentum = kMomentum;
        options.warmup_steps = kWarmup;
        auto collective = CompressedCollective::Create(&c, options, kCount, kShapes);
        RETURN_IF_BAD(collective.status());
        std::vector<float>& momentum = momenta[static_cast<size_t>(c.rank())];
        momentum.resize(kCount);
        std::vector<float> exact(kCount), missing(kCount);
        for (int step = 0, turn = 0; step < kSteps; ++turn) {
          auto g = Gradient(c.rank(), step);
          RETURN_IF_BAD((*collective)->AllReduceMean(absl::MakeSpan(g)));
          if (turn == 2 || turn == 7) {  // skipped: while warming up, and behind it
            (*collective)->Drop();
            continue;
          }
          const auto mean = Mean(c.size(), step++);
          double wrong = 0;
          for (size_t i = 0; i < kCount; ++i) {
            momentum[i] = kMomentum * momentum[i] + g[i];
            exact[i] = kMomentum * exact[i] + mean[i];
            missing[i] += exact[i] - momentum[i];
            wrong = std::max(wrong, std::fabs(double{momentum[i]} - exact[i]));
          }
          EXPECT_EQ(wrong < 1e-3, codec == Codec::kNone || step <= kWarmup) << step;
        }
        EXPECT_LT(Norm(missing) / Norm(exact), codec == Codec::kOneBit ? 15 : 0.1);
        return absl::OkStatus();
      }));
      for (const auto& m : momenta)
        EXPECT_EQ(std::memcmp(m.data(), momenta[0].data(), kCount * sizeof(float)), 0);
    }
  }
}

// Everything that went in came out or is carried over by somebody, to rounding, at any time: the promise of
// error feedback, across ranks that share machines or do not.
TEST(CompressedCollective, PowerSgdSentPlusCarriedIsTheSumOfTheMeans) {
  for (const auto& nodes : kWorlds) {
    FakeWorld world(nodes);
    ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
      CompressionOptions options = Options(Codec::kPowerSgd);
      options.matrix_rank = 2;
      options.warmup_steps = 2;
      auto collective = CompressedCollective::Create(&c, options, kCount, kShapes);
      RETURN_IF_BAD(collective.status());
      std::vector<double> missing(kCount);
      for (int step = 0; step < 12; ++step) {
        auto g = Gradient(c.rank(), step);
        RETURN_IF_BAD((*collective)->AllReduceMean(absl::MakeSpan(g)));
        if (step % 5 == 3) {  // skipped
          (*collective)->Drop();
          continue;
        }
        const auto mean = Mean(c.size(), step);
        for (size_t i = 0; i < kCount; ++i) missing[i] += double{mean[i]} - g[i];
        std::vector<double> carried(kCount);
        for (const CarriedState& state : (*collective)->Export()) {
          for (size_t i = 0; state.name == "residual" && i < kCount; ++i) {
            carried[i] += double{state.values[i]} / c.size();
          }
        }
        RETURN_IF_BAD(c.AllReduce(carried.data(), carried.size(), DType::kFloat64, ReduceOp::kSum));
        double worst = 0, most = 0;
        for (size_t i = 0; i < kCount; ++i) {
          worst = std::max(worst, std::fabs(missing[i] - carried[i]));
          most = std::max(most, std::fabs(carried[i]));
        }
        EXPECT_LT(worst, 1e-3) << step;
        EXPECT_EQ(most > 1, step >= 2) << "carried over behind the warm-up: " << most;
      }
      return absl::OkStatus();
    }));
  }
}

// A mean of small rank arrives whole whatever the single gradients are made of.
TEST(CompressedCollective, PowerSgdSendsMeansOfSmallRankExactly) {
  for (const auto& nodes : kWorlds) {
    FakeWorld world(nodes);
    ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
      constexpr size_t kRows = 40, kColumns = 50;
      CompressionOptions options = Options(Codec::kPowerSgd);
      auto collective = CompressedCollective::Create(&c, options, kRows * kColumns, {{kRows, kColumns}});
      RETURN_IF_BAD(collective.status());
      std::vector<float> g(kRows * kColumns), mean(g.size());
      for (size_t at = 0; at < g.size(); ++at) {
        const auto i = static_cast<float>(at / kColumns), j = static_cast<float>(at % kColumns);
        mean[at] = std::sin(i) * std::cos(j * 0.3f) + 0.5f * std::cos(i * 0.7f) * j;
        // The ranks' own part has any rank, and a mean of zero.
        const float own = std::sin(static_cast<float>(at) * 1.7f);
        const auto last = static_cast<float>(c.size() - 1);
        g[at] = mean[at] + (c.rank() == 0 ? -last * own : own);
      }
      RETURN_IF_BAD((*collective)->AllReduceMean(absl::MakeSpan(g)));
      std::vector<float> wrong(g.size());
      for (size_t at = 0; at < g.size(); ++at) wrong[at] = g[at] - mean[at];
      EXPECT_LT(Norm(wrong), 1e-4 * Norm(mean));
      return absl::OkStatus();
    }));
  }
}

// The second factor of a step begins the next one, so the same gradient is known better each time.
TEST(CompressedCollective, PowerSgdBeginsWhereTheLastAppliedStepEnded) {
  FakeWorld world({"a", "b", "c"});
  ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
    CompressionOptions options = Options(Codec::kPowerSgd);
    options.error_feedback = false;
    auto collective = CompressedCollective::Create(&c, options, 1500, {{30, 50}});
    RETURN_IF_BAD(collective.status());
    std::vector<double> errors;
    const auto mean = Mean(c.size(), 0, 1500);
    for (int step = 0; step < 10; ++step) {
      auto g = Gradient(c.rank(), 0, 1500);
      RETURN_IF_BAD((*collective)->AllReduceMean(absl::MakeSpan(g)));
      for (size_t i = 0; i < g.size(); ++i) g[i] -= mean[i];
      errors.push_back(Norm(g));
      if (step < 3) (*collective)->Drop();
    }
    EXPECT_EQ(errors[0], errors[3]) << "dropped";
    EXPECT_LT(errors[9], 0.9 * errors[3]);
    return absl::OkStatus();
  }));
}

// A warm-up goes on where the exported one was.
TEST(CompressedCollective, WarmUpIsCarriedOver) {
  FakeWorld world({"a", "b"});
  ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
    CompressionOptions options = Options(Codec::kPowerSgd);
    options.warmup_steps = 3;
    auto first = CompressedCollective::Create(&c, options, kCount, kShapes);
    RETURN_IF_BAD(first.status());
    for (int step = 0; step < 2; ++step) {
      auto g = Gradient(c.rank(), step);
      RETURN_IF_BAD((*first)->AllReduceMean(absl::MakeSpan(g)));
    }
    auto second = CompressedCollective::Create(&c, options, kCount, kShapes);
    RETURN_IF_BAD(second.status());
    for (const CarriedState& state : (*first)->Export()) RETURN_IF_BAD((*second)->Load(state));
    for (int step = 2; step < 4; ++step) {
      auto g = Gradient(c.rank(), step);
      const uint64_t before = (*second)->bytes_sent();
      RETURN_IF_BAD((*second)->AllReduceMean(absl::MakeSpan(g)));
      EXPECT_EQ((*second)->bytes_sent() - before == kCount * sizeof(float), step == 2) << step;
    }
    EXPECT_EQ((*second)->Load({"warmup", 0, {-1}}).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ((*second)->Load({"basis", 0, {1, 2}}).code(), absl::StatusCode::kInvalidArgument);
    return absl::OkStatus();
  }));
}

TEST(CompressedCollective, ShardsOfTheReduceScatterMakeTheMean) {
  for (const auto& nodes : Worlds{{"a"}, {"a", "a", "a"}, {"a", "b"}, {"a", "b", "c", "d", "e", "f", "g"}}) {
    for (const CompressionOptions& options : EveryKind()) {
      SCOPED_TRACE(testing::Message() << testing::PrintToString(nodes) << CodecName(options.codec));
      FakeWorld world(nodes);
      std::vector<float> whole(kCount);
      std::vector<int> covered(kCount);
      ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
        CompressionOptions without = options;
        without.optimizer_momentum = 0;  // refused below
        auto collective = CompressedCollective::Create(&c, without, kCount, kShapes);
        RETURN_IF_BAD(collective.status());
        const auto range = (*collective)->Shard();
        std::vector<float> shard(range.size);
        const auto g = Gradient(c.rank(), 0);
        RETURN_IF_BAD((*collective)->ReduceScatterMean(g, absl::MakeSpan(shard)));
        for (int turn = 0; turn < c.size(); ++turn) {  // one after the other: they share the arrays
          RETURN_IF_BAD(c.Barrier());
          if (turn != c.rank()) continue;
          for (size_t i = 0; i < range.size; ++i)
            whole[range.offset + i] = shard[i], ++covered[range.offset + i];
        }
        return c.Barrier();
      }));
      EXPECT_THAT(covered, testing::Each(1));
      if (options.codec == Codec::kTopK || options.codec == Codec::kOneBit ||
          options.codec == Codec::kPowerSgd) {
        continue;  // not in one step
      }
      const auto mean = Mean(static_cast<int>(nodes.size()), 0);
      for (size_t i = 0; i < kCount; ++i) ASSERT_NEAR(whole[i], mean[i], 1) << i;
    }
  }
}

TEST(CompressedCollective, CarriedStateGoesOnElsewhere) {
  for (const auto& nodes : Worlds{{"a", "b", "c"}, {"a", "b", "a", "b"}}) {
    for (const CompressionOptions& options : EveryKind()) {
      FakeWorld world(nodes);
      ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
        auto first = CompressedCollective::Create(&c, options, kCount, kShapes);
        RETURN_IF_BAD(first.status());
        for (int step = 0; step < 5; ++step) {
          auto g = Gradient(c.rank(), step);
          RETURN_IF_BAD((*first)->AllReduceMean(absl::MakeSpan(g)));
        }
        auto second = CompressedCollective::Create(&c, options, kCount, kShapes);
        RETURN_IF_BAD(second.status());
        for (const CarriedState& state : (*first)->Export()) RETURN_IF_BAD((*second)->Load(state));
        CarriedState strange{"residual", 1, std::vector<float>(3)};
        EXPECT_EQ((*second)->Load(strange).code(), absl::StatusCode::kInvalidArgument);
        strange.name = "progress";
        EXPECT_EQ((*second)->Load(strange).code(), absl::StatusCode::kInvalidArgument);
        std::vector<float> a = Gradient(c.rank(), 5), b = a;
        RETURN_IF_BAD((*first)->AllReduceMean(absl::MakeSpan(a)));
        RETURN_IF_BAD((*second)->AllReduceMean(absl::MakeSpan(b)));
        EXPECT_EQ(a, b) << CodecName(options.codec);
        return absl::OkStatus();
      }));
    }
  }
}

TEST(CompressedCollective, RanksRoundTheSameGradientDifferently) {
  FakeWorld world({"a", "b"});
  std::vector<std::vector<float>> residuals(2);
  ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
    CompressionOptions options = Options(Codec::kInt8);
    options.residual = ResidualType::kBFloat16;
    auto collective = CompressedCollective::Create(&c, options, kCount, kShapes);
    RETURN_IF_BAD(collective.status());
    std::vector<float> data = Gradient(0, 1);
    RETURN_IF_BAD((*collective)->AllReduceMean(absl::MakeSpan(data)));
    residuals[static_cast<size_t>(c.rank())] = (*collective)->Export()[0].values;
    return absl::OkStatus();
  }));
  EXPECT_EQ(residuals[0].size(), residuals[1].size());
  EXPECT_NE(residuals[0], residuals[1]);
}

TEST(CompressedCollective, WhatCannotBeIsRefused) {
  FakeWorld world({"a", "a", "b"});
  std::barrier all_are_made(3);
  ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
    auto collective = CompressedCollective::Create(&c, Options(Codec::kInt8), kCount);
    all_are_made.arrive_and_wait();  // who makes a mistake ends what the others are still in
    RETURN_IF_BAD(collective.status());
    std::vector<float> wrong(kCount + 1);
    const std::vector<float> data(kCount);
    EXPECT_EQ((*collective)->ReduceScatterMean(data, absl::MakeSpan(wrong)).code(),
              absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ((*collective)->AllReduceMean(absl::MakeSpan(wrong)).code(), absl::StatusCode::kInvalidArgument);
    return absl::OkStatus();
  }));
  FakeWorld flat({"a", "b"});
  ExpectAllOk(RunThreads(flat, [&](Communicator& c) -> absl::Status {
    CompressionOptions options = Options(Codec::kOneBit);
    options.optimizer_momentum = 0.9f;
    auto collective = CompressedCollective::Create(&c, options, kCount, kShapes);
    RETURN_IF_BAD(collective.status());
    std::vector<float> shard((*collective)->Shard().size);
    const std::vector<float> data(kCount);
    EXPECT_EQ((*collective)->ReduceScatterMean(data, absl::MakeSpan(shard)).code(),
              absl::StatusCode::kFailedPrecondition);
    const auto refused = [&](std::vector<std::vector<int64_t>> shapes, int rank) {
      CompressionOptions wrong_options = Options(Codec::kPowerSgd);
      wrong_options.matrix_rank = rank;
      return CompressedCollective::Create(&c, wrong_options, kCount, shapes).status().code();
    };
    EXPECT_EQ(refused({{20, 100}}, 4), absl::StatusCode::kOk);
    EXPECT_EQ(refused({{20, 100}}, 0), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(refused({{20, 100}}, 65), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(refused({{20, 99}}, 4), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(refused({{20, 100}, {1}}, 4), absl::StatusCode::kInvalidArgument);
    CompressionOptions rounded = Options(Codec::kPowerSgd);
    rounded.residual = ResidualType::kBFloat16;
    EXPECT_EQ(CompressedCollective::Create(&c, rounded, kCount, kShapes).status().code(),
              absl::StatusCode::kInvalidArgument);
    options.optimizer_momentum = 1;
    EXPECT_EQ(CompressedCollective::Create(&c, options, kCount).status().code(),
              absl::StatusCode::kInvalidArgument);
    options = Options(Codec::kTopK);
    options.optimizer_momentum = 0.9f;
    EXPECT_EQ(CompressedCollective::Create(&c, options, kCount).status().code(),
              absl::StatusCode::kInvalidArgument);
    return absl::OkStatus();
  }));
}

// ------------------------------------------------------------------ an error of one member

// Returns the status of each rank when `fault` happens to rank `victim` in its third call.
std::vector<absl::Status> WithFault(const std::vector<std::string>& nodes, const CompressionOptions& options,
                                    const std::string& algorithm, int victim,
                                    const std::function<void(comm::Hooks&, std::vector<float>&)>& fault) {
  FakeWorld world(nodes);
  return RunThreads(
      world,
      [&](Communicator& inner) -> absl::Status {
        comm::Hooks hooks;
        comm::WrappedCommunicator c(&inner, &hooks);
        auto collective = CompressedCollective::Create(&c, options, kCount, kShapes);
        RETURN_IF_BAD(collective.status());
        absl::Status status;
        for (int step = 0; step < 10 && status.ok(); ++step) {
          std::vector<float> data = Gradient(c.rank(), step);
          if (step == 2 && c.rank() == victim) fault(hooks, data);
          status = (*collective)->AllReduceMean(absl::MakeSpan(data));
        }
        std::vector<float> again(kCount);
        EXPECT_FALSE((*collective)->AllReduceMean(absl::MakeSpan(again)).ok()) << "it is dead";
        return status;
      },
      kNever, [&](int) { return algorithm; });
}

std::string Algorithm(const std::vector<std::string>& nodes, int victim) {
  if (nodes.back() != "b") return "auto";
  return victim % 2 == 0 ? "rails" : "leader";  // the second of a machine speaks with nobody, then
}

TEST(CompressedCollective, AWrongSizeOnOneRankEndsTheCallOnAll) {
  for (const auto& nodes : kFours) {
    for (int victim = 0; victim < 4; ++victim) {
      SCOPED_TRACE(testing::Message() << testing::PrintToString(nodes) << victim);
      ExpectAllHear(WithFault(nodes, Options(Codec::kInt8), Algorithm(nodes, victim), victim,
                              [](comm::Hooks&, std::vector<float>& data) { data.pop_back(); }),
                    victim, absl::StatusCode::kInvalidArgument,
                    "compressed collective: data has 1999 elements, expected 2000");
    }
  }
}

TEST(CompressedCollective, APacketThatDoesNotDecodeEndsTheCallOnAll) {
  const auto garble = [](comm::Hooks& hooks, std::vector<float>&) {
    hooks.arrived = [](uint8_t* data, size_t bytes) { std::fill_n(data, bytes, uint8_t{0xff}); };
  };
  for (const auto& nodes : kFours) {
    for (const CompressionOptions& options : {Options(Codec::kInt8), Options(Codec::kTopK, 0.01)}) {
      for (int victim : {0, 2}) {  // those that speak where ranks share machines
        SCOPED_TRACE(testing::Message()
                     << testing::PrintToString(nodes) << CodecName(options.codec) << victim);
        ExpectAllHear(WithFault(nodes, options, Algorithm(nodes, victim), victim, garble), victim,
                      absl::StatusCode::kInvalidArgument, "compressed gradient: does not start with GTGD");
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

TEST(CompressedCollective, AnExceptionOnOneRankEndsTheCallOnAll) {
  const auto raise = [](comm::Hooks& hooks, std::vector<float>&) {
    hooks.arrived = [](uint8_t*, size_t) { throw std::runtime_error("codec out of order"); };
  };
  for (const auto& nodes : kFours) {
    for (int victim : {0, 2}) {
      SCOPED_TRACE(testing::Message() << testing::PrintToString(nodes) << victim);
      ExpectAllHear(WithFault(nodes, Options(Codec::kOneBit), Algorithm(nodes, victim), victim, raise),
                    victim, absl::StatusCode::kInternal, "exception: codec out of order");
      if (testing::Test::HasFailure()) return;
    }
  }
}

// All ranks return the error in the options of one rank, and their communicator stays usable.
TEST(CompressedCollective, WrongOptionsOfOneRankAreRefusedByAll) {
  for (const auto& nodes : kFours) {
    FakeWorld world(nodes);
    ExpectAllOk(RunThreads(
        world,
        [&](Communicator& c) -> absl::Status {
          const bool wrong = c.rank() == 2;  // which leads its machine
          const auto refused =
              CompressedCollective::Create(&c, Options(Codec::kTopK, wrong ? 7 : 0.1), kCount).status();
          EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
          EXPECT_THAT(std::string(refused.message()), testing::HasSubstr("density"));
          EXPECT_EQ(absl::StrContains(refused.message(), "rank 2: "), !wrong);
          return RunSteps(c, Options(Codec::kInt8), 2).status;
        },
        kNever));
  }
}

// They would make other momenta, or other factors, out of the same bytes.
TEST(CompressedCollective, OptionsThatDifferAreRefusedByAll) {
  using Change = std::function<void(CompressionOptions&, std::vector<std::vector<int64_t>>&)>;
  const std::vector<std::pair<Codec, Change>> changes = {
      {Codec::kOneBit, [](auto& options, auto&) { options.optimizer_momentum = 0.5f; }},
      {Codec::kOneBit, [](auto& options, auto&) { options.warmup_steps = 5; }},
      {Codec::kOneBit, [](auto& options, auto&) { options.codec = Codec::kInt8; }},
      {Codec::kOneBit, [](auto& options, auto&) { options.codec = Codec::kNone; }},
      {Codec::kNone, [](auto& options, auto&) { options.codec = Codec::kOneBit; }},
      {Codec::kTopK, [](auto& options, auto&) { options.density = 0.1000000001; }},
      {Codec::kPowerSgd, [](auto& options, auto&) { options.matrix_rank = 3; }},
      {Codec::kPowerSgd, [](auto&, auto& shapes) { std::swap(shapes[1][0], shapes[1][1]); }},
  };
  for (const auto& nodes : kFours) {
    for (size_t i = 0; i < changes.size(); ++i) {
      SCOPED_TRACE(testing::Message() << testing::PrintToString(nodes) << i);
      FakeWorld world(nodes);
      ExpectAllOk(RunThreads(
          world,
          [&](Communicator& c) -> absl::Status {
            CompressionOptions options = Options(changes[i].first);
            std::vector<std::vector<int64_t>> shapes = kShapes;
            if (c.rank() == 2) changes[i].second(options, shapes);
            const auto refused = CompressedCollective::Create(&c, options, kCount, shapes).status();
            EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
            EXPECT_THAT(std::string(refused.message()), testing::HasSubstr("give all ranks the same"));
            return RunSteps(c, Options(Codec::kInt8), 2).status;
          },
          kNever));
      if (testing::Test::HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace gtrain
