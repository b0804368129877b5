// Which codec each bucket should use, from what its collectives cost. Pure: no clock, no communicator. Time
// and memory are those of buckets times ways, independent of the number of ranks.
#pragma once
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "gtrain/compression.h"

namespace gtrain::comm {

// One way to reduce one bucket, way 0 being float32. Seconds and bytes are of one step.
struct Way {
  double bytes = 0;                // that this rank puts on the wire
  double codec_seconds = 0;        // encoding and decoding
  int rounds = 1;                  // collectives, each of which costs one latency
  std::optional<double> measured;  // seconds of the whole, since the link last changed
};

struct BucketCost {
  double ready = 0;  // seconds since the step began until its gradients were complete
  std::vector<Way> ways;
  size_t way = 0;  // in use now; measured
};

// Takes in that the way in use took `seconds`. If that says that the link has changed, earlier measurements
// no longer count: twice as fast or slow, by more than 2 % of what float32 takes. Less is noise, and
// believing it costs a trial of float32 on what may be a slow link.
void Measured(double seconds, BucketCost* bucket);

// Seconds that a bucket takes with a way: as measured, or else predicted from the link's speed, which the
// measured way of the most bytes shows.
double Seconds(const BucketCost& bucket, size_t way, double latency);

// Chooses the way of each bucket. Buckets are reduced one after the other; the last gradient was there
// `computed` seconds after the step began. Buckets whose float32 is hidden behind the backward pass stay
// float32; the others take the fastest way, if it beats float32 by more than 2 % and all of them together
// shorten the step as much; the way in use wins ties.
std::vector<size_t> ChooseWays(absl::Span<const BucketCost> buckets, double computed, double latency);

// Describes the choices in a line for people: "topk 0.1 % for 12 of 13 buckets: 17 ms a step instead of 83 ms
// as float32; the link carries 940 Mbit/s". `options` are those of the ways, `chosen` is the way of each
// bucket.
std::string Describe(absl::Span<const BucketCost> buckets, absl::Span<const CompressionOptions> options,
                     absl::Span<const size_t> chosen, double computed, double latency);
// "float32", "topk 0.1 %", "powersgd of rank 4".
std::string Word(const CompressionOptions& options);

// Predicts the bytes that one of `ranks` ranks sends for `count` elements, and how often the ranks meet.
// `factors` is the number of elements that PowerSGD sends for them.
Way WayOf(const CompressionOptions& options, size_t count, int ranks, size_t factors = 0);

}  // namespace gtrain::comm
