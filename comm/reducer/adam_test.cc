// 1-bit Adam: what an optimiser that divides by a mean of squares makes of compressed momenta.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numbers>
#include <string>
#include <vector>

#include "base/rng.h"
#include "comm/exec/check_collectives.h"
#include "comm/exec/rank_test_threads.h"
#include "comm/reducer/noise_test_draws.h"
#include "comm/reducer/reducer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain {
namespace {

using comm::ExpectAllOk;
using comm::FakeWorld;
using comm::RunThreads;

constexpr size_t kCount = 1024;

struct Adam {
  explicit Adam(size_t count) : momentum(count), variance(count) {}
  void Step(absl::Span<const float> gradient, bool frozen, float rate, absl::Span<float> x) {
    constexpr float kBeta1 = 0.9f, kBeta2 = 0.999f, kLeast = 1e-8f;
    ++steps;
    if (!frozen) ++measured;
    const float one = 1 - std::pow(kBeta1, static_cast<float>(steps));
    const float two = 1 - std::pow(kBeta2, static_cast<float>(measured));
    for (size_t i = 0; i < x.size(); ++i) {
      momentum[i] = kBeta1 * momentum[i] + (1 - kBeta1) * gradient[i];
      if (!frozen) variance[i] = kBeta2 * variance[i] + (1 - kBeta2) * gradient[i] * gradient[i];
      x[i] -= rate * momentum[i] / one / (std::sqrt(variance[i] / two) + kLeast);
    }
  }
  std::vector<float> momentum, variance;
  int steps = 0, measured = 0;
};

// Logistic regression: labels are drawn with the probabilities that a teacher has, features have scales that
// span two decades. Nats a sample on what was not trained, beside the teacher's probabilities.
class Lessons {
 public:
  Lessons() : scale_(kCount), teacher_(kCount) {
    Rng rng(1);
    for (float& s : scale_) s = std::pow(10.0f, -static_cast<float>(2 * rng.Unit()));
    double power = 0;
    for (size_t i = 0; i < kCount; ++i) {
      teacher_[i] = Noise(rng) / scale_[i];
      power += double{teacher_[i]} * teacher_[i] * scale_[i] * scale_[i];
    }
    for (float& w : teacher_) w *= static_cast<float>(kTeacher / std::sqrt(power));
  }
  // Features of a sample; returns the probability of its label.
  float Draw(Rng& rng, std::vector<float>& features) const {
    float sum = 0;
    for (size_t i = 0; i < kCount; ++i) {
      features[i] = scale_[i] * Noise(rng);
      sum += features[i] * teacher_[i];
    }
    return 1 / (1 + std::exp(-sum));
  }
  static float Guess(absl::Span<const float> x, const std::vector<float>& features) {
    float sum = 0;
    for (size_t i = 0; i < kCount; ++i) sum += x[i] * features[i];
    return 1 / (1 + std::exp(-sum));
  }
  double Loss(absl::Span<const float> x) const {
    Rng rng(99);
    std::vector<float> features(kCount);
    double loss = 0;
    constexpr int kSamples = 4000;
    for (int i = 0; i < kSamples; ++i) {
      const double p = Draw(rng, features), q = Guess(x, features);
      loss -= (p * std::log(q + 1e-12) + (1 - p) * std::log(1 - q + 1e-12)) / kSamples;
    }
    return loss;
  }

 private:
  static constexpr double kTeacher = 3;
  std::vector<float> scale_, teacher_;
};

// Trains with Adam, which leaves its variance alone when the reducer says so, if it `freezes`.
double Train(int ranks, const CompressionOptions& compress, bool freezes) {
  constexpr int kSteps = 900, kBatchOfAll = 64;
  constexpr double kRate = 0.01;
  const int batch = kBatchOfAll / ranks;
  FakeWorld world(FakeWorld::OneNode(ranks));
  const Lessons lessons;
  double loss = 0;
  ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
    ReducerOptions options;
    options.compression = compress;
    options.compress_from = 1;
    auto reducer = Reducer::Create(&c, {{"x", kCount}}, options);
    RETURN_IF_BAD(reducer.status());
    std::vector<float> x(kCount), features(kCount);
    Adam adam(kCount);
    Rng rng(static_cast<uint64_t>(c.rank()) + 2);
    for (int step = 0; step < kSteps; ++step) {
      const absl::Span<float> g = (*reducer)->gradient(0);
      std::fill(g.begin(), g.end(), 0.0f);
      for (int sample = 0; sample < batch; ++sample) {
        const float label = lessons.Draw(rng, features) > static_cast<float>(rng.Unit()) ? 1 : 0;
        const float wrong = Lessons::Guess(x, features) - label;
        for (size_t i = 0; i < kCount; ++i) g[i] += wrong * features[i] / static_cast<float>(batch);
      }
      RETURN_IF_BAD((*reducer)->Ready(0));
      const auto done = (*reducer)->Finish();
      RETURN_IF_BAD(done.status());
      const double rate = kRate * 0.5 * (1 + std::cos(std::numbers::pi * step / kSteps));
      adam.Step(g, freezes && done->momentum_travelled, static_cast<float>(rate), absl::MakeSpan(x));
    }
    if (c.rank() == 0) loss = lessons.Loss(x);
    return absl::OkStatus();
  }));
  return loss;
}

CompressionOptions OneBit(int warmup_steps) {
  CompressionOptions options;
  options.codec = Codec::kOneBit;
  options.optimizer_momentum = 0.9f;
  options.warmup_steps = warmup_steps;
  return options;
}

// Within 1 % with the variance left alone behind the warm-up, as the reducer says; 9 % worse without.
TEST(Adam, OneBitReachesTheLossOfDenseGradients) {
  const double dense = Train(4, {}, true), frozen = Train(4, OneBit(200), true);
  std::printf("dense %.4f nats, 1-bit %+.2f %%", dense, 100 * (frozen / dense - 1));
  EXPECT_LT(frozen, 1.01 * dense);
  const double moving = Train(4, OneBit(200), false);
  std::printf(", with a variance that goes on %+.2f %%\n", 100 * (moving / dense - 1));
  EXPECT_GT(moving, 1.04 * dense);
}

// Ranks that do not talk to other machines themselves know it, too.
TEST(Adam, AllRanksKnowWhetherTheMomentumTravelled) {
  constexpr int kWarmup = 2;
  for (const auto& nodes : std::vector<std::vector<std::string>>{{"a", "b"}, {"a", "b", "a", "b"}}) {
    FakeWorld world(nodes);
    ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
      auto collective = CompressedCollective::Create(&c, OneBit(kWarmup), kCount);
      RETURN_IF_BAD(collective.status());
      std::vector<float> g(kCount, 1.0f);
      for (int step = 0; step < 4; ++step) {
        RETURN_IF_BAD((*collective)->AllReduceMean(absl::MakeSpan(g)));
        EXPECT_EQ((*collective)->momentum_travelled(), step >= kWarmup) << step;
      }
      return absl::OkStatus();
    }));
  }
}

}  // namespace
}  // namespace gtrain
