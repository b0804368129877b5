// Buckets, hooks in any order, and what happens to a step that not all ranks end.
#include "gtrain/reducer.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/rng.h"
#include "comm/exec/check_collectives.h"
#include "comm/exec/rank_test_threads.h"
#include "comm/reducer/create_reducer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain {
namespace {

using comm::ExpectAllOk;
using comm::FakeWorld;
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

// What arrived in all steps is what went in, whatever the choices were on the way, but for what the codec in
// use still carries.
TEST(Reducer, AutomaticChoiceLosesNothingAndIsTheSameEverywhere) {
  const JobSays says("auto: topk density=0.05 warmup=0, onebit warmup=0, int8");
  constexpr int kSteps = 120;
  constexpr size_t kElements = 20'000;
  FakeWorld world({"a", "b", "c"});
  std::vector<std::vector<float>> last(3);
  ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
    ReducerOptions options;
    options.compress_from = 1000;
    // Every way in turn. Ranks that disagree must not matter: rank 0 decides.
    size_t turn = static_cast<size_t>(c.rank());
    auto reducer = comm::CreateReducer(&c, {{"weight", kElements}}, options,
                                       [&](auto, double, double) { return std::vector<size_t>{++turn % 4}; });
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
    EXPECT_THAT(used, testing::ElementsAre(Codec::kNone, Codec::kInt8, Codec::kTopK, Codec::kOneBit));
    EXPECT_EQ((*reducer)->Choices()[0].seconds.size(), 4u);
    last[static_cast<size_t>(c.rank())].assign((*reducer)->gradient(0).begin(),
                                               (*reducer)->gradient(0).end());
    // All that is still on its way, of all ranks, is exported.
    std::vector<double> carried(kElements);
    for (const CarriedState& state : (*reducer)->Export()) {
      const double factor = state.name.ends_with("/shard") ? c.size() : 1;
      for (size_t i = 0; i < state.values.size() && !state.name.ends_with("momentum"); ++i) {
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
}

}  // namespace
}  // namespace gtrain
