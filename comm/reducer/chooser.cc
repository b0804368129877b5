#include "comm/reducer/chooser.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "comm/codec/compressor.h"
#include "comm/reducer/sparse_mean.h"

namespace gtrain::comm {
namespace {

constexpr double kGain = 0.98;  // of float32's time, and of the step: less is not worth what a codec loses
constexpr double kStay = 0.95;  // of the time of the way in use: less is not worth a change

constexpr double kLinkChanged = 2;
constexpr double kNoise = 0.02;  // of float32's time

// The measured way of the most bytes, which says most about the link.
const Way& Known(const BucketCost& bucket) {
  const Way* known = &bucket.ways[bucket.way];
  for (const Way& way : bucket.ways) {
    if (way.measured && way.bytes > known->bytes) known = &way;
  }
  return *known;
}
// Seconds that its bytes took.
double Wire(const Way& way, double latency) {
  return way.measured.value_or(0) - way.codec_seconds - way.rounds * latency;
}

// When the last bucket is reduced, since the step began.
double End(absl::Span<const BucketCost> buckets, absl::Span<const size_t> ways, double latency) {
  double end = 0;
  for (size_t i = 0; i < buckets.size(); ++i) {
    end = std::max(end, buckets[i].ready) + Seconds(buckets[i], ways[i], latency);
  }
  return end;
}

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
  const Way& known = Known(bucket);
  const double wire = std::max(Wire(known, latency), 0.0);
  return asked.codec_seconds + asked.rounds * latency + wire * asked.bytes / known.bytes;
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
  if (End(buckets, chosen, latency) > kGain * end) chosen.assign(buckets.size(), 0);
  return chosen;
}

std::string Word(const CompressionOptions& options) {
  if (options.codec == Codec::kNone) return "float32";
  if (options.codec == Codec::kTopK) return absl::StrFormat("topk %.4g %%", 100 * options.density);
  if (options.codec == Codec::kPowerSgd) return absl::StrCat("powersgd of rank ", options.matrix_rank);
  return std::string(CodecName(options.codec));
}

std::string Describe(absl::Span<const BucketCost> buckets, absl::Span<const CompressionOptions> options,
                     absl::Span<const size_t> chosen, double computed, double latency) {
  std::map<size_t, size_t> used;  // way: buckets
  for (const size_t way : chosen) {
    if (way != 0) ++used[way];
  }
  const auto milliseconds = [&](absl::Span<const size_t> ways) {
    return absl::StrFormat("%.3g ms", 1e3 * std::max(computed, End(buckets, ways, latency)));
  };
  const std::vector<size_t> dense(buckets.size(), 0);
  const std::string all = absl::StrCat(buckets.size(), buckets.size() == 1 ? " bucket: " : " buckets: ");
  std::string text;
  if (used.empty()) {
    text =
        absl::StrCat("float32 for all ", all, milliseconds(dense), " a step, which nothing allowed shortens");
  } else {
    text = absl::StrCat(absl::StrJoin(used, " and ",
                                      [&](std::string* out, const auto& way) {
                                        absl::StrAppend(out, Word(options[way.first]), " for ", way.second);
                                      }),
                        " of ", all, milliseconds(chosen), " a step instead of ", milliseconds(dense),
                        " as float32");
  }
  const BucketCost& largest = *std::max_element(
      buckets.begin(), buckets.end(),
      [](const BucketCost& a, const BucketCost& b) { return a.ways[0].bytes < b.ways[0].bytes; });
  const Way& known = Known(largest);
  // A wire that takes no time beside the rest was not measured.
  if (const double wire = Wire(known, latency); known.measured && wire > 0.1 * *known.measured) {
    absl::StrAppendFormat(&text, "; the link carries %.0f Mbit/s", known.bytes * 8 / wire / 1e6);
  }
  return text;
}

Way WayOf(const CompressionOptions& options, size_t count, int ranks, size_t factors) {
  const auto n = static_cast<double>(count);
  const double peers = ranks - 1;
  const double twice = 2 * peers / ranks;  // the bytes of a reduce-scatter and an all-gather
  Way way;
  switch (options.codec) {
    case Codec::kNone:
      way.bytes = twice * 4 * n;
      return way;
    case Codec::kTopK: {
      const double packet = kEntryBytes * std::max(1.0, options.density * n);
      if (GoesToEveryone(options, count, ranks)) {
        way.bytes = peers * packet;
        break;
      }
      const CompressionOptions owner = OwnerOptions(options, ranks);
      const double means = owner.codec == Codec::kTopK ? kEntryBytes * owner.density * n : kInt8Bytes * n;
      way.bytes = twice / 2 * (packet + means);
      way.rounds = 4;
      return way;
    }
    case Codec::kFloat16:
    case Codec::kBFloat16:
      way.bytes = twice * 2 * n;
      break;
    case Codec::kInt8:
    case Codec::kFloat8:
      way.bytes = twice * kInt8Bytes * n;
      break;
    case Codec::kOneBit:
      way.bytes = twice * (1.0 / 8 + 4.0 / 256) * n;
      break;
    case Codec::kPowerSgd:
      way.bytes = twice * 4 * static_cast<double>(factors);
      break;
  }
  way.rounds = 2;
  return way;
}

}  // namespace gtrain::comm
