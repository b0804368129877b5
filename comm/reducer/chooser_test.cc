// Worlds in which the right choice is known.
#include "comm/reducer/chooser.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain::comm {
namespace {

using testing::Each;
using testing::ElementsAre;

constexpr size_t kCount = 6'330'000;  // 25 MB
constexpr double kMemory = 8e9;       // bytes a second that a codec reads
enum { kDense, kHalf, kSign, kSparse };

// Two ranks over a link of so many bytes a second; everything but float32 is a guess.
BucketCost Bucket(double bytes_a_second, double ready = 0, size_t count = kCount) {
  BucketCost bucket;
  bucket.ready = ready;
  for (const Codec codec : {Codec::kNone, Codec::kFloat16, Codec::kOneBit, Codec::kTopK}) {
    CompressionOptions options;
    options.codec = codec;
    options.density = 0.001;
    bucket.ways.push_back(WayOf(options, count, 2));
    if (codec != Codec::kNone)
      bucket.ways.back().codec_seconds = 3 * 4.0 * static_cast<double>(count) / kMemory;
  }
  bucket.ways[kDense].measured = bucket.ways[kDense].bytes / bytes_a_second;
  return bucket;
}

TEST(ChooseWays, SharedMemoryTakesNone) {
  EXPECT_THAT(ChooseWays({Bucket(10e9)}, 0, 1e-6), ElementsAre(kDense));
}

TEST(ChooseWays, SlowLinksTakeTheFewestBytes) {
  EXPECT_THAT(ChooseWays({Bucket(12.5e6)}, 0.02, 1e-4), ElementsAre(kSparse));
  EXPECT_THAT(ChooseWays({Bucket(125e6)}, 0.02, 1e-4), ElementsAre(kSparse));
}

TEST(ChooseWays, WhatBackwardHidesStaysFloat32) {
  EXPECT_THAT(ChooseWays({Bucket(125e6)}, 10, 1e-4), ElementsAre(kDense));
  // Three buckets of 20 ms each: two are hidden, the last one is not.
  const size_t third = kCount / 10;
  const std::vector<BucketCost> buckets = {Bucket(125e6, 0.1, third), Bucket(125e6, 0.2, third),
                                           Bucket(125e6, 0.3, third)};
  EXPECT_THAT(ChooseWays(buckets, 0.3, 1e-4), ElementsAre(kDense, kDense, kSparse));
  // Ready at once, each waits for the one before.
  std::vector<BucketCost> queue = buckets;
  for (auto& bucket : queue) bucket.ready = 0.3;
  EXPECT_THAT(ChooseWays(queue, 0.3, 1e-4), Each(kSparse));
}

TEST(ChooseWays, WhatShortensNoStepIsNotWorthIt) {
  EXPECT_THAT(ChooseWays({Bucket(125e6, 10, kCount / 20)}, 10, 1e-4), ElementsAre(kDense));  // 20 ms of 10 s
}

TEST(ChooseWays, LatencyIsPaidForEveryRound) {
  EXPECT_THAT(ChooseWays({Bucket(125e6, 0, 2'000)}, 0, 1e-3), ElementsAre(kDense));
}

TEST(ChooseWays, MeasuredBeatsPredicted) {
  BucketCost bucket = Bucket(125e6);
  bucket.ways[kSparse].measured =
      2 * *bucket.ways[kDense].measured;  // a slow codec, or peers that wait for each other
  EXPECT_THAT(ChooseWays({bucket}, 0.02, 1e-4), ElementsAre(kSign));
  bucket.way = kSparse;  // it was tried: what it says about the link counts where nothing was measured
  bucket.ways[kSign].measured = bucket.ways[kHalf].measured = 0.99 * *bucket.ways[kDense].measured;
  EXPECT_THAT(ChooseWays({bucket}, 0.02, 1e-4), ElementsAre(kDense)) << "1 % is not worth it";
}

TEST(Describe, SaysWhatIsUsedAndWhatItGains) {
  const size_t third = kCount / 10;
  const std::vector<BucketCost> buckets = {Bucket(125e6, 0.1, third), Bucket(125e6, 0.2, third),
                                           Bucket(125e6, 0.3, third)};
  std::vector<CompressionOptions> options(4);
  options[kHalf].codec = Codec::kFloat16;
  options[kSign].codec = Codec::kOneBit;
  options[kSparse].codec = Codec::kTopK;
  options[kSparse].density = 0.001;
  const std::vector<size_t> chosen = {kDense, kHalf, kSparse};
  EXPECT_EQ(
      Describe(buckets, options, chosen, 0.3, 0),
      "fp16 for 1 and topk 0.1 % for 1 of 3 buckets: 301 ms a step instead of 320 ms as float32; the link "
      "carries 1000 Mbit/s");
  EXPECT_EQ(Describe(buckets, options, std::vector<size_t>(3), 0.3, 0),
            "float32 for all 3 buckets: 320 ms a step, which nothing allowed shortens; the link carries 1000 "
            "Mbit/s");
  options[kSparse].codec = Codec::kPowerSgd;
  EXPECT_EQ(Word(options[kSparse]), "powersgd of rank 4");
  // The longest of it fits into what `gtrain status` keeps.
  options[kHalf].codec = Codec::kTopK;
  options[kHalf].density = 0.012345;
  EXPECT_LE(Describe(buckets, options, chosen, 12345.678, 0).size(), 160u);
}

TEST(WayOf, FactorsAreAddedUpAsTheyAre) {
  CompressionOptions options;
  options.codec = Codec::kPowerSgd;
  const Way dense = WayOf({}, 1000, 4), factors = WayOf(options, 1000, 4, 250);
  EXPECT_DOUBLE_EQ(factors.bytes, dense.bytes / 4);
  EXPECT_EQ(factors.rounds, 2);
}

TEST(WayOf, BytesOfTopKStopGrowing) {
  CompressionOptions options;
  options.codec = Codec::kTopK;
  options.density = 0.001;
  constexpr double kPacket = 8000;
  EXPECT_DOUBLE_EQ(WayOf(options, 1'000'000, 16).bytes, 15 * kPacket);
  EXPECT_EQ(WayOf(options, 1'000'000, 16).rounds, 2);
  EXPECT_DOUBLE_EQ(WayOf(options, 1'000'000, 20).bytes, 0.95 * 21 * kPacket);
  EXPECT_LT(WayOf(options, 1'000'000, 1000).bytes, 49 * kPacket);
  EXPECT_EQ(WayOf(options, 1'000'000, 1000).rounds, 4);
  options.density = 0.01;  // int8 of all elements is less than 48 times as many
  EXPECT_LT(WayOf(options, 1'000'000, 1000).bytes, 10 * kPacket + 1.02e6);
}

TEST(Seconds, TheMostBytesSayMostAboutTheLink) {
  BucketCost bucket = Bucket(125e6);
  bucket.way = kSparse;
  bucket.ways[kSparse].measured =
      bucket.ways[kSparse].codec_seconds / 2;  // faster than the sample: no wire to be seen
  EXPECT_GT(Seconds(bucket, kHalf, 0), 0.4 * *bucket.ways[kDense].measured);
}

TEST(ChooseWays, StaysForSmallDifferences) {
  BucketCost bucket = Bucket(125e6);
  bucket.way = kSign;
  bucket.ways[kSign].measured = 0.0100;
  bucket.ways[kHalf].measured = 0.1;
  bucket.ways[kSparse].measured = 0.0098;
  EXPECT_THAT(ChooseWays({bucket}, 0.001, 1e-4), ElementsAre(kSign));
  bucket.ways[kSparse].measured = 0.0090;
  EXPECT_THAT(ChooseWays({bucket}, 0.001, 1e-4), ElementsAre(kSparse));
}

TEST(Measured, OnlyWhatMattersToFloat32IsAChangeOfTheLink) {
  BucketCost bucket = Bucket(12.5e6);  // float32 takes 2 s
  bucket.way = kSign;
  Measured(0.063, &bucket);
  Measured(0.030, &bucket);  // less than half, but 33 ms of 2 s
  EXPECT_TRUE(bucket.ways[kDense].measured);
  EXPECT_EQ(bucket.ways[kSign].measured, 0.030);
  Measured(0.300, &bucket);
  EXPECT_FALSE(bucket.ways[kDense].measured);
  EXPECT_EQ(bucket.ways[kSign].measured, 0.300);
}

TEST(ChooseWays, ALinkThatBecameFastTakesFloat32Again) {
  BucketCost bucket = Bucket(12.5e6);
  bucket.way = kSparse;
  for (Way& way : bucket.ways) way.measured.reset();
  bucket.ways[kSparse].measured =
      bucket.ways[kSparse].codec_seconds + 2e-6 + bucket.ways[kSparse].bytes / 10e9;
  EXPECT_THAT(ChooseWays({bucket}, 0, 1e-6), ElementsAre(kDense));
}

}  // namespace
}  // namespace gtrain::comm
