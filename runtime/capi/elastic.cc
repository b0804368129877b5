// The elastic run of elastic_c.h.
#include <cmath>
#include <cstddef>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "elastic/exec/elastic_run.h"
#include "gtrain/elastic_c.h"
#include "runtime/capi/handles.h"
#include "runtime/capi/options.h"
#include "runtime/capi/samples.h"

struct gtrain_elastic {
  pid_t owner = getpid();
  std::unique_ptr<gtrain::elastic::ElasticRun> run;
  gtrain::elastic::StepPlace step;  // whose samples the caller may read
};

namespace gtrain::capi {
namespace {

absl::Status Open(gtrain_session* session, const gtrain_samples_options* in, gtrain_elastic** out) {
  if (out == nullptr) return absl::InvalidArgumentError("`out` is NULL");
  *out = nullptr;
  GT_RETURN_IF_ERROR(CheckHandle(session));
  if (in == nullptr) return absl::InvalidArgumentError("`samples` is NULL");
  if (in->shares != 0)
    return absl::InvalidArgumentError("`shares` is not 0: an elastic run shares each batch among its ranks");
  gtrain_samples::Parts parts;
  GT_RETURN_IF_ERROR(ReadSampleOptions(*session, *in, &parts));
  elastic::ElasticOptions options;
  options.name = parts.name;
  options.samples = parts.options;
  options.checkpoints = session->session->has_checkpoints();
  auto handle = std::make_unique<gtrain_elastic>();
  handle->run = std::make_unique<elastic::ElasticRun>(session->session, std::move(options));
  *out = handle.release();
  return absl::OkStatus();
}

absl::StatusOr<size_t> CountOf(const char* what, const int64_t* shape, int dimensions) {
  constexpr int kDimensionsMax = 64;
  constexpr int64_t kElementsMax = int64_t{1} << 40;
  if (dimensions < 1 || dimensions > kDimensionsMax || shape == nullptr)
    return absl::InvalidArgumentError(absl::StrCat(what, " has 1 to ", kDimensionsMax, " dimensions"));
  int64_t count = 1;
  for (int i = 0; i < dimensions; ++i) {
    if (shape[i] < 0 || (shape[i] > 0 && count > kElementsMax / shape[i]))
      return absl::InvalidArgumentError(absl::StrCat("dimension ", i, " of ", what, " is ", shape[i]));
    count *= shape[i];
  }
  return static_cast<size_t>(count);
}

absl::Status AddState(gtrain_elastic* run, const char* name, void* data, const int64_t* shape, int dimensions,
                      gtrain_dtype dtype) {
  GT_ASSIGN_OR_RETURN(const size_t elements, CountOf("a state", shape, dimensions));
  GT_ASSIGN_OR_RETURN(const DType type, DTypeFrom(dtype));
  GT_RETURN_IF_ERROR(CheckBuffer(data, elements, type));
  return run->run->AddState(name == nullptr ? "" : name, data, elements, type, {shape, shape + dimensions});
}

absl::Status AddGradient(gtrain_elastic* run, float* data, const int64_t* shape, int dimensions) {
  GT_ASSIGN_OR_RETURN(const size_t elements, CountOf("a gradient", shape, dimensions));
  GT_RETURN_IF_ERROR(CheckBuffer(data, elements, DType::kFloat32));
  return run->run->AddGradient(data, elements, {shape, shape + dimensions});
}

absl::Status Begin(gtrain_elastic* run, gtrain_elastic_step* out) {
  // Programs made before `steps` was there say the size without it.
  if (out == nullptr || out->size < offsetof(gtrain_elastic_step, steps))
    return absl::InvalidArgumentError(
        "`out` is NULL, or its `size` is not the sizeof of gtrain_elastic_step");
  GT_ASSIGN_OR_RETURN(run->step, run->run->Begin());
  const elastic::StepPlace& step = run->step;
  out->done = step.done ? 1 : 0;
  out->stopped = step.stopped ? 1 : 0;
  out->step = step.step;
  out->epoch = step.epoch;
  out->batch = step.batch;
  out->samples = step.samples.data();
  out->sample_count = static_cast<int64_t>(step.samples.size());
  if (out->size >= sizeof(gtrain_elastic_step)) out->steps = step.steps;
  return absl::OkStatus();
}

absl::Status Reduced(const gtrain_elastic* run, gtrain_reduced_step* out, double* loss) {
  if (loss != nullptr) *loss = run->run->loss().value_or(NAN);
  return out == nullptr ? absl::OkStatus() : WriteReducedStep(run->run->reduced(), out);
}

absl::Status Sum(gtrain_elastic* run, double* values, size_t count, int* all) {
  if (all == nullptr) return absl::InvalidArgumentError("`all` is NULL");
  *all = 0;
  GT_RETURN_IF_ERROR(CheckBuffer(values, count, DType::kFloat64));
  GT_ASSIGN_OR_RETURN(const bool summed, run->run->Sum(absl::MakeSpan(values, count)));
  *all = summed ? 1 : 0;
  return absl::OkStatus();
}

absl::Status Residual(gtrain_elastic* run, double* norm, int64_t* lost) {
  GT_ASSIGN_OR_RETURN(const elastic::ElasticRun::Residual residual, run->run->residual());
  if (norm != nullptr) *norm = residual.norm;
  if (lost != nullptr) *lost = residual.lost;
  return absl::OkStatus();
}

}  // namespace
}  // namespace gtrain::capi

using gtrain::capi::Call;
using gtrain::capi::CheckHandle;

extern "C" {

gtrain_status gtrain_elastic_open(gtrain_session* session, const gtrain_samples_options* samples,
                                  gtrain_elastic** out, gtrain_error* error) {
  return Call(error, [&] { return gtrain::capi::Open(session, samples, out); });
}

void gtrain_elastic_free(gtrain_elastic* run) { gtrain::capi::FreeHandle(run); }

gtrain_status gtrain_elastic_add_state(gtrain_elastic* run, const char* name, void* data, size_t count,
                                       gtrain_dtype dtype, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(run));
    const auto length = static_cast<int64_t>(count);
    return gtrain::capi::AddState(run, name, data, &length, 1, dtype);
  });
}

gtrain_status gtrain_elastic_add_state_of_shape(gtrain_elastic* run, const char* name, void* data,
                                                const int64_t* shape, int dimensions, gtrain_dtype dtype,
                                                gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(run));
    return gtrain::capi::AddState(run, name, data, shape, dimensions, dtype);
  });
}

gtrain_status gtrain_elastic_add_gradient(gtrain_elastic* run, float* data, size_t count,
                                          gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(run));
    GT_RETURN_IF_ERROR(gtrain::capi::CheckBuffer(data, count, gtrain::DType::kFloat32));
    return run->run->AddGradient(data, count);
  });
}

gtrain_status gtrain_elastic_add_gradient_of_shape(gtrain_elastic* run, float* data, const int64_t* shape,
                                                   int dimensions, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(run));
    return gtrain::capi::AddGradient(run, data, shape, dimensions);
  });
}

gtrain_status gtrain_elastic_set_checkpoints(gtrain_elastic* run, const gtrain_checkpoint_options* options,
                                             gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(run));
    GT_ASSIGN_OR_RETURN(gtrain::CheckpointOptions read, gtrain::capi::CheckpointOptionsFrom(options));
    return run->run->SetCheckpoints(std::move(read));
  });
}

gtrain_status gtrain_elastic_set_reducer(gtrain_elastic* run, const gtrain_reducer_options* options,
                                         gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(run));
    GT_ASSIGN_OR_RETURN(gtrain::ReducerOptions read, gtrain::capi::ReducerOptionsFrom(options));
    return run->run->SetReducer(std::move(read));
  });
}

void gtrain_elastic_ready(gtrain_elastic* run, size_t index) {
  (void)Call(nullptr, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(run));
    run->run->Ready(index);
    return absl::OkStatus();
  });
}

gtrain_status gtrain_elastic_begin(gtrain_elastic* run, gtrain_elastic_step* out, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(run));
    return gtrain::capi::Begin(run, out);
  });
}

gtrain_status gtrain_elastic_reduce(gtrain_elastic* run, double loss, int* apply, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(run));
    if (apply == nullptr) return absl::InvalidArgumentError("`apply` is NULL");
    *apply = 0;
    GT_ASSIGN_OR_RETURN(const bool all_hold, run->run->Reduce(loss));
    *apply = all_hold ? 1 : 0;
    return absl::OkStatus();
  });
}

gtrain_status gtrain_elastic_applied(gtrain_elastic* run, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(run));
    return run->run->Applied();
  });
}

gtrain_status gtrain_elastic_reduced(gtrain_elastic* run, gtrain_reduced_step* out, double* loss,
                                     gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(run));
    return gtrain::capi::Reduced(run, out, loss);
  });
}

gtrain_status gtrain_elastic_stop(gtrain_elastic* run, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(run));
    run->run->Stop();
    return absl::OkStatus();
  });
}

gtrain_status gtrain_elastic_sum(gtrain_elastic* run, double* values, size_t count, int* all,
                                 gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(run));
    return gtrain::capi::Sum(run, values, count, all);
  });
}

gtrain_status gtrain_elastic_residual(gtrain_elastic* run, double* norm, int64_t* lost, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(run));
    return gtrain::capi::Residual(run, norm, lost);
  });
}

}  // extern "C"
