// Means of gradients among data-parallel ranks: buckets that leave while backward still runs, compressed on
// their way.
#pragma once
#include <gtrain/communicator.h>
#include <gtrain/compression.h>
#include <gtrain/gradients.h>
#include <gtrain/gtrain_c.h>
#include <gtrain/status.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace gtrain {
namespace internal {

inline gtrain_compression CompressionFor(const CompressionOptions& options) {
  return {
      .size = sizeof(gtrain_compression),
      .codec = static_cast<gtrain_codec>(options.codec),
      .error_feedback = options.error_feedback,
      .residual_bfloat16 = options.residual == ResidualType::kBFloat16,
      .rounding_seed = options.rounding_seed,
      .density = options.density,
      .exact = options.exact,
      .momentum = options.momentum,
      .matrix_rank = options.matrix_rank,
      .optimizer_momentum = options.optimizer_momentum,
      .warmup_steps = options.warmup_steps,
  };
}

inline std::vector<gtrain_gradient> GradientsFor(const std::vector<GradientSpec>& gradients) {
  std::vector<gtrain_gradient> out;
  for (const GradientSpec& g : gradients)
    out.push_back({g.name.c_str(), g.count, g.shape.data(), static_cast<int>(g.shape.size())});
  return out;
}

inline ReducedStep ReducedStepOf(const gtrain_reduced_step& c) {
  ReducedStep step;
  step.unused.assign(c.unused, c.unused + c.unused_count);
  step.bytes_sent = c.bytes_sent;
  step.selected = {c.selected, c.wanted};
  step.clipped = c.clipped;
  step.momentum_travelled = c.momentum_travelled != 0;
  step.early = c.early;
  return step;
}

}  // namespace internal

// Parses the words of a job file for one codec: "none", "fp16", "topk density=0.01 warmup=100", "topk
// residual=bf16", "onebit momentum=0.9", "powersgd rank=2". An option that is not given has the value of
// published practice. kInvalidArgument says which word is wrong. The automatic choice can only be made in the
// job file (`comm.compression: auto`).
inline Result<CompressionOptions> ParseCompression(const std::string& words) {
  gtrain_compression c{};
  c.size = sizeof(c);
  Status status = internal::Call(gtrain_compression_parse, words.c_str(), &c);
  if (!status.ok()) return status;
  CompressionOptions options;
  options.codec = static_cast<Codec>(c.codec);
  options.error_feedback = c.error_feedback != 0;
  options.residual = c.residual_bfloat16 != 0 ? ResidualType::kBFloat16 : ResidualType::kFloat32;
  options.rounding_seed = c.rounding_seed;
  options.density = c.density;
  options.exact = c.exact != 0;
  options.momentum = c.momentum;
  options.matrix_rank = c.matrix_rank;
  options.optimizer_momentum = c.optimizer_momentum;
  options.warmup_steps = c.warmup_steps;
  return options;
}

// Averages the gradients of a model. It owns their memory, so that nothing is copied: the framework
// accumulates into it (in libtorch `p.mutable_grad() = from_blob(...)`), a hook calls Ready() when a gradient
// is complete, and Finish() returns when all of them are means. Buckets are filled from the last gradient,
// which backward finishes first, and leave in that order. Gradient accumulation: call neither Ready nor
// Finish for micro-batches before the last one. With `comm.compression: auto` in the job file each bucket
// gets the codec measured to end the step soonest.
//
// Ready and Abort are thread-safe and never block; the rest belongs to one thread. Moved and not copied;
// session and communicator may end first. Its one thread is joined by the destructor after a running
// collective.
class Reducer {
 public:
  // Collective. `gradients` are in the order of the forward pass and equal on all ranks. The communicator
  // stays free for other use: the reducer splits its own from it, at most three. kInvalidArgument, on all
  // ranks: there are no gradients, one has no elements or a shape of another number of elements, options are
  // bad, PowerSGD gets no gradient of two dimensions, or the ranks' gradients or options differ.
  static Result<Reducer> Create(const Communicator& communicator, const std::vector<GradientSpec>& gradients,
                                const ReducerOptions& options = {}) {
    const std::vector<gtrain_gradient> specs = internal::GradientsFor(gradients);
    const gtrain_compression compression = internal::CompressionFor(options.compression);
    const gtrain_reducer_options c{sizeof(c), options.bucket_bytes, options.compress_from, &compression};
    gtrain_reducer* made = nullptr;
    Status status =
        internal::Call(gtrain_reducer_create, communicator.handle(), specs.data(), specs.size(), &c, &made);
    if (!status.ok()) return status;
    return Reducer(made);
  }

  // The memory of a gradient, zeroed at first; from then on the framework fills and zeroes it. Between
  // Ready(index) and the end of Finish the reducer uses it. Empty where there is no such gradient.
  std::span<float> gradient(size_t index) {
    float* data = nullptr;
    size_t count = 0;
    gtrain_reducer_gradient(handle(), index, &data, &count, nullptr);
    return {data, count};
  }
  // Says that a gradient is complete. kInvalidArgument: there is no such gradient. kFailedPrecondition: it
  // was ready in this step already (a parameter used twice: call Ready after the last use).
  Status Ready(size_t index) const { return internal::Call(gtrain_reducer_ready, handle(), index); }
  // Sends the buckets that have not left yet and blocks until every gradient is the mean, for each bucket at
  // most twice as long as the communicator's timeout. After an error the reducer is dead: every later Finish
  // returns the same error, and the other ranks get kUnavailable with this rank and its message.
  Result<ReducedStep> Finish() {
    gtrain_reduced_step c{};
    c.size = sizeof(c);
    Status status = internal::Call(gtrain_reducer_finish, handle(), &c);
    if (!status.ok()) return status;
    return internal::ReducedStepOf(c);
  }
  // Says that this rank cannot go on with its step (data that cannot be read): the other ranks get `why` once
  // the bucket that is under way is reduced.
  void Abort(const std::string& why) const { gtrain_reducer_abort(handle(), why.c_str(), nullptr); }
  // Called after Finish, on all ranks or none, when the optimiser skips this step (a loss scaler saw an
  // infinity): compression carries nothing over from it.
  void Drop() { gtrain_reducer_drop(handle(), nullptr); }

  gtrain_reducer* handle() const { return handle_.get(); }

 private:
  explicit Reducer(gtrain_reducer* handle) : handle_(handle) {}
  std::unique_ptr<gtrain_reducer, internal::Freer<gtrain_reducer, gtrain_reducer_free>> handle_;
};

// The mean of float32[count] among the ranks of a communicator, compressed on its way: the way of one bucket
// in a Reducer, for programs that have buckets of their own. A step is a transaction: what a call carries
// over stays pending until the next call applies it, unless Drop() came first. All ranks drop or none. After
// an error it is dead. It is used by one thread at a time, and moved but not copied; the communicator may be
// destroyed before it.
class CompressedMean {
 public:
  // Collective. `shapes` are those of the tensors that lie in the data one behind the other, for PowerSGD;
  // without any the data is one vector of `count`. It splits a communicator of its own.
  static Result<CompressedMean> Create(const Communicator& communicator, const CompressionOptions& options,
                                       size_t count, const std::vector<GradientSpec>& shapes = {}) {
    const std::vector<gtrain_gradient> specs = internal::GradientsFor(shapes);
    const gtrain_compression c = internal::CompressionFor(options);
    gtrain_compressed_mean* made = nullptr;
    Status status = internal::Call(gtrain_compressed_mean_create, communicator.handle(), &c, count,
                                   specs.data(), specs.size(), &made);
    if (!status.ok()) return status;
    return CompressedMean(made);
  }

  // data[count] becomes the mean: the same bits on all ranks.
  Status AllReduce(std::span<float> data) {
    return internal::Call(gtrain_compressed_mean_all_reduce, handle(), data.data(), data.size());
  }
  void Drop() { gtrain_compressed_mean_drop(handle(), nullptr); }
  // Bytes that this rank gave to collectives so far.
  uint64_t bytes_sent() const {
    uint64_t bytes = 0;
    gtrain_compressed_mean_bytes_sent(handle(), &bytes, nullptr);
    return bytes;
  }

  gtrain_compressed_mean* handle() const { return handle_.get(); }

 private:
  explicit CompressedMean(gtrain_compressed_mean* handle) : handle_(handle) {}
  std::unique_ptr<gtrain_compressed_mean,
                  internal::Freer<gtrain_compressed_mean, gtrain_compressed_mean_free>>
      handle_;
};

}  // namespace gtrain
