#include "comm/codec/compressor.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "base/rng.h"
#include "comm/codec/carried.h"
#include "comm/codec/kernels.h"
#include "comm/codec/packet.h"
#include "comm/codec/top_k.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain {
namespace {

// Around vectors, blocks, pieces and chunks.
constexpr size_t kCounts[] = {1, 7, 15, 63, 64, 255, 256, 257, 2047, 2049, 16383, 16385, 40000};

// Box and Muller's.
float Normal(Rng& rng) {
  return static_cast<float>(std::sqrt(-2 * std::log(1 - rng.Unit())) *
                            std::cos(6.283185307179586 * rng.Unit()));
}

std::vector<float> Gradient(size_t count, int seed, float scale = 1e-2f) {
  Rng rng(static_cast<uint64_t>(seed));
  std::vector<float> gradient(count);
  // Heavy tails, as gradients have.
  for (float& g : gradient) g = scale * Normal(rng) * std::fabs(Normal(rng));
  return gradient;
}

std::unique_ptr<Compressor> Make(CompressionOptions options, size_t count) {
  auto made = Compressor::Create(options, count);
  EXPECT_TRUE(made.ok()) << made.status();
  return *std::move(made);
}

std::vector<uint8_t> Encode(Compressor& compressor, const std::vector<float>& gradient) {
  std::vector<uint8_t> packet(compressor.MaxBytes());
  const auto bytes = compressor.Encode(gradient, absl::MakeSpan(packet));
  EXPECT_TRUE(bytes.ok()) << bytes.status();
  packet.resize(bytes.value_or(0));
  return packet;
}

std::vector<float> Decoded(const std::vector<uint8_t>& packet, size_t count) {
  std::vector<float> out(count, 123);
  EXPECT_EQ(Decode(packet, absl::MakeSpan(out), DecodeMode::kSet), absl::OkStatus());
  return out;
}

// The sum of what is sent and what is carried over is the sum of the gradients: the promise of error
// feedback.
void ExpectSentPlusResidualIsWhatCameIn(ResidualType type) {
  // Between a bfloat16 and the next one in either direction.
  const double rounded = type == ResidualType::kBFloat16 ? 1.0 / 128 : 0;
  for (const Codec codec : PacketCodecs()) {
    if (codec == Codec::kNone) continue;
    for (const size_t count : kCounts) {
      auto compressor = Make({.codec = codec, .residual = type, .density = 0.05}, count);
      std::vector<float> old(count, 0);
      for (int step = 0; step < 4; ++step) {
        const std::vector<float> gradient = Gradient(count, step);
        const std::vector<float> sent = Decoded(Encode(*compressor, gradient), count);
        ASSERT_EQ(compressor->Apply(), absl::OkStatus());
        const auto residual = compressor->Export()[0].values;
        for (size_t i = 0; i < count; ++i) {
          ASSERT_NEAR(sent[i] + residual[i], gradient[i] + old[i],
                      1e-6 + 1e-6 * std::fabs(gradient[i]) + rounded * std::fabs(residual[i]))
              << CodecName(codec) << " " << count << " " << i;
        }
        old.assign(residual.begin(), residual.end());
      }
    }
  }
}

TEST(Compressor, SentPlusResidualIsGradientPlusOldResidual) {
  ExpectSentPlusResidualIsWhatCameIn(ResidualType::kFloat32);
}

TEST(Compressor, SentPlusRoundedResidualIsGradientPlusOldResidual) {
  ExpectSentPlusResidualIsWhatCameIn(ResidualType::kBFloat16);
}

// Steps of which each is far below what a bfloat16 of their sum can tell: rounded to nearest, they would end
// at 4; rounded by the same random number in every step, most elements would.
TEST(Compressor, RoundedResidualsLoseNothingOnAverage) {
  constexpr size_t kCount = 4000;
  constexpr int kSteps = 4096;
  constexpr float kStep = 0.01f;
  for (const float momentum : {0.0f, 1e-9f}) {
    auto compressor = Make({.codec = Codec::kTopK,
                            .residual = ResidualType::kBFloat16,
                            .density = 1.0 / kCount,
                            .exact = true,
                            .momentum = momentum},
                           kCount);
    std::vector<float> gradient(kCount, kStep);
    gradient[0] = 1e6f;  // the one that is sent
    for (int step = 0; step < kSteps; ++step) {
      Encode(*compressor, gradient);
      ASSERT_EQ(compressor->Apply(), absl::OkStatus());
    }
    const auto residual = compressor->Export()[0].values;
    double sum = 0;
    for (size_t i = 1; i < kCount; ++i) {
      sum += residual[i];
      ASSERT_NEAR(residual[i], kSteps * kStep, 0.4 * kSteps * kStep) << i;
    }
    EXPECT_NEAR(sum / (kCount - 1), kSteps * kStep, 0.01 * kSteps * kStep);
  }
}

TEST(Compressor, ResidualsOfTheOtherTypeAreTakenOver) {
  constexpr size_t kCount = 1000;
  const CompressionOptions exact = {.codec = Codec::kTopK, .density = 0.01, .momentum = 0.5f};
  CompressionOptions rounded = exact;
  rounded.residual = ResidualType::kBFloat16;
  const auto from = [&](const CompressionOptions& first, const CompressionOptions& second) {
    auto source = Make(first, kCount), target = Make(second, kCount);
    Encode(*source, Gradient(kCount, 1));
    EXPECT_EQ(source->Apply(), absl::OkStatus());
    for (const auto& state : source->Export()) {
      EXPECT_EQ(target->Load(state.name, state.values), absl::OkStatus());
    }
    for (size_t state = 0; state < 2; ++state) {
      const auto before = source->Export()[state].values, after = target->Export()[state].values;
      for (size_t i = 0; i < kCount; ++i) {
        const float most = first.residual == ResidualType::kFloat32 ? std::fabs(before[i]) / 256 : 0;
        ASSERT_NEAR(after[i], before[i], most);
      }
    }
  };
  from(exact, rounded);
  from(rounded, exact);
}

TEST(Compressor, SeedsRoundDifferently) {
  const auto residual = [](uint32_t seed) {
    auto compressor =
        Make({.codec = Codec::kInt8, .residual = ResidualType::kBFloat16, .rounding_seed = seed}, 5000);
    Encode(*compressor, Gradient(5000, 1));
    EXPECT_EQ(compressor->Apply(), absl::OkStatus());
    const auto values = compressor->Export()[0].values;
    return std::vector<float>(values.begin(), values.end());
  };
  EXPECT_EQ(residual(1), residual(1));
  EXPECT_NE(residual(1), residual(2));
}

TEST(Compressor, ErrorsOfTheDenseCodecsAreBounded) {
  const std::vector<float> gradient = Gradient(5000, 1);
  const std::pair<Codec, double> bounds[] = {
      {Codec::kNone, 0}, {Codec::kFloat16, 1.0 / 2048}, {Codec::kBFloat16, 1.0 / 256}};
  for (const auto& [codec, relative] : bounds) {
    auto compressor = Make({.codec = codec, .error_feedback = false}, gradient.size());
    const std::vector<float> sent = Decoded(Encode(*compressor, gradient), gradient.size());
    for (size_t i = 0; i < gradient.size(); ++i) {
      ASSERT_LE(std::fabs(sent[i] - gradient[i]), relative * std::fabs(gradient[i]) + 6e-8)
          << CodecName(codec);
    }
  }
  for (const Codec codec : {Codec::kInt8, Codec::kFloat8}) {
    auto compressor = Make({.codec = codec, .error_feedback = false}, gradient.size());
    const std::vector<float> sent = Decoded(Encode(*compressor, gradient), gradient.size());
    for (size_t block = 0; block < gradient.size(); block += comm::kScaleBlock) {
      const size_t end = std::min(block + comm::kScaleBlock, gradient.size());
      float largest = 0;
      for (size_t i = block; i < end; ++i) largest = std::max(largest, std::fabs(gradient[i]));
      for (size_t i = block; i < end; ++i) {
        const double bound =
            codec == Codec::kInt8 ? largest / 254 : std::fabs(gradient[i]) / 16 + largest / 400000;
        ASSERT_LE(std::fabs(sent[i] - gradient[i]), bound * 1.001) << CodecName(codec) << " " << i;
      }
    }
  }
}

TEST(Compressor, OneBitSendsSignsAndTheMeanOfTheBlock) {
  std::vector<float> gradient(300);
  for (size_t i = 0; i < gradient.size(); ++i) gradient[i] = (i % 3 == 0 ? -1.0f : 1.0f) * (i < 256 ? 2 : 5);
  auto compressor = Make({.codec = Codec::kOneBit}, gradient.size());
  EXPECT_EQ(Decoded(Encode(*compressor, gradient), gradient.size()), gradient);
}

TEST(Compressor, ExactTopKIsTheLargest) {
  for (const size_t count : {100, 16400, 200000}) {
    auto compressor =
        Make({.codec = Codec::kTopK, .error_feedback = false, .density = 0.01, .exact = true}, count);
    for (int step = 0; step < 5; ++step) {
      // The scale jumps up and down, so the carried threshold is sometimes far too high and far too low.
      const std::vector<float> gradient = Gradient(count, step, step % 2 == 0 ? 1.0f : 1e-3f);
      std::vector<float> expected = gradient;
      std::vector<size_t> order(count);
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(),
                       [&](size_t a, size_t b) { return std::fabs(gradient[a]) > std::fabs(gradient[b]); });
      for (size_t i = count / 100; i < count; ++i) expected[order[i]] = 0;
      EXPECT_EQ(Decoded(Encode(*compressor, gradient), count), expected) << count << " step " << step;
    }
  }
}

TEST(Compressor, EqualMagnitudesAndZerosAreCountedRight) {
  const auto sent = [](const std::vector<float>& gradient, size_t count) {
    auto compressor =
        Make({.codec = Codec::kTopK, .error_feedback = false, .density = 0.1, .exact = true}, count);
    const std::vector<float> out = Decoded(Encode(*compressor, gradient), count);
    return std::count_if(out.begin(), out.end(), [](float v) { return v != 0; });
  };
  EXPECT_EQ(sent(std::vector<float>(50000, -3.0f), 50000), 5000);
  EXPECT_EQ(sent(std::vector<float>(1000, 0.0f), 1000), 0);
  std::vector<float> few(1000, 0.0f);
  few[3] = few[999] = 1;
  EXPECT_EQ(sent(few, 1000), 2);
}

TEST(Compressor, ApproximateTopKStaysWithinTenPercent) {
  constexpr size_t kCount = 300000;
  for (const double density : {0.001, 0.01}) {
    auto compressor = Make({.codec = Codec::kTopK, .density = density}, kCount);
    Rng rng(1);
    for (int step = 0; step < 40; ++step) {
      const float scale = std::exp(0.3f * Normal(rng));
      const std::vector<uint8_t> packet = Encode(*compressor, Gradient(kCount, step, scale));
      const auto header = comm::ReadHeader(packet, kCount);
      ASSERT_TRUE(header.ok());
      EXPECT_GE(header->entries, 0.9 * density * kCount - 1);
      EXPECT_LE(header->entries, 1.1 * density * kCount + 1);
      EXPECT_EQ(compressor->selected().sent, header->entries);
      EXPECT_EQ(compressor->selected().wanted, std::lround(density * kCount));
      ASSERT_EQ(compressor->Apply(), absl::OkStatus());
    }
  }
}

TEST(Compressor, MomentumCorrectionFollowsThePaper) {
  constexpr size_t kCount = 3000;
  constexpr float kMomentum = 0.9f;
  auto compressor =
      Make({.codec = Codec::kTopK, .density = 0.1, .exact = true, .momentum = kMomentum}, kCount);
  std::vector<float> u(kCount), v(kCount);
  for (int step = 0; step < 6; ++step) {
    const std::vector<float> gradient = Gradient(kCount, step);
    const std::vector<float> sent = Decoded(Encode(*compressor, gradient), kCount);
    ASSERT_EQ(compressor->Apply(), absl::OkStatus());
    for (size_t i = 0; i < kCount; ++i) {
      u[i] = kMomentum * u[i] + gradient[i];
      v[i] += u[i];
      if (sent[i] == 0) continue;
      EXPECT_NEAR(sent[i], v[i], 1e-6);
      u[i] = v[i] = 0;
    }
    const auto states = compressor->Export();
    ASSERT_EQ(states.size(), 3u);
    EXPECT_EQ(states[0].name, "residual");
    EXPECT_EQ(states[1].name, "momentum");
    EXPECT_EQ(states[2].name, "progress");
    for (size_t i = 0; i < kCount; ++i) {
      ASSERT_NEAR(states[0].values[i], v[i], 1e-6);
      ASSERT_NEAR(states[1].values[i], u[i], 1e-6);
    }
  }
}

TEST(Compressor, WarmUpLowersTheDensityExponentially) {
  constexpr size_t kCount = 100000;
  auto compressor = Make({.codec = Codec::kTopK, .density = 0.001, .exact = true, .warmup_steps = 4}, kCount);
  std::vector<size_t> entries;
  for (int step = 0; step < 6; ++step) {
    entries.push_back(comm::ReadHeader(Encode(*compressor, Gradient(kCount, step)), kCount)->entries);
    ASSERT_EQ(compressor->Apply(), absl::OkStatus());
  }
  EXPECT_THAT(entries, testing::ElementsAre(25000, 6287, 1581, 398, 100, 100));
}

TEST(Compressor, ADroppedStepLeavesNoTrace) {
  for (const CompressionOptions& options : std::vector<CompressionOptions>{
           {.codec = Codec::kTopK, .density = 0.01, .exact = true},
           {.codec = Codec::kTopK, .residual = ResidualType::kBFloat16, .density = 0.01, .exact = true},
           {.codec = Codec::kOneBit},
           {.codec = Codec::kOneBit, .residual = ResidualType::kBFloat16},
           {.codec = Codec::kInt8}}) {
    auto straight = Make(options, 5000), disturbed = Make(options, 5000);
    for (int step = 0; step < 4; ++step) {
      Encode(*disturbed, Gradient(5000, 100 + step));
      if (step % 2 == 0) disturbed->Drop();  // else the next Encode drops it
      EXPECT_EQ(Encode(*straight, Gradient(5000, step)), Encode(*disturbed, Gradient(5000, step)));
      ASSERT_EQ(straight->Apply(), absl::OkStatus());
      ASSERT_EQ(disturbed->Apply(), absl::OkStatus());
    }
    EXPECT_EQ(disturbed->Apply().code(), absl::StatusCode::kFailedPrecondition);
  }
}

void ExpectStateMovesToAnotherObject(const CompressionOptions& options) {
  auto first = Make(options, 5000);
  for (int step = 0; step < 12; ++step) {  // in the warm-up, and behind it
    auto second = Make(options, 5000);
    for (const auto& state : first->Export()) {
      ASSERT_EQ(second->Load(state.name, state.values), absl::OkStatus());
    }
    const std::vector<float> gradient = Gradient(5000, step);
    EXPECT_EQ(Encode(*first, gradient), Encode(*second, gradient)) << step;
    ASSERT_EQ(first->Apply(), absl::OkStatus());
    ASSERT_EQ(second->Apply(), absl::OkStatus());
    EXPECT_EQ(Encode(*second, Gradient(5000, 50)).size(), Encode(*first, Gradient(5000, 50)).size()) << step;
    second->Drop();
    first->Drop();
  }
}

TEST(Compressor, StateMovesToAnotherObject) {
  const CompressionOptions options = {
      .codec = Codec::kTopK, .density = 0.01, .momentum = 0.5f, .warmup_steps = 6};
  ExpectStateMovesToAnotherObject(options);
  CompressionOptions rounded = options;
  rounded.residual = ResidualType::kBFloat16;
  ExpectStateMovesToAnotherObject(rounded);
  ExpectStateMovesToAnotherObject({.codec = Codec::kInt8, .residual = ResidualType::kBFloat16});
  auto second = Make(options, 5000);
  EXPECT_EQ(second->Load("residual", Gradient(3, 1)).code(), absl::StatusCode::kInvalidArgument);
  for (const std::vector<float>& bad :
       std::vector<std::vector<float>>{{1, 2},
                                       {-1, 0, 0},
                                       {0, std::numeric_limits<float>::quiet_NaN(), 0},
                                       {0, 0, std::numeric_limits<float>::infinity()}}) {
    EXPECT_EQ(second->Load("progress", bad).code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(second->Load("progress", {1e9f, 1e30f, 7}), absl::OkStatus()) << "of other options, harmless";
  EXPECT_GE(comm::ReadHeader(Encode(*second, Gradient(5000, 1)), 5000)->entries, 45u);
  EXPECT_EQ(second->Load("speed", Gradient(5000, 1)).code(), absl::StatusCode::kInvalidArgument);
}

constexpr float kMax = std::numeric_limits<float>::max();
constexpr float kHostile[] = {65504,
                              65520,
                              -65536,
                              1e8f,
                              1e30f,
                              0x1p112f,
                              -0x1.8p126f,
                              kMax,
                              -kMax,
                              std::numeric_limits<float>::denorm_min(),
                              -std::numeric_limits<float>::min(),
                              0};

bool AllFinite(absl::Span<const float> values) {
  return std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); });
}

// One gradient of 65,520 under fp16 left a residual of minus infinity, which made every later step NaN.
TEST(Compressor, AFiniteGradientNeverMakesAnythingInfinite) {
  for (const Codec codec : PacketCodecs()) {
    if (codec == Codec::kNone || codec == Codec::kTopK) continue;
    for (const ResidualType type : {ResidualType::kFloat32, ResidualType::kBFloat16}) {
      for (const size_t count : {size_t{1}, size_t{255}, size_t{3000}}) {
        auto compressor = Make({.codec = codec, .residual = type}, count);
        for (int step = 0; step < 12; ++step) {
          std::vector<float> gradient = Gradient(count, step);
          size_t beyond = 0;
          for (size_t i = 0; step < 8 && i < count; i += 1 + static_cast<size_t>(step)) {
            gradient[i] = kHostile[(i + static_cast<size_t>(step)) % std::size(kHostile)];
            beyond += std::fabs(gradient[i]) > (codec == Codec::kFloat16 ? 131072.0f : 0x1p114f) ? 1 : 0;
          }
          const std::vector<float> sent = Decoded(Encode(*compressor, gradient), count);
          ASSERT_GE(compressor->clipped(), beyond) << CodecName(codec);
          ASSERT_TRUE(AllFinite(sent)) << CodecName(codec) << " " << step;
          for (const float value : sent)
            ASSERT_LE(std::fabs(value) * 0x1p15f, std::numeric_limits<float>::max()) << CodecName(codec);
          ASSERT_EQ(compressor->Apply(), absl::OkStatus());
          ASSERT_TRUE(AllFinite(compressor->Export()[0].values)) << CodecName(codec) << " " << step;
        }
        // fp16 and bf16 forget at once what was clipped: no residual is larger than a rounding.
        if (codec != Codec::kFloat16) continue;
        EXPECT_EQ(compressor->clipped(), 0);
        const auto states = compressor->Export();
        for (const float left : states[0].values) EXPECT_LT(std::fabs(left), 64);
      }
    }
  }
}

// Top-k clips nothing, because it sends values as they are: a sum that is too large for a float poisons its
// step and no other. Elements that are not sent stay, whole: the gradients are what was sent and what is
// left.
TEST(Compressor, HostileGradientsOfTopKPoisonTheirStepAlone) {
  for (const float momentum : {0.0f, 0.9f}) {
    for (const ResidualType type : {ResidualType::kFloat32, ResidualType::kBFloat16}) {
      for (const size_t count : {size_t{1}, size_t{255}, size_t{3000}}) {
        for (const bool exact : {true, false}) {
          SCOPED_TRACE(testing::Message() << momentum << " " << count << " " << exact);
          auto compressor = Make({.codec = Codec::kTopK,
                                  .residual = type,
                                  .density = 0.02,
                                  .exact = exact,
                                  .momentum = momentum},
                                 count);
          int poisoned = 0;
          for (int step = 0; step < 24; ++step) {
            std::vector<std::vector<float>> before;
            for (const auto& state : compressor->Export())
              before.emplace_back(state.values.begin(), state.values.end());
            std::vector<float> gradient = Gradient(count, step);
            for (size_t i = 0; step < 8 && i < count; i += 1 + static_cast<size_t>(step))
              gradient[i] = kHostile[(i + static_cast<size_t>(step)) % std::size(kHostile)];
            const std::vector<float> sent = Decoded(Encode(*compressor, gradient), count);
            EXPECT_EQ(compressor->clipped(), 0);
            const bool poison = !AllFinite(sent);
            poisoned += poison ? 1 : 0;
            ASSERT_EQ(compressor->Apply().ok(), !poison);
            const auto after = compressor->Export();
            ASSERT_EQ(after.size(), before.size());
            for (size_t i = 0; i < after.size(); ++i) {
              ASSERT_TRUE(AllFinite(after[i].values)) << step << " " << after[i].name;
              for (float& was : before[i]) {
                if (poison && after[i].name != "progress") was = std::clamp(was, -0x1p112f, 0x1p112f);
              }
              ASSERT_TRUE(!poison || after[i].values == before[i]) << step << " " << after[i].name;
            }
            if (poison) {
              for (const float value : sent) ASSERT_TRUE(std::isnan(value));
              ASSERT_LT(step, 8) << "gradients are harmless again";
            } else if (momentum == 0 && type == ResidualType::kFloat32) {
              for (size_t i = 0; i < count; ++i) {
                const float own = gradient[i] + before[0][i];
                ASSERT_EQ(sent[i] + after[0].values[i], own) << i;
                ASSERT_TRUE(sent[i] == 0 || after[0].values[i] == 0) << i;
              }
            }
          }
          EXPECT_GT(poisoned + static_cast<int>(count == 1), 0) << "nothing was hostile";
        }
      }
    }
  }
}

// A version before clipping wrote such residuals.
TEST(Compressor, ALoadedResidualThatIsNotFiniteIsZero) {
  for (const ResidualType type : {ResidualType::kFloat32, ResidualType::kBFloat16}) {
    auto compressor = Make({.codec = Codec::kFloat16, .residual = type}, 3);
    const float bad[] = {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity(), 2};
    ASSERT_EQ(compressor->Load("residual", bad), absl::OkStatus());
    EXPECT_THAT(compressor->Export()[0].values, testing::ElementsAre(0, 0, 2));
  }
}

TEST(Compressor, ANonFiniteGradientPoisonsThePacketAndNotTheResidual) {
  for (const Codec codec : PacketCodecs()) {
    for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN()}) {
      for (const size_t where : {size_t{0}, size_t{2500}, size_t{4999}}) {
        const ResidualType type = where == 2500 ? ResidualType::kBFloat16 : ResidualType::kFloat32;
        auto compressor = Make({.codec = codec, .residual = type, .density = 0.01}, 5000);
        std::vector<float> gradient = Gradient(5000, 1);
        gradient[where] = bad;
        const std::vector<float> out = Decoded(Encode(*compressor, gradient), 5000);
        for (const float value : out) ASSERT_TRUE(std::isnan(value)) << CodecName(codec);
        EXPECT_EQ(compressor->Apply().code(), absl::StatusCode::kFailedPrecondition);
        for (const auto& state : compressor->Export()) EXPECT_THAT(state.values, testing::Each(0.0f));
      }
    }
  }
}

TEST(Compressor, DecodeAdds) {
  for (const Codec codec : PacketCodecs()) {
    auto compressor = Make({.codec = codec, .density = 0.1}, 3001);
    const std::vector<uint8_t> packet = Encode(*compressor, Gradient(3001, 1));
    const std::vector<float> once = Decoded(packet, 3001);
    std::vector<float> sum = Gradient(3001, 2);
    const std::vector<float> before = sum;
    ASSERT_EQ(Decode(packet, absl::MakeSpan(sum), DecodeMode::kAdd), absl::OkStatus());
    for (size_t i = 0; i < sum.size(); ++i) ASSERT_FLOAT_EQ(sum[i], before[i] + once[i]) << CodecName(codec);
  }
}

// A packet of a peer that sends float32 may hold a NaN: that spoils its own element, and no other is added
// twice.
TEST(Compressor, DecodeAddsAroundANaN) {
  constexpr size_t kCount = 300;
  auto compressor = Make({.codec = Codec::kNone}, kCount);
  std::vector<uint8_t> packet = Encode(*compressor, Gradient(kCount, 1));
  const std::vector<float> once = Decoded(packet, kCount);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(packet.data() + comm::kPacketHeader + 110 * sizeof nan, &nan, sizeof nan);
  std::vector<float> sum(kCount, 1);
  ASSERT_EQ(Decode(packet, absl::MakeSpan(sum), DecodeMode::kAdd), absl::OkStatus());
  for (size_t i = 0; i < kCount; ++i) {
    if (i == 110) {
      EXPECT_TRUE(std::isnan(sum[i]));
    } else {
      ASSERT_EQ(sum[i], 1 + once[i]) << i;
    }
  }
}

TEST(Compressor, OptionsOutOfRangeAreRefused) {
  const CompressionOptions bad[] = {
      {.codec = Codec::kTopK, .density = 0},
      {.codec = Codec::kTopK, .density = 1.5},
      {.codec = Codec::kTopK, .density = std::numeric_limits<double>::quiet_NaN()},
      {.codec = Codec::kTopK, .momentum = 1},
      {.codec = Codec::kOneBit, .momentum = 0.9f},
      {.codec = Codec::kTopK, .error_feedback = false, .momentum = 0.9f},
      {.codec = Codec::kTopK, .warmup_steps = -1},
      {.codec = Codec::kTopK, .warmup_steps = kWarmupStepsMax + 1},
      {.codec = Codec::kOneBit, .warmup_steps = 3},
      {.codec = Codec::kOneBit, .optimizer_momentum = 0.9f},
  };
  for (const auto& options : bad) {
    EXPECT_EQ(Compressor::Create(options, 10).status().code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(Compressor::Create({}, 0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Compressor::Create({.codec = static_cast<Codec>(42)}, 10).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CodecName(static_cast<Codec>(42)), "unknown");
  EXPECT_EQ(ParseCodec("topk").value(), Codec::kTopK);
  EXPECT_EQ(ParseCodec("top-k").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(Policy, WordsOfTheEnvironment) {
  EXPECT_TRUE(ParseCompression("none")->codecs.empty());
  const auto one = ParseCompression("topk density=0.001 warmup=0");
  ASSERT_TRUE(one.ok()) << one.status();
  EXPECT_FALSE(one->automatic);
  ASSERT_EQ(one->codecs.size(), 1u);
  EXPECT_EQ(one->codecs[0].codec, Codec::kTopK);
  EXPECT_DOUBLE_EQ(one->codecs[0].density, 0.001);
  EXPECT_EQ(one->codecs[0].warmup_steps, 0);
  const auto several =
      ParseCompression("auto: fp16, onebit momentum=0.5, topk");  // as agent_core_test writes them
  ASSERT_TRUE(several.ok()) << several.status();
  EXPECT_TRUE(several->automatic);
  ASSERT_EQ(several->codecs.size(), 3u);
  EXPECT_EQ(several->codecs[0].codec, Codec::kFloat16);
  EXPECT_FLOAT_EQ(several->codecs[1].optimizer_momentum, 0.5f);
  EXPECT_EQ(several->codecs[1].warmup_steps, 100);
  EXPECT_DOUBLE_EQ(several->codecs[2].density, 0.01);
  EXPECT_FLOAT_EQ(ParseCompression("onebit")->codecs[0].optimizer_momentum, 0.9f);
  EXPECT_EQ(one->codecs[0].residual, ResidualType::kFloat32);
  EXPECT_EQ(ParseCompression("topk residual=bf16")->codecs[0].residual, ResidualType::kBFloat16);
  EXPECT_EQ(ParseCompression("int8 residual=fp32")->codecs[0].residual, ResidualType::kFloat32);
  EXPECT_EQ(ParseCompression("powersgd rank=2 warmup=7")->codecs[0].matrix_rank, 2);
  EXPECT_EQ(ParseCompression("powersgd")->codecs[0].matrix_rank, 4);
  EXPECT_EQ(ParseCompression("powersgd")->codecs[0].warmup_steps, 100);
  for (const char* bad : {"",
                          "zip",
                          "auto:",
                          "auto",
                          "fp16, int8",
                          "topk density=0",
                          "topk density=nan",
                          "topk momentum=0.9",
                          "fp16 warmup=1",
                          "onebit momentum=1",
                          "onebit warmup=-1",
                          "topk density",
                          "topk,",
                          "powersgd rank=0",
                          "powersgd rank=65",
                          "powersgd rank=2.5",
                          "powersgd density=0.1",
                          "topk rank=2",
                          "topk residual=fp16",
                          "topk residual",
                          "none residual=bf16",
                          "powersgd residual=bf16",
                          "topk density=0.1 density=0.2",
                          "auto: fp16, fp16",
                          "topk warmup=1000001",
                          "onebit momentum=0.9999999999"}) {
    EXPECT_EQ(ParseCompression(bad).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

TEST(Packet, IsFoundInASlotThatHasRoomForIt) {
  auto compressor = Make({.codec = Codec::kTopK, .density = 0.1, .exact = true}, 1000);
  std::vector<uint8_t> slot = Encode(*compressor, Gradient(1000, 1));
  const size_t bytes = slot.size();
  slot.resize(bytes + 64, 0xff);  // what a step before left there
  const auto header = comm::FindHeader(slot, 1000);
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(comm::PacketBytes(*header), bytes);
  EXPECT_EQ(comm::ReadHeader(slot, 1000).status().code(), absl::StatusCode::kInvalidArgument);
  for (size_t length = 0; length < bytes; length += 3) {
    EXPECT_EQ(comm::FindHeader(absl::MakeConstSpan(slot.data(), length), 1000).status().code(),
              absl::StatusCode::kInvalidArgument)
        << length;
  }
  std::vector<float> before(1000), after(1000);
  ASSERT_TRUE(
      Decode(absl::MakeConstSpan(slot).subspan(0, bytes), absl::MakeSpan(before), DecodeMode::kSet).ok());
  comm::ScaleTopK(absl::MakeSpan(slot), *header, 0.25f);
  ASSERT_TRUE(
      Decode(absl::MakeConstSpan(slot).subspan(0, bytes), absl::MakeSpan(after), DecodeMode::kSet).ok());
  for (size_t i = 0; i < before.size(); ++i) ASSERT_EQ(after[i], before[i] * 0.25f) << i;
}

TEST(Packet, HostileBytesAreAnError) {  // every byte of the header, every length, indices out of order
  auto compressor = Make({.codec = Codec::kTopK, .density = 0.1, .exact = true}, 1000);
  const std::vector<uint8_t> good = Encode(*compressor, Gradient(1000, 1));
  std::vector<float> out(1000);
  const auto decode = [&](absl::Span<const uint8_t> packet, size_t count) {
    out.resize(count);
    return Decode(packet, absl::MakeSpan(out), DecodeMode::kSet).code();
  };
  ASSERT_EQ(decode(good, 1000), absl::StatusCode::kOk);
  EXPECT_EQ(decode(good, 999), absl::StatusCode::kInvalidArgument);
  for (size_t length = 0; length < good.size(); length += 3) {
    EXPECT_EQ(decode(absl::MakeConstSpan(good.data(), length), 1000), absl::StatusCode::kInvalidArgument)
        << length;
  }
  for (size_t byte = 0; byte < comm::kPacketHeader; ++byte) {
    for (const int flip : {1, 0x80, 0xff}) {
      std::vector<uint8_t> bad = good;
      bad[byte] = static_cast<uint8_t>(bad[byte] ^ flip);
      EXPECT_EQ(decode(bad, 1000), absl::StatusCode::kInvalidArgument) << byte;
    }
  }
  std::vector<uint8_t> without = Encode(*Make({.codec = Codec::kNone}, 1000), Gradient(1000, 1));
  ASSERT_EQ(decode(without, 1000), absl::StatusCode::kOk);
  without[5] = static_cast<uint8_t>(Codec::kPowerSgd);
  EXPECT_EQ(decode(without, 1000), absl::StatusCode::kInvalidArgument) << "it has no packets";
  std::vector<uint8_t> shifted = good;
  shifted.insert(shifted.begin(), 0);
  EXPECT_EQ(decode(absl::MakeConstSpan(shifted).subspan(1), 1000), absl::StatusCode::kInvalidArgument);
  std::vector<uint8_t> repeated = good;
  std::copy_n(repeated.begin() + comm::kPacketHeader, 4, repeated.begin() + comm::kPacketHeader + 4);
  EXPECT_EQ(decode(repeated, 1000), absl::StatusCode::kInvalidArgument);
  std::vector<uint8_t> beyond = good;
  std::fill_n(beyond.begin() + comm::kPacketHeader + 99 * 4, 4, 0xff);
  EXPECT_EQ(decode(beyond, 1000), absl::StatusCode::kInvalidArgument);
}

// The vector kernels against the reference, on arrays of every awkward length.
class KernelsTest : public testing::TestWithParam<size_t> {};
INSTANTIATE_TEST_SUITE_P(Counts, KernelsTest, testing::ValuesIn(kCounts));

template <typename T>
struct alignas(64) Line {
  T values[64 / sizeof(T)] = {};
};
template <typename T>
std::vector<Line<T>> Aligned(const std::vector<float>& from) {
  std::vector<Line<T>> lines(from.size() / std::size(Line<T>().values) + 1);
  for (size_t i = 0; i < from.size(); ++i) comm::Carry(from[i], 3, 0, i, lines[0].values);
  return lines;
}

template <typename T>
void ExpectSelectIsTheReferences(size_t count) {
  const std::vector<float> gradient = Gradient(count + 1, 1);
  const std::vector<Line<T>> residual = Aligned<T>(Gradient(count, 2)),
                             velocity = Aligned<T>(Gradient(count, 3));
  struct Result {
    std::vector<uint32_t> indices;
    std::vector<float> values;
    std::vector<T> pending, velocity;
    bool operator==(const Result&) const = default;
  };
  const auto run = [&](const comm::Kernels& kernels, bool momentum, bool with_residual, bool stream) {
    Result r;
    r.indices.resize(count + 16);
    r.values.resize(count + 16);
    std::vector<Line<T>> pending(residual.size()), pending_velocity(residual.size());
    float poison = 0;
    const comm::Selection selection = {1e-2f, 96, r.indices.data(), r.values.data(), stream, 12345};
    const float* unaligned = gradient.data() + 1;
    const T* old = with_residual ? residual[0].values : nullptr;
    const comm::Momentum<T> speed = {0.5f, velocity[0].values, pending_velocity[0].values};
    const comm::CarryKernels<T>& carrying = kernels.Carrying<T>();
    const size_t taken = momentum
                             ? carrying.select_momentum(unaligned, speed, residual[0].values,
                                                        pending[0].values, count, selection, &poison)
                             : carrying.select(unaligned, old, pending[0].values, count, selection, &poison);
    EXPECT_EQ(poison, 0);
    r.indices.resize(taken);
    r.values.resize(taken);
    r.pending.assign(pending[0].values, pending.back().values);
    r.velocity.assign(pending_velocity[0].values, pending_velocity.back().values);
    return r;
  };
  for (const bool momentum : {false, true}) {
    for (const bool with_residual : {false, true}) {
      const Result reference = run(comm::ScalarKernels(), momentum, with_residual, false);
      EXPECT_TRUE(count < 100 || !reference.indices.empty());
      EXPECT_EQ(run(comm::BestKernels(), momentum, with_residual, false), reference)
          << comm::BestKernels().name;
      EXPECT_EQ(run(comm::BestKernels(), momentum, with_residual, true), reference)
          << comm::BestKernels().name;
    }
  }
}

TEST_P(KernelsTest, SelectIsTheReferencesSelect) {
  ExpectSelectIsTheReferences<float>(GetParam());
  ExpectSelectIsTheReferences<uint16_t>(GetParam());
}

TEST_P(KernelsTest, WhatIsCarriedOverIsTheReferences) {
  const size_t count = GetParam();
  const std::vector<float> a = Gradient(count, 1);
  const std::vector<Line<uint16_t>> b = Aligned<uint16_t>(Gradient(count, 2));
  const auto run = [&](const comm::Kernels& kernels, bool stream) {
    std::vector<float> sum(count), zeros(count);
    std::vector<Line<uint16_t>> rounded(b.size());
    float poison = 0;
    EXPECT_EQ(kernels.halves.add(a.data(), b[0].values, sum.data(), count, 0x1p112f, &poison), 0);
    EXPECT_EQ(poison, 0);
    kernels.halves.subtract(sum.data(), a.data(), rounded[0].values, count, stream, 77, 2048);
    for (size_t i = 0; i < count; ++i) sum.push_back(comm::CarriedAt(rounded[0].values, i));
    return sum;
  };
  const std::vector<float> reference = run(comm::ScalarKernels(), false);
  EXPECT_EQ(run(comm::BestKernels(), false), reference) << comm::BestKernels().name;
  EXPECT_EQ(run(comm::BestKernels(), true), reference) << comm::BestKernels().name;
}

TEST_P(KernelsTest, ClippingIsTheReferences) {
  const size_t count = GetParam();
  std::vector<float> a = Gradient(count, 1, 1);
  for (size_t i = 0; i < count; i += 37) a[i] = i % 2 == 0 ? 0x1p127f : -0x1p127f;
  const std::vector<Line<float>> b = Aligned<float>(a);  // so that sums overflow
  std::vector<float> sums[2];
  size_t clipped[2];
  for (int best = 0; best < 2; ++best) {
    const comm::Kernels& kernels = best == 1 ? comm::BestKernels() : comm::ScalarKernels();
    sums[best].resize(count);
    float poison = 0;
    clipped[best] = kernels.floats.add(a.data(), b[0].values, sums[best].data(), count, 2, &poison);
    EXPECT_EQ(poison, 0) << "they are finite, whatever becomes of their sum";
    a[count / 2] = std::numeric_limits<float>::infinity();
    (void)kernels.floats.add(a.data(), b[0].values, sums[best].data(), count, 2, &poison);
    EXPECT_TRUE(std::isnan(poison));
    a[count / 2] = b[0].values[count / 2];
    (void)kernels.floats.add(a.data(), b[0].values, sums[best].data(), count, 2, &poison);
  }
  EXPECT_EQ(sums[0], sums[1]);
  EXPECT_EQ(clipped[0], clipped[1]);
  size_t above = 0;
  for (size_t i = 0; i < count; ++i) above += std::fabs(a[i]) > 1 ? 1 : 0;
  EXPECT_EQ(clipped[0], above);
}

TEST_P(KernelsTest, WithinSeesEveryElement) {
  const size_t count = GetParam();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const comm::Kernels* kernels : {&comm::ScalarKernels(), &comm::BestKernels()}) {
    std::vector<float> in(count, -2);
    EXPECT_TRUE(kernels->within(in.data(), count, 2)) << kernels->name << ": the limit itself is within";
    for (size_t i = 0; i < count; i = i < 160 ? i + 1 : 2 * i) {
      for (const float bad :
           {std::nextafter(2.0f, 3.0f), -std::nextafter(2.0f, 3.0f), kInfinity, -kInfinity, nan, -nan}) {
        in[i] = bad;
        EXPECT_FALSE(kernels->within(in.data(), count, 2)) << kernels->name << " " << bad << " at " << i;
        EXPECT_EQ(kernels->within(in.data(), count, kInfinity), std::isfinite(bad))
            << kernels->name << " " << bad;
      }
      in[i] = i % 2 == 0 ? 0 : std::numeric_limits<float>::denorm_min();
    }
    EXPECT_TRUE(kernels->within(in.data(), count, 2)) << kernels->name;
  }
}

TEST_P(KernelsTest, BlockCodecsAreTheReferences) {
  const size_t count = GetParam();
  std::vector<float> in = Gradient(count, 5);
  if (count > 600) std::fill_n(in.begin() + 256, 256, 0.0f);  // a block of zeros
  const comm::Kernels &best = comm::BestKernels(), &scalar = comm::ScalarKernels();
  using Encoder = decltype(comm::Kernels::encode_int8);
  using Decoder = decltype(comm::Kernels::decode_int8);
  const std::tuple<const char*, Encoder, Encoder, Decoder, Decoder> codecs[] = {
      {"fp16", best.encode_float16, scalar.encode_float16, best.decode_float16, scalar.decode_float16},
      {"bf16", best.encode_bfloat16, scalar.encode_bfloat16, best.decode_bfloat16, scalar.decode_bfloat16},
      {"int8", best.encode_int8, scalar.encode_int8, best.decode_int8, scalar.decode_int8},
      {"fp8", best.encode_float8, scalar.encode_float8, best.decode_float8, scalar.decode_float8},
      {"onebit", best.encode_one_bit, scalar.encode_one_bit, best.decode_one_bit, scalar.decode_one_bit}};
  for (const auto& [name, encode, reference, decode, decode_reference] : codecs) {
    std::vector<uint8_t> payload(2 * count, 0xee), expected(2 * count, 0xee);
    std::vector<float> scales(count / comm::kScaleBlock + 1), expected_scales(scales.size());
    encode(in.data(), count, payload.data(), scales.data());
    reference(in.data(), count, expected.data(), expected_scales.data());
    EXPECT_EQ(payload, expected) << name;
    for (size_t i = 0; i < scales.size(); ++i) {
      EXPECT_NEAR(scales[i], expected_scales[i], 1e-5 * expected_scales[i]) << name;
    }
    for (const bool add : {false, true}) {
      std::vector<float> out = in, expected_out = in;
      decode(payload.data(), expected_scales.data(), count, out.data(), add);
      decode_reference(payload.data(), expected_scales.data(), count, expected_out.data(), add);
      EXPECT_EQ(out, expected_out) << name;
    }
  }
}

TEST(Kernels, WhatIsRoundedStaysFinite) {
  const std::vector<float> largest(64, std::numeric_limits<float>::max()), zeros(64);
  for (const comm::Kernels* kernels : {&comm::ScalarKernels(), &comm::BestKernels()}) {
    std::vector<Line<uint16_t>> rounded(2);
    kernels->halves.subtract(largest.data(), zeros.data(), rounded[0].values, 64, false, 5, 0);
    for (size_t i = 0; i < 64; ++i) EXPECT_EQ(comm::CarriedAt(rounded[0].values, i), comm::kLargestHalf);
  }
}

#if defined(__SSE2__)
// A thread may flush subnormal floats (torch.set_flush_denormal): ranks that do and ranks that do not decode
// to the same bits, or their replicas drift apart.
TEST(Kernels, AThreadThatFlushesSubnormalsDecodesTheSame) {
  std::vector<uint8_t> codes(512);
  std::iota(codes.begin(), codes.end(), uint8_t{0});
  const std::vector<float> scales(codes.size() / comm::kScaleBlock + 1, 1.0f);
  const unsigned before = _mm_getcsr();
  for (const comm::Kernels* kernels : {&comm::ScalarKernels(), &comm::BestKernels()}) {
    for (const auto decode : {kernels->decode_float8, kernels->decode_int8, kernels->decode_one_bit}) {
      std::vector<float> usual(codes.size()), flushing(codes.size());
      decode(codes.data(), scales.data(), codes.size(), usual.data(), false);
      _mm_setcsr(before | 0x8040);  // flush to zero, denormals are zero
      decode(codes.data(), scales.data(), codes.size(), flushing.data(), false);
      _mm_setcsr(before);
      EXPECT_EQ(usual, flushing) << kernels->name;
    }
  }
}
#endif

TEST(Kernels, Float8IsTheTableOfTheFormat) {
  // OCP 8-bit floating point specification: 1.0 is 0x38, 448 is 0x7e, the smallest subnormal 2^-9 is 0x01.
  const std::vector<float> in = {448, 1.0f, -1.0f, 0x1p-6f, 0x1p-9f, 0, -448, 17, 18, 19};
  std::vector<uint8_t> payload(in.size());
  float scale = 0;
  comm::BestKernels().encode_float8(in.data(), in.size(), payload.data(), &scale);
  EXPECT_EQ(scale, 1);
  EXPECT_THAT(payload, testing::ElementsAre(0x7e, 0x38, 0xb8, 0x08, 0x01, 0x00, 0xfe, 0x58, 0x59, 0x5a));
}

}  // namespace
}  // namespace gtrain
