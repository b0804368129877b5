#include "comm/reducer/chooser.h"

#include <algorithm>
#include <cmath>

namespace gtrain::comm {
namespace {

constexpr double kGain = 0.98;  // of float32's time, and of the step: less is not worth what a codec loses
constexpr double kStay = 0.95;  // of the time of the way in use: less is not worth a change

constexpr double kLinkChanged = 2;
constexpr double kNoise = 0.02;  // of float32's time

}  // namespace

void Measured(double seconds, BucketCost* bucket) {
  Way& used = bucket->ways[bucket->way];
  const double before = used.measured.value_or(seconds);
  const double noise = kNoise * bucket->ways[0].measured.value_or(0);
  if (std::max(seconds, before) > kLinkChanged * std::min(seconds, before) &&
      std::fabs(seconds - before) > noise) {
    for (Way& way : bucket->ways) way.measured.reset();
  }
  used.measured = seconds;
}

double Seconds(const BucketCost& bucket, size_t way, double latency) {
  const Way& asked = bucket.ways[way];
  if (asked.measured) return *asked.measured;
  const Way* known = &bucket.ways[bucket.way];
  for (const Way& way : bucket.ways) {
    if (way.measured && way.bytes > known->bytes) known = &way;
  }
  const double wire = known->measured.value_or(0) - known->codec_seconds - known->rounds * latency;
  return asked.codec_seconds + asked.rounds * latency + std::max(wire, 0.0) * asked.bytes / known->bytes;
}

std::vector<size_t> ChooseWays(absl::Span<const BucketCost> buckets, double computed, double latency) {
  // Were all float32: where the last idle moment ends, and when everything ends.
  size_t busy_from = 0;
  double end = 0;
  for (size_t i = 0; i < buckets.size(); ++i) {
    if (buckets[i].ready >= end) busy_from = i;
    end = std::max(end, buckets[i].ready) + Seconds(buckets[i], 0, latency);
  }
  std::vector<size_t> chosen(buckets.size(), 0);
  if (end * kGain <= computed) return chosen;
  for (size_t i = busy_from; i < buckets.size(); ++i) {
    const BucketCost& bucket = buckets[i];
    size_t best = 0;
    for (size_t way = 1; way < bucket.ways.size(); ++way) {
      if (Seconds(bucket, way, latency) < Seconds(bucket, best, latency)) best = way;
    }
    const double used = Seconds(bucket, bucket.way, latency);
    if (bucket.way != 0 && used * kStay <= Seconds(bucket, best, latency)) best = bucket.way;
    if (Seconds(bucket, best, latency) <= kGain * Seconds(bucket, 0, latency)) chosen[i] = best;
  }
  double shorter = 0;
  for (size_t i = 0; i < buckets.size(); ++i) {
    shorter = std::max(shorter, buckets[i].ready) + Seconds(buckets[i], chosen[i], latency);
  }
  if (shorter > kGain * end) chosen.assign(buckets.size(), 0);
  return chosen;
}

Way WayOf(const CompressionOptions& options, size_t count, int ranks) {
  const auto n = static_cast<double>(count);
  const double peers = ranks - 1;
  const double twice = 2 * peers / ranks;  // the bytes of a reduce-scatter and an all-gather
  Way way;
  switch (options.codec) {
    case Codec::kNone:
      way.bytes = twice * 4 * n;
      return way;
    case Codec::kTopK:
      way.bytes = std::min(peers, 2 * twice) * 8 * std::max(1.0, options.density * n);
      break;
    case Codec::kFloat16:
    case Codec::kBFloat16:
      way.bytes = twice * 2 * n;
      break;
    case Codec::kInt8:
    case Codec::kFloat8:
      way.bytes = twice * (1 + 4.0 / 256) * n;
      break;
    case Codec::kOneBit:
      way.bytes = twice * (1.0 / 8 + 4.0 / 256) * n;
      break;
  }
  way.rounds = 2;
  return way;
}

}  // namespace gtrain::comm
