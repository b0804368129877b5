// What compression carries over when the ranks of a job change.
#include "comm/reducer/handover.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/rng.h"
#include "comm/exec/check_collectives.h"
#include "comm/exec/rank_test_threads.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain {
namespace {

using comm::ExpectAllOk;
using comm::FakeWorld;
using comm::HandoverLayout;
using comm::RunThreads;

constexpr size_t kCount = 6000;

// The words of the job file; "dgc" is top-k with the momentum that only a program asks for.
ReducerOptions With(const std::string& words) {
  ReducerOptions options;
  options.compress_from = 1000;
  const bool dgc = words.starts_with("dgc");
  options.compression = ParseCompression(dgc ? "topk" + words.substr(3) : words)->codecs[0];
  if (dgc) options.compression.momentum = 0.9F;
  return options;
}

std::vector<GradientSpec> Model() { return {{"hidden", kCount, {60, 100}}, {"bias", 10, {}}}; }

void FillRandomly(Reducer& reducer, uint64_t seed) {
  Rng rng(seed);
  for (size_t i = 0; i < Model().size(); ++i) {
    for (float& value : reducer.gradient(i)) value = static_cast<float>(rng.Unit()) - 0.5F;
  }
}

// One block a rank; empty: of one that comes new.
using Blocks = std::vector<std::vector<float>>;

struct Lived {
  Blocks given;
  std::vector<size_t> early_bytes;      // that a rank sent in its first step
  std::vector<std::vector<float>> sum;  // of the means, of each rank
};

// Ranks on `nodes` begin with `blocks`, make `steps`, and hand over; the last step is applied or not.
Lived Live(const std::vector<std::string>& nodes, const std::string& words, Blocks blocks, int steps,
           bool applied = true) {
  FakeWorld world(nodes);
  Lived lived;
  lived.given.resize(nodes.size());
  lived.early_bytes.resize(nodes.size());
  lived.sum.assign(nodes.size(), std::vector<float>(kCount));
  ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
    const auto rank = static_cast<size_t>(c.rank());
    auto reducer = Reducer::Create(&c, Model(), With(words));
    RETURN_IF_BAD(reducer.status());
    std::vector<float> block(blocks.empty() ? std::vector<float>() : blocks[rank]);
    block.resize((*reducer)->HandoverCount());
    RETURN_IF_BAD((*reducer)->TakeHandover(block));
    for (int step = 0; step < steps; ++step) {
      FillRandomly(**reducer, 1000 * static_cast<uint64_t>(step) + rank);
      auto done = (*reducer)->Finish();
      RETURN_IF_BAD(done.status());
      if (step == 0) lived.early_bytes[rank] = done->bytes_sent;
      for (size_t i = 0; i < kCount; ++i) lived.sum[rank][i] += (*reducer)->gradient(0)[i];
    }
    lived.given[rank].resize((*reducer)->HandoverCount());
    return (*reducer)->GiveHandover(applied, absl::MakeSpan(lived.given[rank]));
  }));
  return lived;
}

// What `blocks` owe the mean of the compressed bucket, which lies behind that of the bias or before it.
std::vector<double> Owed(const Blocks& blocks, const std::string& words) {
  const auto layout = *comm::LayoutOf(With(words).compression, kCount + 10, {{60, 100}, {10}});
  std::vector<double> owed(layout.residual);
  for (const std::vector<float>& block : blocks) {
    for (size_t i = 0; i < owed.size() && !block.empty(); ++i) owed[i] += block[HandoverLayout::kNumbers + i];
  }
  return owed;
}

double Norm(const std::vector<double>& values) {
  return std::sqrt(std::inner_product(values.begin(), values.end(), values.begin(), 0.0));
}

void ExpectEqual(const std::vector<double>& got, const std::vector<double>& wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  double worst = 0;
  for (size_t i = 0; i < got.size(); ++i) worst = std::max(worst, std::abs(got[i] - wanted[i]));
  EXPECT_LT(worst, 1e-5) << "of a norm of " << Norm(wanted);
  EXPECT_GT(Norm(wanted), 0.1);
}

const std::vector<std::vector<std::string>> kWorlds = {
    {"a", "b", "c"}, {"a", "a", "a"}, {"a", "b", "a", "b"}, {"a", "b", "c", "d", "e"}};

// Residuals are of a rank's gradient, or of a shard of the mean, or of a machine's sum: all ways keep what
// the mean is owed.
TEST(Handover, WhatTheMeanIsOwedStaysWhateverTheNumberOfRanks) {
  for (const std::string words : {"topk density=0.01 warmup=0", "onebit warmup=0", "powersgd rank=2 warmup=0",
                                  "dgc density=0.05 warmup=0"}) {
    const Lived before = Live({"a", "b", "c", "d"}, words, {}, 8);
    for (const std::vector<std::string>& world : kWorlds) {
      SCOPED_TRACE(
          absl::StrCat(words, " among ", world.size(), " ranks from ", world[0], " to ", world.back()));
      Blocks blocks = before.given;
      blocks.resize(world.size());  // rank 3 is lost, or a fifth one comes new
      const Lived after = Live(world, words, blocks, 0);
      ExpectEqual(Owed(after.given, words), Owed(blocks, words));
    }
  }
}

// Every gradient comes to the mean in the end: what was sent, and what is still owed.
TEST(Handover, NothingIsSentTwiceAndNothingIsLost) {
  const std::string words = "topk density=0.02 warmup=0";
  const Lived first = Live({"a", "b", "c", "d"}, words, {}, 6);
  const Lived then = Live({"a", "b", "c"}, words, {first.given[0], first.given[1], first.given[2]}, 5);
  std::vector<double> wanted = Owed({first.given[0], first.given[1], first.given[2]}, words);
  std::vector<double> got = Owed(then.given, words);
  std::vector<double> gradients(kCount);
  for (uint64_t step = 0; step < 5; ++step) {
    for (uint64_t rank = 0; rank < 3; ++rank) {
      Rng rng(1000 * step + rank);
      for (double& sum : gradients) sum += (static_cast<double>(static_cast<float>(rng.Unit()) - 0.5F)) / 3;
    }
  }
  const size_t bias = wanted.size() - kCount;  // buckets are filled from the last gradient
  for (size_t i = 0; i < kCount; ++i) wanted[bias + i] += gradients[i] - then.sum[0][i];
  wanted.erase(wanted.begin(), wanted.begin() + static_cast<ptrdiff_t>(bias));
  got.erase(got.begin(), got.begin() + static_cast<ptrdiff_t>(bias));
  ExpectEqual(got, wanted);
}

// A step that some rank did not get is computed again: nothing of it is carried over.
TEST(Handover, AStepThatWasNotAppliedLeavesNothing) {
  const std::string words = "topk density=0.02 warmup=0";
  const Lived kept = Live({"a", "b"}, words, {}, 3);
  const Lived dropped = Live({"a", "b"}, words, {}, 4, /*applied=*/false);
  const Lived applied = Live({"a", "b"}, words, {}, 4);
  for (size_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(Owed({dropped.given[rank]}, words), Owed({kept.given[rank]}, words));
    EXPECT_NE(Owed({applied.given[rank]}, words), Owed({kept.given[rank]}, words));
  }
}

TEST(Handover, NobodyWarmsUpAgain) {
  for (const std::string words : {"topk density=0.01 warmup=5", "onebit momentum=0.9 warmup=5",
                                  "powersgd rank=2 warmup=5", "dgc density=0.01 warmup=5"}) {
    const Lived before = Live({"a", "b", "c", "d"}, words, {}, 8);
    const size_t dense = Live({"a", "b", "c"}, words, {}, 1).early_bytes[0];
    for (const std::vector<std::string>& world : kWorlds) {
      SCOPED_TRACE(
          absl::StrCat(words, " among ", world.size(), " ranks from ", world[0], " to ", world.back()));
      Blocks blocks(world.size());
      blocks.back() = before.given[2];  // all others come new
      const Lived after = Live(world, words, blocks, 1);
      for (const size_t bytes : after.early_bytes) EXPECT_LT(bytes, dense / 2);
    }
  }
}

// A generation of one rank, which has nothing to compress for, lies between two others.
TEST(Handover, AGenerationOfOneRankLosesNothing) {
  const std::string words = "dgc density=0.01 warmup=5";
  const Lived before = Live({"a", "b", "c", "d"}, words, {}, 8);
  const Lived alone = Live({"a"}, words, {before.given[1]}, 0);
  ExpectEqual(Owed(alone.given, words), Owed({before.given[1]}, words));
  const Lived after = Live({"a", "b", "c"}, words, {alone.given[0], {}, {}}, 1);
  EXPECT_LT(after.early_bytes[0], Live({"a", "b", "c"}, words, {}, 1).early_bytes[0] / 2);
}

// Blocks may come from a file.
TEST(Handover, ABlockOfAnotherReducerIsRefused) {
  FakeWorld world({"a", "b"});
  ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
    auto reducer = Reducer::Create(&c, Model(), With("onebit"));
    RETURN_IF_BAD(reducer.status());
    EXPECT_THAT((*reducer)->HandoverName(), testing::HasSubstr("onebit"));
    std::vector<float> block((*reducer)->HandoverCount() + 1);
    EXPECT_TRUE(absl::IsInvalidArgument((*reducer)->TakeHandover(block)));
    EXPECT_TRUE(absl::IsInvalidArgument((*reducer)->GiveHandover(true, absl::MakeSpan(block))));
    return absl::OkStatus();
  }));
}

TEST(Handover, AnAutomaticChoiceHandsOverResiduals) {
  setenv("GTRAIN_COMPRESSION", "auto: topk density=0.01 warmup=0", 1);
  FakeWorld world({"a", "b"});
  ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
    auto reducer = Reducer::Create(&c, Model(), {});
    RETURN_IF_BAD(reducer.status());
    std::vector<float> block((*reducer)->HandoverCount());
    block[0] = HandoverLayout::kAll;
    block[HandoverLayout::kNumbers] = 3;
    RETURN_IF_BAD((*reducer)->TakeHandover(block));
    std::vector<float> given(block.size());
    RETURN_IF_BAD((*reducer)->GiveHandover(true, absl::MakeSpan(given)));
    EXPECT_EQ(given[HandoverLayout::kNumbers], 3);
    auto done = (*reducer)->Finish();
    RETURN_IF_BAD(done.status());
    RETURN_IF_BAD((*reducer)->GiveHandover(true, absl::MakeSpan(given)));
    EXPECT_EQ(given[HandoverLayout::kNumbers], 0) << "it went out with the step";
    return absl::OkStatus();
  }));
  unsetenv("GTRAIN_COMPRESSION");
}

}  // namespace
}  // namespace gtrain
