// What is told to a Reducer (gtrain/reducer.h), and what it tells of a step.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "gtrain/compression.h"

namespace gtrain {

struct ReducerOptions {
  // Gradients share a bucket up to this size; a larger one has a bucket of its own.
  size_t bucket_bytes = 8 << 20;
  // The program's own choice; what the job file says wins over it.
  CompressionOptions compression = {};
  // Buckets of fewer elements travel as float32: latency, not bytes, is their price.
  size_t compress_from = 16 << 10;
};

struct GradientSpec {
  std::string name = {};
  size_t count = 0;  // float32
  // Its dimensions, whose product is `count`. PowerSGD alone wants them: what has none is a vector to it.
  std::vector<int64_t> shape = {};
};

struct ReducedStep {
  // Gradients nobody called Ready for on this rank: they took part with what their memory held. By index.
  std::vector<size_t> unused;
  uint64_t bytes_sent = 0;  // by this rank in this step
  // Of the buckets that top-k compressed in this step, by this rank: between 0.9 and 1.1 of what is wanted,
  // less where a gradient has fewer elements that are not zero.
  Selected selected;
  // Elements that codecs clipped on this rank, because they could not say numbers as large (compression.h). A
  // warning says so, too, at most once a minute: the learning rate or the loss scale is too large, or the
  // codec has too small a range (bf16 instead of fp16).
  size_t clipped = 0;
  // A gradient of this step is what turns the optimiser's momentum into a compressed one, so its square is
  // mostly the error of the compression. Adam and others that divide by a mean of squares leave that mean,
  // and its bias correction, as the steps before left it: 1-bit Adam (Tang et al. 2021, arXiv 2102.02888).
  // Elements whose mean is zero no gradient has reached: what comes back for them is the error of others, and
  // divided by next to nothing it is a step of any size, so the optimiser leaves them where they are.
  // False in the warm-up, which measures the mean; true from the first compressed step on. Equal on all
  // ranks.
  bool momentum_travelled = false;
  size_t early = 0;  // buckets that were means before Finish was called: hidden behind backward
};

}  // namespace gtrain
