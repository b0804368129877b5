// Checks at 2 to 100 ranks what compression promises at 4: ranks are threads of one process.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numbers>
#include <thread>
#include <vector>

#include "base/memory_count_fake.h"
#include "base/rng.h"
#include "comm/exec/check_collectives.h"
#include "comm/exec/rank_test_threads.h"
#include "comm/reducer/noise_test_draws.h"
#include "comm/reducer/reducer.h"
#include "comm/reducer/sparse_mean.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain {
namespace {

using comm::ExpectAllOk;
using comm::FakeWorld;
using comm::kReturnedMax;
using comm::RunThreads;

constexpr size_t kCount = 16384;  // a shard for each of 64 ranks

CompressionOptions TopK(double density) {
  CompressionOptions options;
  options.codec = Codec::kTopK;
  options.density = density;
  return options;
}
CompressionOptions Dgc(double density, int warmup_steps) {
  CompressionOptions options = TopK(density);
  options.momentum = 0.9f;
  options.warmup_steps = warmup_steps;
  return options;
}

struct Trained {
  double loss = 0;
  uint64_t received = 0;  // bytes by rank 0 in the last step
};

// The loss of a quadratic after 300 steps of stochastic gradient descent with momentum, as a share of what it
// was. Its curvatures span three decades; the noise of the mean is the same at any number of ranks.
Trained Train(int ranks, const CompressionOptions& options) {
  constexpr int kSteps = 300;
  constexpr double kRate = 0.02, kMomentum = 0.9, kNoise = 0.3;
  FakeWorld world(FakeWorld::OneNode(ranks));
  std::vector<float> curvature(kCount);
  Rng shape(1);
  for (float& h : curvature) h = std::pow(10.0f, -std::fabs(Noise(shape)));
  Trained trained;
  ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
    auto collective = CompressedCollective::Create(&c, options, kCount);
    RETURN_IF_BAD(collective.status());
    std::vector<float> x(kCount), g(kCount), momentum(kCount);  // the least loss is at 1
    Rng rng(static_cast<uint64_t>(c.rank()) + 2);
    const auto noise = static_cast<float>(kNoise * std::sqrt(ranks));
    const auto factor = static_cast<float>(options.momentum > 0 ? 0 : kMomentum);
    uint64_t received = 0;
    for (int step = 0; step < kSteps; ++step) {
      received = (*collective)->bytes_received();
      for (size_t i = 0; i < kCount; ++i) g[i] = curvature[i] * (x[i] - 1) + noise * Noise(rng);
      RETURN_IF_BAD((*collective)->AllReduceMean(absl::MakeSpan(g)));
      const auto rate = static_cast<float>(kRate * 0.5 * (1 + std::cos(std::numbers::pi * step / kSteps)));
      for (size_t i = 0; i < kCount; ++i) {
        momentum[i] = factor * momentum[i] + g[i];
        x[i] -= rate * momentum[i];
      }
    }
    if (c.rank() != 0) return absl::OkStatus();
    double first = 0;
    for (size_t i = 0; i < kCount; ++i) {
      trained.loss += curvature[i] * (x[i] - 1) * (x[i] - 1);
      first += curvature[i];
    }
    trained.loss /= first;
    trained.received = (*collective)->bytes_received() - received;
    return absl::OkStatus();
  }));
  return trained;
}

// Trains on each number of ranks and says how far it gets.
void ExpectToTrainAsOn(int few, const std::vector<int>& ranks, const CompressionOptions& options) {
  // Two ranks are worse than four however their packets travel: what they hold back cancels less.
  constexpr double kWorse = 1.4;
  const double dense = Train(few, {}).loss, bound = kWorse * Train(few, options).loss;
  for (const int n : ranks) {
    const Trained trained = Train(n, options);
    std::printf("%3d ranks: %.2f of the loss of dense gradients, %.1f KB received a step\n", n,
                trained.loss / dense, static_cast<double>(trained.received) / 1e3);
    EXPECT_LT(trained.loss, bound) << n;
  }
}

// From 12 ranks on the sum of their packets comes from owners: one that returns 1 % of it trains to twice the
// loss of 11 ranks.
TEST(ManyRanks, TopKTrainsAsItDoesOnFour) { ExpectToTrainAsOn(4, {2, 4, 8, 11, 12, 16, 64}, TopK(0.01)); }
TEST(ManyRanks, DgcTrainsAsItDoesOnFour) { ExpectToTrainAsOn(4, {2, 4, 16, 64}, Dgc(0.01, 24)); }
// The density is so low that owners select, too, where 16 ranks get whole packets.
TEST(ManyRanks, SparserTopKTrainsAsItDoesOnSixteen) { ExpectToTrainAsOn(16, {17, 64}, TopK(0.005)); }
TEST(ManyRanks, SparserDgcTrainsAsItDoesOnSixteen) { ExpectToTrainAsOn(16, {17, 64}, Dgc(0.001, 24)); }

struct Traffic {
  uint64_t sent = 0, received = 0;
};
// The traffic of rank 0, in each of `steps` steps.
std::vector<Traffic> TrafficOf(int ranks, const CompressionOptions& options, size_t count, int steps) {
  FakeWorld world(FakeWorld::OneNode(ranks));
  std::vector<Traffic> traffic;
  ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
    auto collective = CompressedCollective::Create(&c, options, count);
    RETURN_IF_BAD(collective.status());
    Rng rng(static_cast<uint64_t>(c.rank()));
    std::vector<float> g(count);
    Traffic before;
    for (int step = 0; step < steps; ++step) {
      for (float& value : g) value = Noise(rng);
      RETURN_IF_BAD((*collective)->AllReduceMean(absl::MakeSpan(g)));
      const Traffic now = {(*collective)->bytes_sent(), (*collective)->bytes_received()};
      if (c.rank() == 0) traffic.push_back({now.sent - before.sent, now.received - before.received});
      before = now;
    }
    return absl::OkStatus();
  }));
  return traffic;
}

// Slots of a warm-up's first step would cost a run 25 to 125 times the bytes that it sends.
TEST(ManyRanks, SlotsFollowTheDensityOfTheStep) {
  constexpr int kWarmup = 4;
  for (const double density : {0.01, 0.002}) {
    for (const int ranks : {4, 16, 24}) {
      const auto warm = TrafficOf(ranks, Dgc(density, kWarmup), 4 * kCount, kWarmup + 3);
      const auto cold = TrafficOf(ranks, Dgc(density, 0), 4 * kCount, 2);
      for (size_t step = kWarmup; step < warm.size(); ++step) {
        EXPECT_LT(warm[step].sent, 1.25 * static_cast<double>(cold[1].sent)) << ranks << " " << density;
        EXPECT_LT(warm[step].received, 1.25 * static_cast<double>(cold[1].received))
            << ranks << " " << density;
      }
      EXPECT_GT(warm[0].sent, 5 * cold[1].sent) << "there was no warm-up";
    }
  }
}

// A quarter of the elements as index and value, to everyone: 3.75 times the bytes of all of them on 16 ranks.
TEST(ManyRanks, WarmingUpSendsNoMoreThanDenseGradients) {
  for (const int ranks : {2, 4, 8, 16, 24}) {
    for (const Traffic& step : TrafficOf(ranks, Dgc(0.001, 6), 4 * kCount, 8)) {
      EXPECT_LE(step.sent, comm::DenseBytes(4 * kCount)) << ranks;
      EXPECT_LE(step.received, comm::DenseBytes(4 * kCount)) << ranks;
    }
  }
}

// The density of many ranks together falls later than that of each: an owner that went along held most of the
// mean back.
TEST(ManyRanks, WhileTheDensityFallsTheMeanComesBackWhole) {
  constexpr int kRanks = 24, kWarmup = 8;
  FakeWorld world(FakeWorld::OneNode(kRanks));
  ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
    const auto make = [&] { return CompressedCollective::Create(&c, Dgc(0.001, kWarmup), 4 * kCount); };
    auto collective = make();
    RETURN_IF_BAD(collective.status());
    Rng rng(static_cast<uint64_t>(c.rank()));
    for (int step = 0; step < kWarmup + 2; ++step) {
      std::vector<float> g(4 * kCount);
      for (float& value : g) value = Noise(rng);
      RETURN_IF_BAD((*collective)->AllReduceMean(absl::MakeSpan(g)));
      const auto some = std::count_if(g.begin(), g.end(), [](float value) { return value != 0; });
      const double share = static_cast<double>(some) / static_cast<double>(g.size());
      EXPECT_GT(share, step == 0             ? 0.9
                       : step == kWarmup / 2 ? 0.2
                                             : 0)
          << "24 times a density of 25 and 1.6 %";
      EXPECT_LT(share, step > kWarmup ? 0.03 : 1.1) << "24 times 0.1 % at most";
      if (step != 3 && step != kWarmup) continue;  // in the middle, and behind it: another one goes on
      const std::vector<CarriedState> states = (*collective)->Export();
      collective = make();
      RETURN_IF_BAD(collective.status());
      for (const CarriedState& state : states) RETURN_IF_BAD((*collective)->Load(state));
    }
    return absl::OkStatus();
  }));
}

// Everything that went in came out, or is carried over by a rank or by the owner of a shard.
void CheckSentPlusCarried(const CompressionOptions& options, int ranks, int steps) {
  FakeWorld world(FakeWorld::OneNode(ranks));
  ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
    auto collective = CompressedCollective::Create(&c, options, kCount);
    RETURN_IF_BAD(collective.status());
    Rng rng(static_cast<uint64_t>(c.rank()));
    std::vector<float> g(kCount);
    std::vector<double> missing(kCount), carried(kCount);  // in the sum of all ranks; by this rank
    for (int step = 0; step < steps; ++step) {
      for (size_t i = 0; i < kCount; ++i) missing[i] += g[i] = Noise(rng);
      RETURN_IF_BAD((*collective)->AllReduceMean(absl::MakeSpan(g)));
      for (size_t i = 0; i < kCount; ++i) missing[i] -= g[i];
    }
    double held_back = 0;
    for (const CarriedState& state : (*collective)->Export()) {
      const bool of_shard = state.name == "residual/shard";
      if (!of_shard && state.name != "residual") continue;
      for (size_t i = 0; i < state.values.size(); ++i) {
        carried[state.offset + i] += double{state.values[i]} * (of_shard ? ranks : 1);
        if (of_shard) held_back += std::fabs(double{state.values[i]});
      }
    }
    RETURN_IF_BAD(c.AllReduce(&held_back, 1, DType::kFloat64, ReduceOp::kSum));
    EXPECT_GT(held_back, 0) << "by some owner";
    RETURN_IF_BAD(c.AllReduce(missing.data(), kCount, DType::kFloat64, ReduceOp::kSum));
    RETURN_IF_BAD(c.AllReduce(carried.data(), kCount, DType::kFloat64, ReduceOp::kSum));
    double worst = 0;
    for (size_t i = 0; i < kCount; ++i) worst = std::max(worst, std::fabs(missing[i] - carried[i]));
    EXPECT_LT(worst, 1e-3) << "of gradients of 1; float32 loses 7e-6 of them";
    return absl::OkStatus();
  }));
}

// DGC, with a momentum so small that nothing but the gradients is added up, through the fall of its density:
// what the owners' int8 could not say when it ends comes out later, and is not lost.
TEST(ManyRanks, SentPlusCarriedIsWhatWentInWhileTheDensityFalls) {
  constexpr int kWarmup = 4;
  for (const double density : {0.0005, 0.002}) {  // behind the fall owners select; or send int8 as before
    SCOPED_TRACE(density);
    CompressionOptions options = Dgc(density, kWarmup);
    options.momentum = 1e-30f;
    CheckSentPlusCarried(options, 2 * kReturnedMax, kWarmup + 3);
  }
}

// A program that goes back to a checkpoint of the fall, or to the beginning, behind its end: it gets what a
// new object with that state gets, on ranks whose owners select and on ranks whose owners send int8.
TEST(ManyRanks, AStateFromWithinTheFallOfTheDensityIsTakenBehindIt) {
  constexpr int kWarmup = 8, kCountHere = 4 * static_cast<int>(kCount);
  for (const auto& [ranks, density] : std::vector<std::pair<int, double>>{{24, 0.001}, {23, 0.0055}}) {
    SCOPED_TRACE(ranks);
    FakeWorld world(FakeWorld::OneNode(ranks));
    ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
      const auto make = [&] { return CompressedCollective::Create(&c, Dgc(density, kWarmup), kCountHere); };
      auto one = make(), other = make();
      RETURN_IF_BAD(one.status());
      RETURN_IF_BAD(other.status());
      Rng rng(static_cast<uint64_t>(c.rank()));
      const auto step = [&](CompressedCollective& collective,
                            Rng draws) -> absl::StatusOr<std::vector<float>> {
        std::vector<float> g(kCountHere);
        for (float& value : g) value = Noise(draws);
        RETURN_IF_BAD(collective.AllReduceMean(absl::MakeSpan(g)));
        return g;
      };
      std::vector<CarriedState> states;
      for (int i = 0; i < kWarmup + 2; ++i) {
        if (i == 3) states = (*one)->Export();
        RETURN_IF_BAD(step(**one, Rng(rng.Next())).status());
      }
      for (const CarriedState& state : states) {
        RETURN_IF_BAD((*one)->Load(state));
        RETURN_IF_BAD((*other)->Load(state));
      }
      for (int i = 3; i < kWarmup + 2; ++i) {
        const Rng draws(rng.Next());
        auto went_back = step(**one, draws), anew = step(**other, draws);
        RETURN_IF_BAD(went_back.status());
        RETURN_IF_BAD(anew.status());
        EXPECT_TRUE(*went_back == *anew) << "step " << i;
      }
      return absl::OkStatus();
    }));
  }
}

// The buffers that a step needs while a quarter of the elements travels are not kept for the steps after it.
TEST(ManyRanks, AWarmUpLeavesNoBuffersBehind) {
  constexpr int kWarmup = 4;
  const auto held = [](const CompressionOptions& options) {
    FakeWorld world(FakeWorld::OneNode(8));
    int64_t bytes = 0;
    ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
      auto collective = CompressedCollective::Create(&c, options, 4 * kCount);
      RETURN_IF_BAD(collective.status());
      Rng rng(static_cast<uint64_t>(c.rank()));
      std::vector<float> g(4 * kCount);
      for (int step = 0; step < kWarmup + 3; ++step) {
        for (float& value : g) value = Noise(rng);
        RETURN_IF_BAD((*collective)->AllReduceMean(absl::MakeSpan(g)));
      }
      RETURN_IF_BAD(c.Barrier());
      if (c.rank() == 0) {  // the others wait
        bytes = AllocatedBytes();
        collective->reset();
        bytes -= AllocatedBytes();
      }
      return c.Barrier();
    }));
    return bytes;
  };
  const int64_t packet = static_cast<int64_t>(4 * kCount / 4 * 8);  // of a quarter
  EXPECT_LT(held(Dgc(0.001, kWarmup)), held(Dgc(0.001, 0)) + packet / 4);
}

TEST(ManyRanks, NorDoesTheScratchOfAThread) {
  const auto held = [](int warmup) {
    int64_t bytes = 0;
    std::thread([&] {  // each has its own
      auto compressor = Compressor::Create(Dgc(0.001, warmup), 16 * kCount);
      Rng rng(1);
      std::vector<float> g(16 * kCount);
      for (float& value : g) value = Noise(rng);
      std::vector<uint8_t> packet((*compressor)->MaxBytes());
      const int64_t before = AllocatedBytes();
      for (int step = 0; step < warmup + 600; ++step) {
        EXPECT_TRUE((*compressor)->Encode(g, absl::MakeSpan(packet)).ok());
        EXPECT_TRUE((*compressor)->Apply().ok());
      }
      bytes = AllocatedBytes() - before;
    })
        .join();
    return bytes;
  };
  EXPECT_LT(held(4), 2 * held(0) + (64 << 10));
}

// Residuals of bfloat16 are for those who have no room for float32.
TEST(ManyRanks, ExportKeepsNoCopy) {
  CompressionOptions options = TopK(0.01);
  options.residual = ResidualType::kBFloat16;
  auto compressor = Compressor::Create(options, kCount);
  ASSERT_TRUE(compressor.ok());
  const int64_t before = AllocatedBytes();
  EXPECT_EQ((*compressor)->Export()[0].values.size(), kCount);
  EXPECT_LT(AllocatedBytes() - before, static_cast<int64_t>(kCount));
}

// A slot of 64 bytes or more for every rank is more than a small bucket.
TEST(ManyRanks, SmallBucketsSendNoMoreThanDenseGradients) {
  for (const Codec codec : {Codec::kInt8, Codec::kOneBit, Codec::kFloat16, Codec::kTopK}) {
    for (const size_t count : {100u, 3000u, 16384u}) {
      for (const int ranks : {2, 40}) {
        CompressionOptions options = TopK(0.001);
        options.codec = codec;
        const Traffic step = TrafficOf(ranks, options, count, 2)[1];
        EXPECT_LE(step.sent, comm::DenseBytes(count)) << CodecName(codec) << " " << count << " " << ranks;
        EXPECT_LE(step.received, comm::DenseBytes(count)) << CodecName(codec) << " " << count << " " << ranks;
      }
    }
  }
}

TEST(ManyRanks, ShardsHoldAnElementThatIsSent) {
  for (const double density : {0.01, 0.001, 1e-5}) {
    for (const size_t count : {1'000u, 16'384u, 2'000'000u}) {
      for (const int ranks : {2, 64, 1000}) {
        const size_t shard = comm::ShardSize(TopK(density), count, ranks);
        EXPECT_GE(static_cast<double>(shard), std::min(1 / density - 1, static_cast<double>(count)));
        EXPECT_GE(shard * static_cast<size_t>(ranks), count);
      }
    }
  }
}

TEST(ManyRanks, BytesARankStopGrowing) {
  constexpr size_t kMany = 1 << 18;
  for (const double density : {0.01, 0.001}) {
    CompressionOptions options = TopK(density);
    options.error_feedback = false;  // memory for 100 ranks
    const double packet = 8 * density * kMany;
    const auto received = [&](int ranks) {
      return static_cast<double>(TrafficOf(ranks, options, kMany, 2)[1].received) / packet;
    };
    const double fifty = received(50);
    EXPECT_LT(fifty, (1 + kReturnedMax) * 1.5) << density;  // headers of small packets are not little here
    EXPECT_LT(received(100), 1.25 * fifty) << density;
  }
}

TEST(ManyRanks, SentPlusCarriedIsTheSumOfTheMeans) {
  for (const double density : {0.002, 0.02}) {  // owners select; owners send int8
    SCOPED_TRACE(density);
    CheckSentPlusCarried(TopK(density), 2 * kReturnedMax, 6);
  }
}

TEST(ManyRanks, CarriedStateGoesOnElsewhere) {
  for (const double density : {0.002, 0.02}) {
    FakeWorld world(FakeWorld::OneNode(kReturnedMax + 4));
    ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
      auto first = CompressedCollective::Create(&c, Dgc(density, 8), kCount);
      RETURN_IF_BAD(first.status());
      Rng rng(static_cast<uint64_t>(c.rank()));
      std::vector<float> a(kCount);
      for (int step = 0; step < 5; ++step) {
        for (float& value : a) value = Noise(rng);
        RETURN_IF_BAD((*first)->AllReduceMean(absl::MakeSpan(a)));
      }
      auto second = CompressedCollective::Create(&c, Dgc(density, 8), kCount);
      RETURN_IF_BAD(second.status());
      for (const CarriedState& state : (*first)->Export()) RETURN_IF_BAD((*second)->Load(state));
      for (float& value : a) value = Noise(rng);
      std::vector<float> b = a;
      RETURN_IF_BAD((*first)->AllReduceMean(absl::MakeSpan(a)));
      RETURN_IF_BAD((*second)->AllReduceMean(absl::MakeSpan(b)));
      EXPECT_EQ(a, b);
      return absl::OkStatus();
    }));
  }
}

}  // namespace
}  // namespace gtrain
