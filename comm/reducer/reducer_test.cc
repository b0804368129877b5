// Buckets, hooks in any order, and what happens to a step that not all ranks end.
#include "comm/reducer/reducer.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/rng.h"
#include "comm/exec/check_collectives.h"
#include "comm/exec/rank_test_threads.h"
#include "comm/reducer/create_reducer.h"
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

// A large one in the middle, so that there are three buckets of 4 KiB and more.
std::vector<GradientSpec> Model() {
  return {{"conv.weight", 400},
          {"conv.bias", 16},
          {"hidden.weight", 5000},
          {"out.weight", 640},
          {"out.bias", 10}};
}

ReducerOptions SmallBuckets() {
  ReducerOptions options;
  options.bucket_bytes = 4096;
  options.compress_from = 1000;
  return options;
}

void Fill(Reducer& reducer, size_t gradients, float value) {
  for (size_t i = 0; i < gradients; ++i) {
    for (float& x : reducer.gradient(i)) x = value * static_cast<float>(i + 1);
  }
}

TEST(Reducer, MeansWhateverTheOrderOfHooks) {
  for (const auto& nodes :
       std::vector<std::vector<std::string>>{{"a"}, {"a", "a", "a"}, {"a", "b", "a", "b"}}) {
    FakeWorld world(nodes);
    ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
      auto reducer = Reducer::Create(&c, Model(), SmallBuckets());
      RETURN_IF_BAD(reducer.status());
      Rng random(static_cast<uint64_t>(c.rank()));
      std::vector<size_t> order(Model().size());
      std::iota(order.begin(), order.end(), 0);
      for (int step = 0; step < 20; ++step) {
        Fill(**reducer, order.size(), static_cast<float>(step + c.rank()));
        std::shuffle(order.begin(), order.end(), random);
        for (size_t i : order) {
          RETURN_IF_BAD((*reducer)->Ready(i));
          if (i == 2) RETURN_IF_BAD(c.Barrier());  // the user's communicator stays the user's
        }
        auto done = (*reducer)->Finish();
        RETURN_IF_BAD(done.status());
        EXPECT_THAT(done->unused, testing::IsEmpty());
        EXPECT_EQ(done->bytes_sent, (400 + 16 + 5000 + 640 + 10) * sizeof(float));
        const float mean = static_cast<float>(step) + static_cast<float>(c.size() - 1) / 2;
        for (size_t i : order) {
          EXPECT_THAT((*reducer)->gradient(i),
                      testing::Each(testing::FloatEq(mean * static_cast<float>(i + 1))));
        }
      }
      return absl::OkStatus();
    }));
  }
}

TEST(Reducer, BucketsLeaveBeforeFinish) {
  FakeWorld world({"a", "a"});
  ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
    auto reducer = Reducer::Create(&c, Model(), SmallBuckets());
    RETURN_IF_BAD(reducer.status());
    const Instant start = RealClock().Now();
    int64_t all_early = 0;
    while (all_early == 0) {  // a bucket needs a moment: in some step both ranks give all of them enough
      if (RealClock().Now() - start > comm::kPatience)
        return absl::DeadlineExceededError("nothing left early");
      for (size_t i = Model().size(); i-- > 0;) {
        RETURN_IF_BAD((*reducer)->Ready(i));
        RETURN_IF_BAD(c.Barrier());
      }
      auto done = (*reducer)->Finish();
      RETURN_IF_BAD(done.status());
      all_early = done->early == 3;
      RETURN_IF_BAD(c.AllReduce(&all_early, 1, DType::kInt64, ReduceOp::kMax));
    }
    return absl::OkStatus();
  }));
}

TEST(Reducer, UnusedGradientsTakePartAndAreNamed) {
  FakeWorld world({"a", "b"});
  ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
    auto reducer = Reducer::Create(&c, Model(), SmallBuckets());
    RETURN_IF_BAD(reducer.status());
    for (float& x : (*reducer)->gradient(0)) x = 4;
    if (c.rank() == 0) {
      for (float& x : (*reducer)->gradient(2)) x = 6;
      RETURN_IF_BAD((*reducer)->Ready(2));
    }
    for (size_t i : {0, 1, 4}) RETURN_IF_BAD((*reducer)->Ready(i));
    auto done = (*reducer)->Finish();
    RETURN_IF_BAD(done.status());
    EXPECT_EQ(done->unused, c.rank() == 0 ? std::vector<size_t>{3} : (std::vector<size_t>{2, 3}));
    EXPECT_THAT((*reducer)->gradient(0), testing::Each(4));
    EXPECT_THAT((*reducer)->gradient(2), testing::Each(3));
    EXPECT_THAT((*reducer)->gradient(3), testing::Each(0));
    return absl::OkStatus();
  }));
}

TEST(Reducer, MistakesAreNamed) {
  FakeWorld world({"a"});
  ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
    EXPECT_EQ(Reducer::Create(&c, {}).status().code(), absl::StatusCode::kInvalidArgument);
    const absl::Status empty = Reducer::Create(&c, {{"w", 3}, {"b", 0}}).status();
    EXPECT_THAT(empty.message(), testing::HasSubstr("gradient 1 (b) has no elements"));
    ReducerOptions bad;
    bad.compress_from = 0;
    bad.compression.codec = Codec::kTopK;
    bad.compression.density = 0;
    EXPECT_EQ(Reducer::Create(&c, Model(), bad).status().code(), absl::StatusCode::kInvalidArgument);
    auto reducer = Reducer::Create(&c, Model());
    RETURN_IF_BAD(reducer.status());
    EXPECT_EQ((*reducer)->Ready(5).code(), absl::StatusCode::kInvalidArgument);
    RETURN_IF_BAD((*reducer)->Ready(1));
    const absl::Status twice = (*reducer)->Ready(1);
    EXPECT_EQ(twice.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(twice.message(), testing::HasSubstr("conv.bias"));
    EXPECT_THAT((*reducer)->Load({"bucket7/residual", 0, {}}).message(), testing::HasSubstr("no bucket"));
    return (*reducer)->Finish().status();
  }));
}

TEST(Reducer, LostPeerEndsTheStep) {  // L1: a bucket under way returns, and so does everything later
  FakeWorld world({"a", "a", "a"});
  const auto results = RunThreads(world, [&](Communicator& c) -> absl::Status {
    auto reducer = Reducer::Create(&c, Model(), SmallBuckets());
    RETURN_IF_BAD(reducer.status());
    RETURN_IF_BAD((*reducer)->Finish().status());
    if (c.rank() == 2) {  // leaves the step to the others
      RETURN_IF_BAD((*reducer)->Ready(4));
      world.Revoke("rank 2 was killed");
      return absl::UnavailableError("it");
    }
    const absl::Status lost = (*reducer)->Finish().status();
    EXPECT_EQ((*reducer)->Finish().status(), lost);
    return lost;
  });
  for (const absl::Status& status : results)
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
}

TEST(Reducer, CompressesLargeBucketsAndCarriesTheRest) {
  FakeWorld world({"a", "b", "c"});
  ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
    ReducerOptions options = SmallBuckets();
    options.compression.codec = Codec::kOneBit;
    auto reducer = Reducer::Create(&c, Model(), options);
    RETURN_IF_BAD(reducer.status());
    auto step = [&](Reducer& r) -> absl::StatusOr<uint64_t> {
      Fill(r, Model().size(), static_cast<float>(1 + c.rank()));
      r.gradient(2)[17] = -100;
      auto done = r.Finish();
      if (!done.ok()) return done.status();
      return done->bytes_sent;
    };
    auto bytes = step(**reducer);
    RETURN_IF_BAD(bytes.status());
    EXPECT_LT(*bytes, 3000 * sizeof(float)) << "5000 of 6066 elements are in a large bucket";
    EXPECT_THAT((*reducer)->gradient(0), testing::Each(testing::FloatEq(2))) << "small buckets are dense";
    const auto states = (*reducer)->Export();
    std::vector<std::string> names;
    for (const CarriedState& state : states) names.push_back(state.name);
    EXPECT_THAT(names, testing::ElementsAre("bucket1/residual", "bucket1/residual/shard"));
    auto next = Reducer::Create(&c, Model(), options);
    RETURN_IF_BAD(next.status());
    for (const CarriedState& state : states) RETURN_IF_BAD((*next)->Load(state));
    RETURN_IF_BAD(step(**reducer).status());
    RETURN_IF_BAD(step(**next).status());
    EXPECT_THAT((*next)->gradient(2), testing::ElementsAreArray((*reducer)->gradient(2)));
    (*reducer)->Drop();
    (*next)->Drop();
    RETURN_IF_BAD(step(**reducer).status());
    EXPECT_THAT((*next)->gradient(2), testing::ElementsAreArray((*reducer)->gradient(2))) << "dropped";
    return absl::OkStatus();
  }));
}

// Two matrices in a bucket, of which one is a convolution, and vectors between them.
std::vector<GradientSpec> Matrices() {
  return {{"conv.weight", 1600, {16, 4, 5, 5}},
          {"conv.bias", 16},
          {"out.weight", 1200, {20, 60}},
          {"out.bias", 20}};
}

// The job file's words, for as long as this lives. Ranks are threads here.
class JobSays {
 public:
  explicit JobSays(const char* text) { setenv("GTRAIN_COMPRESSION", text, 1); }
  ~JobSays() { unsetenv("GTRAIN_COMPRESSION"); }
};

TEST(Reducer, JobFileWins) {
  const JobSays says("int8");
  FakeWorld world({"a", "b"});
  ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
    ReducerOptions options = SmallBuckets();
    options.compression.codec = Codec::kTopK;
    auto reducer = Reducer::Create(&c, Model(), options);
    RETURN_IF_BAD(reducer.status());
    std::vector<Codec> codecs;
    for (const BucketChoice& choice : (*reducer)->Choices()) codecs.push_back(choice.codec);
    EXPECT_THAT(codecs, testing::ElementsAre(Codec::kNone, Codec::kInt8, Codec::kNone))
        << "small ones are dense";
    return absl::OkStatus();
  }));
  const JobSays nonsense("zip");
  FakeWorld another({"a", "b"});
  ExpectAllOk(RunThreads(another, [&](Communicator& c) -> absl::Status {
    const absl::Status refused = Reducer::Create(&c, Model()).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(refused.message(), testing::HasSubstr("$GTRAIN_COMPRESSION: \"zip\" is not a codec"));
    return absl::OkStatus();
  }));
}

TEST(Reducer, PowerSgdKnowsTheShapes) {
  const JobSays says("powersgd rank=2 warmup=0");
  FakeWorld world({"a", "b", "c"});
  ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
    ReducerOptions options;
    options.compress_from = 1000;
    auto reducer = Reducer::Create(&c, Matrices(), options);
    RETURN_IF_BAD(reducer.status());
    // An outer product, which is of rank 1, arrives as it is; a vector does anyway.
    const auto fill = [&](float scale) {
      for (const size_t index : {0, 2}) {
        const auto g = (*reducer)->gradient(index);
        const size_t columns = index == 0 ? 100 : 60;
        for (size_t at = 0; at < g.size(); ++at) {
          g[at] = scale * static_cast<float>(at / columns + 1) * std::sin(static_cast<float>(at % columns));
        }
      }
      for (float& x : (*reducer)->gradient(1)) x = scale;
      for (float& x : (*reducer)->gradient(3)) x = -scale;
    };
    fill(static_cast<float>(c.rank()));
    auto done = (*reducer)->Finish();
    RETURN_IF_BAD(done.status());
    EXPECT_EQ(done->bytes_sent, sizeof(float) * (2 * (16 + 100 + 20 + 60) + 16 + 20));
    std::vector<std::vector<float>> got;
    for (size_t i = 0; i < 4; ++i)
      got.emplace_back((*reducer)->gradient(i).begin(), (*reducer)->gradient(i).end());
    fill(1);  // the mean of 0, 1 and 2
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_THAT(got[i], testing::Pointwise(testing::FloatNear(1e-4f), (*reducer)->gradient(i))) << i;
    }
    return absl::OkStatus();
  }));
}

// A step of a program: a gradient of its own on every rank and in every step.
absl::StatusOr<ReducedStep> AStep(Reducer& reducer, int rank, int step) {
  for (size_t index = 0; index < Matrices().size(); ++index) {
    const auto g = reducer.gradient(index);
    for (size_t i = 0; i < g.size(); ++i) {
      g[i] = std::sin(static_cast<float>(i) * 0.7f + static_cast<float>(rank)) +
             std::cos(static_cast<float>(i + static_cast<size_t>(step)));
    }
  }
  return reducer.Finish();
}

// A run that begins again from the block ends with the bits of the one that went on: whenever it was saved,
// in a warm-up or behind it.
TEST(Reducer, CarriedBlockGoesOnInAnotherReducer) {
  constexpr int kWarmup = 6, kSteps = 16;
  constexpr ResidualType kRounded = ResidualType::kBFloat16;
  const std::vector<CompressionOptions> kinds = {
      {.codec = Codec::kTopK, .density = 0.02, .warmup_steps = kWarmup},
      {.codec = Codec::kTopK, .density = 0.2, .warmup_steps = kWarmup},                     // in two stages
      {.codec = Codec::kTopK, .density = 0.02, .momentum = 0.9f, .warmup_steps = kWarmup},  // DGC
      {.codec = Codec::kTopK, .error_feedback = false, .density = 0.02},
      {.codec = Codec::kTopK, .residual = kRounded, .density = 0.02, .momentum = 0.9f, .warmup_steps = 2},
      {.codec = Codec::kTopK, .residual = kRounded, .density = 0.2},
      {.codec = Codec::kInt8, .residual = kRounded},
      {.codec = Codec::kOneBit, .optimizer_momentum = 0.9f, .warmup_steps = kWarmup},
      {.codec = Codec::kPowerSgd, .matrix_rank = 2, .warmup_steps = kWarmup},
      {.codec = Codec::kInt8}};
  for (const auto& nodes : std::vector<std::vector<std::string>>{{"a", "b", "c"}, {"a", "a", "b", "b"}}) {
    for (const CompressionOptions& kind : kinds) {
      SCOPED_TRACE(testing::Message() << testing::PrintToString(nodes) << CodecName(kind.codec)
                                      << kind.density << " " << kind.momentum);
      FakeWorld world(nodes);
      std::vector<std::string> names(nodes.size());
      // The order of a sum is that of the algorithm, which each reducer's communicator else chooses by its
      // own measurement.
      ExpectAllOk(RunThreads(
          world,
          [&](Communicator& c) -> absl::Status {
            ReducerOptions options;
            options.compress_from = 1000;
            options.compression = kind;
            auto first = Reducer::Create(&c, Matrices(), options);
            RETURN_IF_BAD(first.status());
            names[static_cast<size_t>(c.rank())] = (*first)->CarriedName();
            std::vector<std::unique_ptr<Reducer>> others;  // each begins again somewhere else
            std::vector<float> block((*first)->CarriedCount());
            for (int step = 0; step < kSteps; ++step) {
              if (step % 5 == 0) {
                RETURN_IF_BAD((*first)->ExportCarried(absl::MakeSpan(block)));
                auto other = Reducer::Create(&c, Matrices(), options);
                RETURN_IF_BAD(other.status());
                EXPECT_EQ((*first)->CarriedName(), (*other)->CarriedName());
                RETURN_IF_BAD((*other)->LoadCarried(block));
                others.push_back(*std::move(other));
              }
              RETURN_IF_BAD(AStep(**first, c.rank(), step).status());
              for (const auto& other : others) {
                RETURN_IF_BAD(AStep(*other, c.rank(), step).status());
                for (size_t i = 0; i < 4; ++i) {
                  EXPECT_THAT(other->gradient(i), testing::ElementsAreArray((*first)->gradient(i)))
                      << "step " << step << ", gradient " << i;
                }
              }
            }
            block.push_back(0);
            EXPECT_EQ((*first)->LoadCarried(block).code(), absl::StatusCode::kInvalidArgument);
            return absl::OkStatus();
          },
          comm::kPatience, [](int) { return std::string("ring"); }));
      for (const std::string& name : names) EXPECT_EQ(name, names[0]);
    }
  }
}

// Counts the elements of the compressed buckets, in the steps in which they are compressed, in both stages.
TEST(Reducer, SaysHowManyElementsTopKSent) {
  for (const double density : {0.02, 0.2}) {
    FakeWorld world({"a", "b"});
    ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
      ReducerOptions options;
      options.compress_from = 1000;
      options.bucket_bytes = 5000;  // one of 1220 elements, one of 1616
      options.compression = {.codec = Codec::kTopK, .density = density, .warmup_steps = 2};
      auto reducer = Reducer::Create(&c, Matrices(), options);
      RETURN_IF_BAD(reducer.status());
      const double all = density * (1220 + 1616);
      for (int step = 0; step < 8; ++step) {
        auto done = AStep(**reducer, c.rank(), step);
        RETURN_IF_BAD(done.status());
        const Selected selected = done->selected;
        EXPECT_NEAR(static_cast<double>(selected.wanted), step < 2 ? 0 : all, 4);
        EXPECT_GE(static_cast<double>(selected.sent), 0.9 * static_cast<double>(selected.wanted));
        EXPECT_LE(static_cast<double>(selected.sent), 1.1 * static_cast<double>(selected.wanted));
      }
      return absl::OkStatus();
    }));
  }
}

TEST(Reducer, SaysWhatItsCodecCouldNotSay) {
  FakeWorld world({"a", "b"});
  ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
    ReducerOptions options;
    options.compress_from = 1000;
    options.compression = {.codec = Codec::kFloat16};
    auto reducer = Reducer::Create(&c, {{"w", 2000}}, options);
    RETURN_IF_BAD(reducer.status());
    for (int step = 0; step < 3; ++step) {
      const absl::Span<float> g = (*reducer)->gradient(0);
      std::fill(g.begin(), g.end(), 1.0f);
      if (step == 1 && c.rank() == 0) std::fill_n(g.begin() + 10, 7, 1e9f);
      auto done = (*reducer)->Finish();
      RETURN_IF_BAD(done.status());
      EXPECT_EQ(done->clipped, step == 1 && c.rank() == 0 ? 7 : 0) << step;
    }
    return absl::OkStatus();
  }));
}

// The name of a block describes the reducer that it belongs to, so that no other reducer takes it.
TEST(Reducer, CarriedNameSaysWhatItIsOf) {
  std::set<std::string> names;
  const auto made = [&](const std::vector<std::string>& nodes, const char* job, size_t bucket_bytes) {
    const JobSays says(job);
    FakeWorld world(nodes);
    std::string name;
    ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
      ReducerOptions options;
      options.compress_from = 1000;
      options.bucket_bytes = bucket_bytes;
      auto reducer = Reducer::Create(&c, Matrices(), options);
      RETURN_IF_BAD(reducer.status());
      if (c.rank() == 0) name = (*reducer)->CarriedName();
      return absl::OkStatus();
    }));
    return name;
  };
  EXPECT_EQ(made({"a", "b"}, "none", 1 << 20), "");
  const std::string name = made({"a", "b"}, "powersgd rank=2", 1 << 20);
  EXPECT_THAT(name, testing::StartsWith("reducer/powersgd-of-2-ranks-"));
  EXPECT_EQ(made({"a", "b"}, "powersgd rank=2", 1 << 20), name);
  const std::set<std::string> all = {name,
                                     made({"a", "b"}, "powersgd rank=3", 1 << 20),
                                     made({"a", "b"}, "int8", 1 << 20),
                                     made({"a", "b"}, "auto: int8", 1 << 20),
                                     made({"a", "b"}, "powersgd rank=2", 4096),
                                     made({"a", "b", "c"}, "powersgd rank=2", 1 << 20),
                                     made({"a", "a", "b"}, "powersgd rank=2", 1 << 20),
                                     made({"a", "b", "b"}, "powersgd rank=2", 1 << 20)};
  EXPECT_EQ(all.size(), 8u) << testing::PrintToString(all);
}

TEST(Reducer, PowerSgdWithoutShapesIsRefused) {
  const JobSays says("powersgd");
  FakeWorld world({"a", "b"});
  ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
    const absl::Status none = Reducer::Create(&c, Model()).status();
    EXPECT_EQ(none.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(none.message(), testing::HasSubstr("give GradientSpec::shape"));
    const absl::Status wrong = Reducer::Create(&c, {{"w", 100, {10, 11}}}).status();
    EXPECT_EQ(wrong.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(wrong.message(),
                testing::HasSubstr("gradient w of 100 elements cannot have the shape 10 x 11"));
    return absl::OkStatus();
  }));
}

// Least squares over three ranks, whose data differ: far from the answer a small rank is enough, near it
// error feedback sends what was left out.
TEST(Reducer, PowerSgdTrains) {
  constexpr size_t kIn = 40, kOut = 30, kSamples = 60;
  FakeWorld world({"a", "b", "c"});
  const auto train = [&](Communicator& c, const CompressionOptions& compression,
                         double* loss) -> absl::Status {
    ReducerOptions options;
    options.compress_from = 100;
    options.compression = compression;
    auto reducer = Reducer::Create(&c, {{"w", kOut * kIn, {kOut, kIn}}}, options);
    RETURN_IF_BAD(reducer.status());
    Rng answers(7), data(static_cast<uint64_t>(c.rank()));
    std::vector<float> answer(kOut * kIn), w(answer.size()), x(kSamples * kIn);
    for (float& v : answer) v = static_cast<float>(answers.Unit() - 0.5);
    for (float& v : x) v = static_cast<float>(data.Unit() * 2 - 1);
    for (int step = 0; step < 150; ++step) {
      const auto g = (*reducer)->gradient(0);
      std::fill(g.begin(), g.end(), 0.0f);
      *loss = 0;
      for (size_t s = 0; s < kSamples; ++s) {
        for (size_t o = 0; o < kOut; ++o) {
          float error = 0;
          for (size_t i = 0; i < kIn; ++i) error += (w[o * kIn + i] - answer[o * kIn + i]) * x[s * kIn + i];
          *loss += double{error} * error / (kSamples * kOut);
          for (size_t i = 0; i < kIn; ++i) g[o * kIn + i] += error * x[s * kIn + i] / kSamples;
        }
      }
      RETURN_IF_BAD((*reducer)->Finish().status());
      for (size_t i = 0; i < w.size(); ++i) w[i] -= 0.25f * g[i];
    }
    return c.AllReduce(loss, 1, DType::kFloat64, ReduceOp::kSum);
  };
  ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
    CompressionOptions options;
    double dense = 0, carried = 0, lost = 0;
    RETURN_IF_BAD(train(c, options, &dense));
    options.codec = Codec::kPowerSgd;
    options.matrix_rank = 2;
    RETURN_IF_BAD(train(c, options, &carried));
    options.error_feedback = false;
    RETURN_IF_BAD(train(c, options, &lost));
    EXPECT_LT(dense, 1e-3);
    EXPECT_LT(carried, 1e-3);
    EXPECT_GT(lost, 1e-1);
    return absl::OkStatus();
  }));
}

// Whatever the number of buckets and however often their codecs change: one of the reducer's own, one of each
// machine and one of a rank of each.
TEST(Reducer, CommunicatorsAreMadeOnceForAllBuckets) {
  constexpr size_t kElements = 600;
  for (const bool automatic : {false, true}) {
    const size_t buckets = automatic ? 10 : 100;
    const JobSays says(automatic ? "auto: int8" : "int8");
    FakeWorld world({"a", "a", "b", "b"});
    ExpectAllOk(RunThreads(world, [&](Communicator& inner) -> absl::Status {
      comm::Hooks hooks;
      comm::WrappedCommunicator c(&inner, &hooks);
      ReducerOptions options;
      options.bucket_bytes = kElements * sizeof(float);
      options.compress_from = 1;
      size_t way = 0;
      auto reducer =
          comm::CreateReducer(&c, std::vector<GradientSpec>(buckets, {"w", kElements}), options,
                              [&](auto, double, double) { return std::vector<size_t>(buckets, ++way % 2); });
      RETURN_IF_BAD(reducer.status());
      EXPECT_EQ((*reducer)->Choices().size(), buckets);
      for (int step = 0; step < 16; ++step) {
        Fill(**reducer, buckets, static_cast<float>(c.rank()));
        RETURN_IF_BAD((*reducer)->Finish().status());
        EXPECT_THAT((*reducer)->gradient(1), testing::Each(testing::FloatNear(3, 0.1f)));
      }
      EXPECT_GE(way, automatic ? 3 : 0) << "switched there and back";
      EXPECT_EQ(hooks.splits, 3);
      return absl::OkStatus();
    }));
  }
}

// The sum of all results is the sum of all gradients, whatever the choices were on the way, but for the
// residual that the codec in use still carries.
TEST(Reducer, AutomaticChoiceLosesNothingAndIsTheSameEverywhere) {
  const JobSays says("auto: topk density=0.05 warmup=0, onebit warmup=0, int8, powersgd warmup=0");
  constexpr int kSteps = 120;
  constexpr size_t kElements = 20'000;
  FakeWorld world({"a", "b", "c"});
  std::vector<std::vector<float>> last(3);
  ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
    ReducerOptions options;
    options.compress_from = 1000;
    // Every way in turn. Ranks that disagree must not matter: rank 0 decides.
    size_t turn = static_cast<size_t>(c.rank());
    auto reducer = comm::CreateReducer(&c, {{"weight", kElements, {100, 200}}}, options,
                                       [&](auto, double, double) { return std::vector<size_t>{++turn % 5}; });
    RETURN_IF_BAD(reducer.status());
    std::vector<double> missing(kElements);
    std::set<Codec> used;
    for (int step = 0; step < kSteps; ++step) {
      const bool dropped = step % 10 == 3;
      const auto g = (*reducer)->gradient(0);
      for (size_t i = 0; i < kElements; ++i) {
        g[i] = static_cast<float>((i * 7 + static_cast<size_t>(step + c.rank())) % 31) - 15;
        if (dropped) continue;
        for (int rank = 0; rank < c.size(); ++rank) {
          missing[i] +=
              (static_cast<double>((i * 7 + static_cast<size_t>(step + rank)) % 31) - 15) / c.size();
        }
      }
      RETURN_IF_BAD((*reducer)->Finish().status());
      if (dropped) (*reducer)->Drop();
      for (size_t i = 0; i < kElements && !dropped; ++i) missing[i] -= g[i];
      used.insert((*reducer)->Choices()[0].codec);
    }
    EXPECT_THAT(used, testing::ElementsAre(Codec::kNone, Codec::kInt8, Codec::kTopK, Codec::kOneBit,
                                           Codec::kPowerSgd));
    EXPECT_EQ((*reducer)->Choices()[0].seconds.size(), 5u);
    last[static_cast<size_t>(c.rank())].assign((*reducer)->gradient(0).begin(),
                                               (*reducer)->gradient(0).end());
    // All that is still on its way, of all ranks, is exported.
    std::vector<double> carried(kElements);
    for (const CarriedState& state : (*reducer)->Export()) {
      const double factor = state.name.ends_with("/shard") ? c.size() : 1;
      if (!state.name.ends_with("/residual") && !state.name.ends_with("/residual/shard")) continue;
      for (size_t i = 0; i < state.values.size(); ++i) {
        carried[state.offset + i] += factor * state.values[i] / c.size();
      }
    }
    RETURN_IF_BAD(c.AllReduce(carried.data(), carried.size(), DType::kFloat64, ReduceOp::kSum));
    double worst = 0;
    for (size_t i = 0; i < kElements; ++i) worst = std::max(worst, std::fabs(missing[i] - carried[i]));
    EXPECT_LT(worst, 0.05);
    return absl::OkStatus();
  }));
  for (const auto& g : last) EXPECT_EQ(g, last[0]);
  EXPECT_THAT(world.Compression(), testing::HasSubstr(" of 1 bucket: ")) << "the last choice was powersgd";
}

// A rank whose part fails, in the reducer's thread or between two steps, ends the step on all.
TEST(Reducer, AnErrorOfOneRankEndsTheStepOnAll) {
  for (const auto& nodes : kFours) {
    for (int victim = 0; victim < 4; ++victim) {
      SCOPED_TRACE(testing::Message() << testing::PrintToString(nodes) << victim);
      const JobSays says("int8");
      FakeWorld world(nodes);
      const auto results = RunThreads(
          world,
          [&](Communicator& inner) -> absl::Status {
            comm::Hooks hooks;
            comm::WrappedCommunicator c(&inner, &hooks);
            auto reducer = Reducer::Create(&c, Model(), SmallBuckets());
            RETURN_IF_BAD(reducer.status());
            RETURN_IF_BAD((*reducer)->Finish().status());
            if (c.rank() == victim) {  // of small buckets, which all ranks reduce
              hooks.before_all_reduce = [](size_t, DType) {
                return absl::ResourceExhaustedError("no memory");
              };
            }
            const absl::Status failed = (*reducer)->Finish().status();
            EXPECT_EQ((*reducer)->Finish().status(), failed) << "it is dead";
            return failed;
          },
          kNever);
      ExpectAllHear(results, victim, absl::StatusCode::kResourceExhausted, "no memory");
    }
  }
}

// The error is the program's own, and no collective knows of it.
TEST(Reducer, AnAbortEndsTheStepOnAll) {
  for (const auto& nodes : kFours) {
    for (const bool begun : {false, true}) {
      SCOPED_TRACE(testing::Message() << testing::PrintToString(nodes) << begun);
      constexpr int kVictim = 2;
      FakeWorld world(nodes);
      const auto results = RunThreads(
          world,
          [&](Communicator& c) -> absl::Status {
            auto reducer = Reducer::Create(&c, Model(), SmallBuckets());
            RETURN_IF_BAD(reducer.status());
            RETURN_IF_BAD((*reducer)->Finish().status());
            if (c.rank() == kVictim) {
              // The bucket that leaves first may be under way by then.
              if (begun) RETURN_IF_BAD((*reducer)->Ready(Model().size() - 1));
              (*reducer)->Abort(absl::DataLossError("a sample cannot be read"));
              (*reducer)->Abort(absl::InternalError("and then some"));
              EXPECT_EQ((*reducer)->Ready(0).code(), absl::StatusCode::kOk);
            }
            const absl::Status failed = (*reducer)->Finish().status();
            EXPECT_EQ((*reducer)->Finish().status(), failed) << "it is dead";
            return failed;
          },
          kNever);
      ExpectAllHear(results, kVictim, absl::StatusCode::kDataLoss, "a sample cannot be read");
    }
  }
}

TEST(Reducer, ALookThatFailsEndsItOnAllAndLeavesItDead) {
  const JobSays says("auto: int8");
  for (const auto& nodes : kFours) {
    FakeWorld world(nodes);
    const auto results = RunThreads(
        world,
        [&](Communicator& inner) -> absl::Status {
          comm::Hooks hooks;
          comm::WrappedCommunicator c(&inner, &hooks);
          auto reducer = Reducer::Create(&c, Model(), SmallBuckets());
          RETURN_IF_BAD(reducer.status());
          if (c.rank() == 3) {  // buckets are reduced in a thread of the reducer
            hooks.before_all_reduce = [caller = std::this_thread::get_id()](size_t, DType) {
              return std::this_thread::get_id() == caller ? absl::InternalError("cannot look")
                                                          : absl::OkStatus();
            };
          }
          absl::Status failed;
          for (int step = 0; step < 100 && failed.ok(); ++step) failed = (*reducer)->Finish().status();
          EXPECT_EQ((*reducer)->Finish().status(), failed) << "and does not say that a step was reduced";
          return failed;
        },
        kNever);
    ExpectAllHear(results, 3, absl::StatusCode::kInternal, "cannot look");
  }
}

TEST(Reducer, FinishEndsWhenACollectiveDoesNot) {
  FakeWorld world({"a"});
  ExpectAllOk(RunThreads(world, [&](Communicator& inner) -> absl::Status {
    comm::Hooks hooks;
    comm::WrappedCommunicator c(&inner, &hooks);
    auto reducer = Reducer::Create(&c, Model(), SmallBuckets());
    RETURN_IF_BAD(reducer.status());
    Mutex lock;
    bool ended = false;
    hooks.timeout = absl::Milliseconds(50);
    hooks.before_all_reduce = [&](size_t, DType) {
      MutexLock held(&lock);
      lock.AwaitFor(comm::kPatience, [&] { return ended; });
      return absl::OkStatus();
    };
    const absl::Status late = (*reducer)->Finish().status();
    {
      MutexLock held(&lock);
      ended = true;
    }
    EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded) << late;
    EXPECT_THAT(std::string(late.message()),
                testing::HasSubstr("bucket 0 of 3 was not reduced within 100ms"));
    EXPECT_EQ((*reducer)->Finish().status(), late);
    reducer->reset();
    return absl::OkStatus();
  }));
}

// A mistake of one rank stops all of them before they begin, and their communicator stays usable.
TEST(Reducer, AMistakeOfOneRankIsRefusedByAll) {
  for (const auto& nodes : kFours) {
    FakeWorld world(nodes);
    ExpectAllOk(RunThreads(
        world,
        [&](Communicator& c) -> absl::Status {
          std::vector<GradientSpec> model = Model();
          if (c.rank() == 1) model[3].count = 0;
          const absl::Status refused = Reducer::Create(&c, model).status();
          EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
          EXPECT_THAT(std::string(refused.message()),
                      testing::HasSubstr("gradient 3 (out.weight) has no elements"));
          return c.Barrier();
        },
        kNever));
  }
}

// The gradients have equal sizes and another order: their means would be mixed.
TEST(Reducer, GradientsWithOtherNamesAreRefusedByAll) {
  for (const auto& nodes : kFours) {
    FakeWorld world(nodes);
    ExpectAllOk(RunThreads(
        world,
        [&](Communicator& c) -> absl::Status {
          std::vector<GradientSpec> model = {{"layer0", 40, {4, 10}}, {"layer1", 40, {4, 10}}};
          if (c.rank() == 1) std::swap(model[0], model[1]);
          const absl::Status refused = Reducer::Create(&c, model).status();
          EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
          EXPECT_THAT(std::string(refused.message()), testing::HasSubstr("rank 1 "));
          return c.Barrier();
        },
        kNever));
  }
}

}  // namespace
}  // namespace gtrain
