// The options of a Reducer (gtrain/reducer.h), and the result of a step.
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
  // The program's own choice; the job file wins over it.
  CompressionOptions compression = {};
  // Buckets of fewer elements travel as float32: they cost latency, which compression does not reduce.
  size_t compress_from = 16 << 10;
};

struct GradientSpec {
  std::string name = {};
  size_t count = 0;  // float32
  // Its dimensions, whose product is `count`. PowerSGD alone wants them, and takes a gradient without any for
  // a vector.
  std::vector<int64_t> shape = {};
};

struct ReducedStep {
  // Indices of the gradients for which this rank did not call Ready: they took part with what their memory
  // held.
  std::vector<size_t> unused;
  uint64_t bytes_sent = 0;  // by this rank in this step
  // Elements of this rank in the buckets that top-k compressed in this step: between 0.9 and 1.1 of `wanted`
  // are sent, less where a gradient has fewer elements that are not zero.
  Selected selected;
  // Elements of this rank that codecs clipped because they were too large to represent (compression.h). A
  // warning says so, too, at most once a minute: the learning rate or the loss scale is too large, or the
  // codec has too small a range (bf16 instead of fp16).
  size_t clipped = 0;
  // A gradient of this step is the value that turns the optimiser's momentum into a compressed one, so its
  // square is mostly the error of the compression. Adam and other optimisers that divide by a mean of squares
  // leave that mean, and its bias correction, as the steps before left it: 1-bit Adam (Tang et al. 2021,
  // arXiv 2102.02888). Elements whose mean of squares is zero have never had a gradient: the value that comes
  // back for them is the error of other elements, and divided by next to nothing it is a step of any size, so
  // the optimiser leaves them where they are. False in the warm-up, which measures the mean; true from the
  // first compressed step on. Equal on all ranks.
  bool momentum_travelled = false;
  size_t early = 0;  // buckets that were means before Finish was called: hidden behind backward
};

}  // namespace gtrain
