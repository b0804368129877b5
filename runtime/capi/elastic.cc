// The elastic run of elastic_c.h.
#include <cmath>
#include <cstddef>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "elastic/exec/elastic_run.h"
#include "elastic/exec/machine.h"
#include "gtrain/elastic_c.h"
#include "runtime/capi/handles.h"
#include "runtime/capi/options.h"
#include "runtime/capi/samples.h"
#include "runtime/capi/sharding.h"
#include "runtime/capi/state_memory.h"

struct gtrain_elastic {
  pid_t owner = getpid();
  std::shared_ptr<gtrain::Session> session;
  std::unique_ptr<gtrain::elastic::ElasticRun> run;
  gtrain::elastic::StepPlace step;  // whose samples the caller may read
  gtrain::elastic::StepPart part;   // likewise
  int64_t batch_to_compare = 0;     // with that of the job file, once this process has a place; 0: it was
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
  options.step_copies = session->session->step_copies();
  const Determinism determinism = session->session->determinism();
  options.virtual_ranks = determinism.virtual_ranks;
  if (options.virtual_ranks > 0) {
    GT_ASSIGN_OR_RETURN(options.machine, elastic::DescribeMachine(determinism.threads));
  }
  auto handle = std::make_unique<gtrain_elastic>();
  handle->session = session->session;
  handle->batch_to_compare = parts.options.global_batch;
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
  NameState(data, name);
  return run->run->AddState(name == nullptr ? "" : name, data, elements, type, {shape, shape + dimensions});
}

absl::Status AddGradient(gtrain_elastic* run, float* data, const int64_t* shape, int dimensions) {
  GT_ASSIGN_OR_RETURN(const size_t elements, CountOf("a gradient", shape, dimensions));
  GT_RETURN_IF_ERROR(CheckBuffer(data, elements, DType::kFloat32));
  return run->run->AddGradient(data, elements, {shape, shape + dimensions});
}

absl::Status AddSharded(gtrain_elastic* run, const char* name, void* data, size_t count, gtrain_dtype dtype,
                        const int64_t* shape, int dimensions, const gtrain_sharding* cut) {
  GT_ASSIGN_OR_RETURN(const DType type, DTypeFrom(dtype));
  GT_RETURN_IF_ERROR(CheckBuffer(data, count, type));
  NameState(data, name);
  GT_ASSIGN_OR_RETURN(std::vector<int64_t> global, ShapeFrom(shape, dimensions));
  GT_ASSIGN_OR_RETURN(Sharding how, ShardingFrom(cut));
  return run->run->AddSharded(name == nullptr ? "" : name, data, count, std::move(global), std::move(how),
                              type);
}

absl::Status Along(gtrain_elastic* run, const char* axis, gtrain_communicator** out) {
  if (out == nullptr) return absl::InvalidArgumentError("`out` is NULL");
  *out = nullptr;
  GT_ASSIGN_OR_RETURN(std::shared_ptr<Communicator> comm, run->run->Along(axis == nullptr ? "" : axis));
  const absl::Duration timeout = comm->timeout();
  *out = HandleOf(std::move(comm), run->session, timeout);
  return absl::OkStatus();
}

absl::Status Begin(gtrain_elastic* run, gtrain_elastic_step* out) {
  // Programs made before `steps` was there say the size without it.
  if (out == nullptr || out->size < offsetof(gtrain_elastic_step, steps))
    return absl::InvalidArgumentError(
        "`out` is NULL, or its `size` is not the sizeof of gtrain_elastic_step");
  GT_ASSIGN_OR_RETURN(run->step, run->run->Begin());
  if (const int64_t batch = std::exchange(run->batch_to_compare, 0); batch > 0)
    WarnOfOtherBatch(*run->session, batch);
  const elastic::StepPlace& step = run->step;
  out->done = step.done ? 1 : 0;
  out->stopped = step.stopped ? 1 : 0;
  out->step = step.step;
  out->epoch = step.epoch;
  out->batch = step.batch;
  out->samples = step.samples.data();
  out->sample_count = static_cast<int64_t>(step.samples.size());
  if (out->size < sizeof(gtrain_elastic_step)) return absl::OkStatus();
  out->steps = step.steps;
  out->share = step.share;
  out->shares = step.shares;
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

absl::Status NextPart(gtrain_elastic* run, double loss, gtrain_elastic_part* out) {
  if (out == nullptr || out->size < sizeof(gtrain_elastic_part))
    return absl::InvalidArgumentError(
        "`out` is NULL, or its `size` is not the sizeof of gtrain_elastic_part");
  GT_ASSIGN_OR_RETURN(run->part, run->run->NextPart(loss));
  const elastic::StepPart& part = run->part;
  *out = {out->size, part.done ? 1 : 0,   part.virtual_rank,
          part.seed, part.samples.data(), static_cast<int64_t>(part.samples.size())};
  return absl::OkStatus();
}

}  // namespace
}  // namespace gtrain::capi

using gtrain::capi::Call;
using gtrain::capi::CheckHandle;
using gtrain::elastic::ElasticRun;

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

gtrain_status gtrain_elastic_local_part(gtrain_session* session, const int64_t* shape, int dimensions,
                                        const gtrain_sharding* cut, int64_t* begin, int64_t* local_shape,
                                        int* holds, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(session));
    return gtrain::capi::LocalBoxTo(shape, dimensions, cut, begin, local_shape, holds,
                                    [&](const std::vector<int64_t>& global, const gtrain::Sharding& how) {
                                      return ElasticRun::LocalPart(*session->session, global, how);
                                    });
  });
}

// NOLINTNEXTLINE(readability-function-size)
gtrain_status gtrain_elastic_add_sharded(gtrain_elastic* run, const char* name, void* data, size_t count,
                                         gtrain_dtype dtype, const int64_t* shape, int dimensions,
                                         const gtrain_sharding* cut, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(run));
    return gtrain::capi::AddSharded(run, name, data, count, dtype, shape, dimensions, cut);
  });
}

gtrain_status gtrain_elastic_along(gtrain_elastic* run, const char* axis, gtrain_communicator** out,
                                   gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(run));
    return gtrain::capi::Along(run, axis, out);
  });
}

gtrain_status gtrain_elastic_await_loss(gtrain_elastic* run, int* lost, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(run));
    if (lost == nullptr) return absl::InvalidArgumentError("`lost` is NULL");
    *lost = run->run->AwaitLoss() ? 1 : 0;
    return absl::OkStatus();
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
    return run->run->SetReducer(read);
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

gtrain_status gtrain_elastic_next_part(gtrain_elastic* run, double loss, gtrain_elastic_part* out,
                                       gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(run));
    return gtrain::capi::NextPart(run, loss, out);
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
