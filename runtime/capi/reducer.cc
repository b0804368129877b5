// Reducers and compressed means of gtrain_c.h.
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "comm/codec/compressor.h"
#include "runtime/capi/handles.h"
#include "runtime/capi/options.h"

namespace gtrain::capi {
namespace {

constexpr int kDimensionsMax = 32;

// Equal numbers (gtrain/reducer.h). A codec that is not in gtrain_c.h does not compile here.
gtrain_codec NumberOf(Codec codec) {
  switch (codec) {
#define GT_CODEC(kCodec, C_CODEC)                              \
  case Codec::kCodec:                                          \
    static_assert(static_cast<int>(Codec::kCodec) == C_CODEC); \
    return C_CODEC;
    GT_CODEC(kNone, GTRAIN_CODEC_NONE)
    GT_CODEC(kFloat16, GTRAIN_CODEC_FLOAT16)
    GT_CODEC(kBFloat16, GTRAIN_CODEC_BFLOAT16)
    GT_CODEC(kInt8, GTRAIN_CODEC_INT8)
    GT_CODEC(kFloat8, GTRAIN_CODEC_FLOAT8)
    GT_CODEC(kTopK, GTRAIN_CODEC_TOP_K)
    GT_CODEC(kOneBit, GTRAIN_CODEC_ONE_BIT)
    GT_CODEC(kPowerSgd, GTRAIN_CODEC_POWER_SGD)
#undef GT_CODEC
  }
  return GTRAIN_CODEC_NONE;
}

absl::StatusOr<CompressionOptions> CompressionFrom(const gtrain_compression* in) {
  if (in == nullptr) return CompressionOptions();
  if (in->size < sizeof(gtrain_compression))
    return absl::InvalidArgumentError("`size` of gtrain_compression is not its sizeof");
  if (!IsCodec(in->codec)) return absl::InvalidArgumentError(absl::StrCat("no such codec: ", in->codec));
  return CompressionOptions{
      .codec = static_cast<Codec>(in->codec),
      .error_feedback = in->error_feedback != 0,
      .residual = in->residual_bfloat16 != 0 ? ResidualType::kBFloat16 : ResidualType::kFloat32,
      .rounding_seed = in->rounding_seed,
      .density = in->density,
      .exact = in->exact != 0,
      .momentum = in->momentum,
      .matrix_rank = in->matrix_rank,
      .optimizer_momentum = in->optimizer_momentum,
      .warmup_steps = in->warmup_steps,
  };
}

absl::Status Parse(const char* words, gtrain_compression* out) {
  if (words == nullptr || out == nullptr) return absl::InvalidArgumentError("`words` or `out` is NULL");
  if (out->size < sizeof(gtrain_compression))
    return absl::InvalidArgumentError("`size` of gtrain_compression is not its sizeof");
  GT_ASSIGN_OR_RETURN(const CompressionPolicy policy, ParseCompression(words));
  if (policy.automatic)
    return absl::InvalidArgumentError("compression: \"auto\" is for the job file's comm.compression");
  const CompressionOptions options = policy.codecs.empty() ? CompressionOptions() : policy.codecs[0];
  *out = {
      .size = out->size,
      .codec = NumberOf(options.codec),
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
  return absl::OkStatus();
}

absl::StatusOr<std::vector<GradientSpec>> GradientsFrom(const gtrain_gradient* in, size_t count) {
  if (in == nullptr && count > 0) return absl::InvalidArgumentError("the gradients are NULL but not none");
  std::vector<GradientSpec> out;
  for (size_t i = 0; i < count; ++i) {
    if (in[i].name == nullptr) return absl::InvalidArgumentError("a gradient has no name");
    if (in[i].dimensions < 0 || in[i].dimensions > kDimensionsMax ||
        (in[i].dimensions > 0 && in[i].shape == nullptr)) {
      return absl::InvalidArgumentError(
          absl::StrCat("gradient ", in[i].name, ": it has 0 to ", kDimensionsMax, " dimensions"));
    }
    out.push_back({in[i].name, in[i].count, {in[i].shape, in[i].shape + in[i].dimensions}});
  }
  return out;
}

}  // namespace

absl::StatusOr<ReducerOptions> ReducerOptionsFrom(const gtrain_reducer_options* in) {
  ReducerOptions options;
  if (in == nullptr) return options;
  if (in->size < sizeof(gtrain_reducer_options))
    return absl::InvalidArgumentError("`size` of gtrain_reducer_options is not its sizeof");
  if (in->bucket_bytes > 0) options.bucket_bytes = in->bucket_bytes;
  if (in->compress_from > 0) options.compress_from = in->compress_from;
  GT_ASSIGN_OR_RETURN(options.compression, CompressionFrom(in->compression));
  return options;
}

absl::Status WriteReducedStep(const ReducedStep& step, gtrain_reduced_step* out) {
  if (out->size < sizeof(gtrain_reduced_step))
    return absl::InvalidArgumentError("`size` of gtrain_reduced_step is not its sizeof");
  *out = {
      .size = out->size,
      .bytes_sent = step.bytes_sent,
      .selected = step.selected.sent,
      .wanted = step.selected.wanted,
      .clipped = step.clipped,
      .early = step.early,
      .momentum_travelled = step.momentum_travelled,
      .unused = step.unused.data(),
      .unused_count = step.unused.size(),
  };
  return absl::OkStatus();
}

namespace {

absl::Status CreateReducer(gtrain_communicator* comm, const gtrain_gradient* gradients, size_t count,
                           const gtrain_reducer_options* in, gtrain_reducer** out) {
  if (out == nullptr) return absl::InvalidArgumentError("`out` is NULL");
  *out = nullptr;
  GT_RETURN_IF_ERROR(CheckHandle(comm));
  GT_ASSIGN_OR_RETURN(const std::vector<GradientSpec> specs, GradientsFrom(gradients, count));
  GT_ASSIGN_OR_RETURN(const ReducerOptions options, ReducerOptionsFrom(in));
  auto handle = std::make_unique<gtrain_reducer>();
  handle->parts = std::make_shared<gtrain_reducer::Parts>();
  handle->parts->session = comm->session;
  handle->parts->comm = comm->comm;
  handle->parts->gradients = count;
  GT_RETURN_IF_ERROR(comm->queue->Now([&]() -> absl::Status {
    GT_ASSIGN_OR_RETURN(handle->parts->reducer, Reducer::Create(comm->comm.get(), specs, options));
    return absl::OkStatus();
  }));
  *out = handle.release();
  return absl::OkStatus();
}

absl::Status Gradient(gtrain_reducer* reducer, size_t index, float** data, size_t* count) {
  GT_RETURN_IF_ERROR(CheckHandle(reducer));
  if (data == nullptr || count == nullptr) return absl::InvalidArgumentError("`data` or `count` is NULL");
  if (index >= reducer->parts->gradients)
    return absl::InvalidArgumentError(
        absl::StrCat("no gradient ", index, ": there are ", reducer->parts->gradients));
  const absl::Span<float> memory = reducer->parts->reducer->gradient(index);
  *data = memory.data();
  *count = memory.size();
  return absl::OkStatus();
}

absl::Status Finish(gtrain_reducer* reducer, gtrain_reduced_step* out) {
  GT_RETURN_IF_ERROR(CheckHandle(reducer));
  if (out != nullptr && out->size < sizeof(gtrain_reduced_step))
    return absl::InvalidArgumentError("`size` of gtrain_reduced_step is not its sizeof");
  GT_ASSIGN_OR_RETURN(ReducedStep step, reducer->parts->reducer->Finish());
  reducer->last = std::move(step);
  return out == nullptr ? absl::OkStatus() : WriteReducedStep(reducer->last, out);
}

// Works on a communicator of its own, so that the one it is made from stays free for other calls.
absl::Status CreateMean(gtrain_communicator* comm, const gtrain_compression* compression, size_t count,
                        const gtrain_gradient* tensors, size_t tensor_count, gtrain_compressed_mean** out) {
  if (out == nullptr) return absl::InvalidArgumentError("`out` is NULL");
  *out = nullptr;
  GT_RETURN_IF_ERROR(CheckHandle(comm));
  GT_ASSIGN_OR_RETURN(const CompressionOptions options, CompressionFrom(compression));
  GT_ASSIGN_OR_RETURN(const std::vector<GradientSpec> specs, GradientsFrom(tensors, tensor_count));
  std::vector<std::vector<int64_t>> shapes;
  for (const GradientSpec& spec : specs) shapes.push_back(spec.shape);
  auto handle = std::make_unique<gtrain_compressed_mean>();
  handle->session = comm->session;
  GT_RETURN_IF_ERROR(comm->queue->Now([&]() -> absl::Status {
    GT_ASSIGN_OR_RETURN(handle->comm, comm->comm->Split(0, comm->rank));
    return absl::OkStatus();
  }));
  GT_ASSIGN_OR_RETURN(handle->mean, CompressedCollective::Create(handle->comm.get(), options, count, shapes));
  *out = handle.release();
  return absl::OkStatus();
}

}  // namespace
}  // namespace gtrain::capi

using gtrain::capi::Call;
using gtrain::capi::CheckHandle;

extern "C" {

gtrain_status gtrain_compression_parse(const char* words, gtrain_compression* out, gtrain_error* error) {
  return Call(error, [&] { return gtrain::capi::Parse(words, out); });
}

gtrain_status gtrain_reducer_create(gtrain_communicator* comm, const gtrain_gradient* gradients, size_t count,
                                    const gtrain_reducer_options* options, gtrain_reducer** out,
                                    gtrain_error* error) {
  return Call(error, [&] { return gtrain::capi::CreateReducer(comm, gradients, count, options, out); });
}

void gtrain_reducer_free(gtrain_reducer* reducer) { gtrain::capi::FreeHandle(reducer); }

gtrain_status gtrain_reducer_gradient(gtrain_reducer* reducer, size_t index, float** data, size_t* count,
                                      gtrain_error* error) {
  return Call(error, [&] { return gtrain::capi::Gradient(reducer, index, data, count); });
}

gtrain_status gtrain_reducer_ready(gtrain_reducer* reducer, size_t index, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(reducer));
    return reducer->parts->reducer->Ready(index);
  });
}

gtrain_status gtrain_reducer_finish(gtrain_reducer* reducer, gtrain_reduced_step* out, gtrain_error* error) {
  return Call(error, [&] { return gtrain::capi::Finish(reducer, out); });
}

gtrain_status gtrain_reducer_abort(gtrain_reducer* reducer, const char* why, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(reducer));
    reducer->parts->reducer->Abort(absl::AbortedError(why == nullptr ? "no reason was given" : why));
    return absl::OkStatus();
  });
}

gtrain_status gtrain_reducer_drop(gtrain_reducer* reducer, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(reducer));
    reducer->parts->reducer->Drop();
    return absl::OkStatus();
  });
}

gtrain_status gtrain_compressed_mean_create(gtrain_communicator* comm, const gtrain_compression* compression,
                                            size_t count, const gtrain_gradient* shapes, size_t shape_count,
                                            gtrain_compressed_mean** out, gtrain_error* error) {
  return Call(error,
              [&] { return gtrain::capi::CreateMean(comm, compression, count, shapes, shape_count, out); });
}

void gtrain_compressed_mean_free(gtrain_compressed_mean* mean) { gtrain::capi::FreeHandle(mean); }

gtrain_status gtrain_compressed_mean_all_reduce(gtrain_compressed_mean* mean, float* data, size_t count,
                                                gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(mean));
    GT_RETURN_IF_ERROR(gtrain::capi::CheckBuffer(data, count, gtrain::DType::kFloat32));
    return mean->mean->AllReduceMean(absl::MakeSpan(data, count));
  });
}

gtrain_status gtrain_compressed_mean_drop(gtrain_compressed_mean* mean, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(mean));
    mean->mean->Drop();
    return absl::OkStatus();
  });
}

gtrain_status gtrain_compressed_mean_bytes_sent(gtrain_compressed_mean* mean, uint64_t* bytes,
                                                gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(mean));
    if (bytes == nullptr) return absl::InvalidArgumentError("`bytes` is NULL");
    *bytes = mean->mean->bytes_sent();
    return absl::OkStatus();
  });
}

}  // extern "C"
