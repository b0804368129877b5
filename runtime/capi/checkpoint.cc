// Checkpoints of gtrain_c.h.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "runtime/capi/handles.h"
#include "runtime/capi/options.h"
#include "runtime/capi/samples.h"
#include "runtime/capi/sharding.h"
#include "sharding/local_box.h"

namespace gtrain::capi {

absl::StatusOr<CheckpointOptions> CheckpointOptionsFrom(const gtrain_checkpoint_options* in) {
  CheckpointOptions options;
  if (in == nullptr) return options;
  // Programs made before the later fields were there say the size without them.
  if (in->size < offsetof(gtrain_checkpoint_options, lazy)) {
    return absl::InvalidArgumentError("`size` of gtrain_checkpoint_options is not its sizeof");
  }
  if (in->keep < 0 || in->every_steps < 0 || in->commit_timeout_ms < 0 || !std::isfinite(in->every_seconds) ||
      in->every_seconds < 0) {
    return absl::InvalidArgumentError("a number in gtrain_checkpoint_options is negative");
  }
  if (in->uri != nullptr) options.uri = in->uri;
  if (in->keep > 0) options.keep = in->keep;
  if (in->every_steps > 0) options.every_steps = in->every_steps;
  if (in->every_seconds > 0) options.every = absl::Seconds(in->every_seconds);
  if (in->commit_timeout_ms > 0) options.commit_timeout = absl::Milliseconds(in->commit_timeout_ms);
  if (in->size >= offsetof(gtrain_checkpoint_options, verify_replicas)) options.lazy = in->lazy != 0;
  if (in->size < offsetof(gtrain_checkpoint_options, before_save)) return options;
  if (in->max_rollback < -1) return absl::InvalidArgumentError("max_rollback is less than -1");
  if (in->verify_replicas != nullptr) options.verify_replicas = in->verify_replicas;
  if (in->max_rollback != 0) options.max_rollback = std::max(in->max_rollback, 0);
  options.read_only = in->read_only != 0;
  options.takeover = in->takeover != 0;
  if (in->size < sizeof(gtrain_checkpoint_options) || in->before_save == nullptr) return options;
  options.before_save = [before = in->before_save, user = in->user] {
    const gtrain_status status = before(user);
    return absl::Status(static_cast<absl::StatusCode>(status), "the program's function before a save failed");
  };
  return options;
}

namespace {

absl::Status Open(gtrain_session* session, const gtrain_checkpoint_options* in, gtrain_checkpointer** out) {
  if (out == nullptr) return absl::InvalidArgumentError("`out` is NULL");
  *out = nullptr;
  GT_RETURN_IF_ERROR(CheckHandle(session));
  GT_ASSIGN_OR_RETURN(CheckpointOptions options, CheckpointOptionsFrom(in));
  auto handle = std::make_unique<gtrain_checkpointer>();
  handle->session = session->session;
  options.before_save = [handle = handle.get(), theirs = std::move(options.before_save)]() -> absl::Status {
    SaveSamples(handle);
    for (const auto& carried : handle->carried) {
      GT_RETURN_IF_ERROR(carried->reducer->reducer->ExportCarried(absl::MakeSpan(carried->block)));
    }
    return theirs ? theirs() : absl::OkStatus();
  };
  GT_ASSIGN_OR_RETURN(handle->checkpointer, Checkpointer::Open(session->session.get(), options));
  *out = handle.release();
  return absl::OkStatus();
}

// Checks the arguments of every function that registers.
absl::Status CheckEntry(gtrain_checkpointer* handle, const char* name) {
  GT_RETURN_IF_ERROR(CheckHandle(handle));
  return name == nullptr ? absl::InvalidArgumentError("the name is NULL") : absl::OkStatus();
}

absl::StatusOr<PerRankRule> RuleFrom(gtrain_per_rank_rule rule) {
  switch (rule) {
    case GTRAIN_PER_RANK_DROP:
      return PerRankRule::kDrop;
    case GTRAIN_PER_RANK_KEEP:
      return PerRankRule::kKeep;
    case GTRAIN_PER_RANK_MERGE:
      return PerRankRule::kMerge;
  }
  return absl::InvalidArgumentError(absl::StrCat("no such rule for state of ranks: ", rule));
}

absl::Status AddReplicated(gtrain_checkpointer* handle, const char* name, const Memory& memory,
                           const int64_t* shape, int dimensions, gtrain_dtype dtype) {
  GT_RETURN_IF_ERROR(CheckEntry(handle, name));
  GT_ASSIGN_OR_RETURN(std::vector<int64_t> global, ShapeFrom(shape, dimensions));
  GT_ASSIGN_OR_RETURN(const DType type, DTypeFrom(dtype));
  return handle->checkpointer->AddReplicated(name, memory, std::move(global), type);
}

absl::Status AddSharded(gtrain_checkpointer* handle, const char* name, const Memory& memory,
                        const int64_t* shape, int dimensions, const gtrain_sharding* sharding,
                        gtrain_dtype dtype) {
  GT_RETURN_IF_ERROR(CheckEntry(handle, name));
  GT_ASSIGN_OR_RETURN(std::vector<int64_t> global, ShapeFrom(shape, dimensions));
  GT_ASSIGN_OR_RETURN(const Sharding how, ShardingFrom(sharding));
  GT_ASSIGN_OR_RETURN(const DType type, DTypeFrom(dtype));
  return handle->checkpointer->AddSharded(name, memory, std::move(global), how, type);
}

absl::Status AddBox(gtrain_checkpointer* handle, const char* name, const Memory& memory, const int64_t* shape,
                    const int64_t* begin, const int64_t* local_shape, int dimensions, gtrain_dtype dtype) {
  GT_RETURN_IF_ERROR(CheckEntry(handle, name));
  GT_ASSIGN_OR_RETURN(std::vector<int64_t> global, ShapeFrom(shape, dimensions));
  GT_ASSIGN_OR_RETURN(std::vector<int64_t> at, ShapeFrom(begin, dimensions));
  GT_ASSIGN_OR_RETURN(std::vector<int64_t> local, ShapeFrom(local_shape, dimensions));
  GT_ASSIGN_OR_RETURN(const DType type, DTypeFrom(dtype));
  return handle->checkpointer->AddBox(name, memory, std::move(global), std::move(at), std::move(local), type);
}

absl::Status AddBytes(gtrain_checkpointer* handle, const char* name, gtrain_bytes_save save,
                      gtrain_bytes_load load, void* user, gtrain_per_rank_rule rule) {
  GT_RETURN_IF_ERROR(CheckEntry(handle, name));
  GT_ASSIGN_OR_RETURN(const PerRankRule what, RuleFrom(rule));
  if (save == nullptr || load == nullptr) return absl::InvalidArgumentError("`save` or `load` is NULL");
  const auto failed = [](gtrain_status status, absl::string_view which) {
    return absl::Status(static_cast<absl::StatusCode>(status),
                        absl::StrCat("the program's function that ", which, " these bytes failed"));
  };
  return handle->checkpointer->AddBytes(
      name,
      [=]() -> absl::StatusOr<std::string> {
        const void* data = nullptr;
        size_t bytes = 0;
        if (const gtrain_status status = save(user, &data, &bytes); status != GTRAIN_OK)
          return failed(status, "saves");
        if (data == nullptr && bytes > 0) return absl::InvalidArgumentError("no data, but bytes");
        // A larger one is refused anyway; it need not be copied for that.
        return std::string(static_cast<const char*>(data), std::min(bytes, kByteEntriesMax + 1));
      },
      [=](absl::string_view text) {
        const gtrain_status status = load(user, text.data(), text.size());
        return status == GTRAIN_OK ? absl::OkStatus() : failed(status, "loads");
      },
      what);
}

absl::Status AddReducer(gtrain_checkpointer* handle, gtrain_reducer* reducer) {
  GT_RETURN_IF_ERROR(CheckHandle(handle));
  GT_RETURN_IF_ERROR(CheckHandle(reducer));
  const std::string& name = reducer->parts->reducer->CarriedName();
  if (name.empty()) return absl::OkStatus();
  auto carried = std::make_unique<gtrain_checkpointer::Carried>();
  carried->reducer = reducer->parts;
  carried->block.resize(reducer->parts->reducer->CarriedCount());
  GT_RETURN_IF_ERROR(
      handle->checkpointer->AddPerRank(name, {carried->block.data(), carried->block.size() * sizeof(float)}));
  handle->carried.push_back(std::move(carried));
  return absl::OkStatus();
}

// Zeros, and so a new reducer, where the checkpoint is of another codec or number of ranks.
absl::Status LoadReducers(gtrain_checkpointer* handle) {
  for (const auto& carried : handle->carried) {
    GT_RETURN_IF_ERROR(carried->reducer->reducer->LoadCarried(carried->block));
  }
  return absl::OkStatus();
}

absl::StatusOr<RestoreOptions> RestoreOptionsFrom(const gtrain_restore_options* in) {
  RestoreOptions options;
  if (in == nullptr) return options;
  if (in->size < sizeof(gtrain_restore_options)) {
    return absl::InvalidArgumentError("`size` of gtrain_restore_options is not its sizeof");
  }
  if (in->may_be_missing_count < 0 || (in->may_be_missing_count > 0 && in->may_be_missing == nullptr)) {
    return absl::InvalidArgumentError("`may_be_missing` is not as long as it says");
  }
  for (int i = 0; i < in->may_be_missing_count; ++i) {
    if (in->may_be_missing[i] == nullptr) return absl::InvalidArgumentError("`may_be_missing` holds a NULL");
    options.may_be_missing.push_back(in->may_be_missing[i]);
  }
  return options;
}

absl::Status StoreSaved(absl::StatusOr<bool> result, int* saved) {
  if (saved != nullptr) *saved = result.ok() && *result ? 1 : 0;
  return result.status();
}

}  // namespace
}  // namespace gtrain::capi

using gtrain::capi::Call;
using gtrain::capi::CheckHandle;
using gtrain::capi::StoreSaved;

extern "C" {

gtrain_status gtrain_checkpointer_open(gtrain_session* session, const gtrain_checkpoint_options* options,
                                       gtrain_checkpointer** out, gtrain_error* error) {
  return Call(error, [&] { return gtrain::capi::Open(session, options, out); });
}

void gtrain_checkpointer_free(gtrain_checkpointer* checkpointer) { gtrain::capi::FreeHandle(checkpointer); }

gtrain_status gtrain_checkpointer_add_replicated(gtrain_checkpointer* checkpointer, const char* name,
                                                 void* data, size_t bytes, const int64_t* shape,
                                                 int dimensions, gtrain_dtype dtype, gtrain_error* error) {
  return Call(error, [&] {
    return gtrain::capi::AddReplicated(checkpointer, name, {data, bytes}, shape, dimensions, dtype);
  });
}

// NOLINTNEXTLINE(readability-function-size)
gtrain_status gtrain_checkpointer_add_sharded(gtrain_checkpointer* checkpointer, const char* name, void* data,
                                              size_t bytes, const int64_t* shape, int dimensions,
                                              const gtrain_sharding* sharding, gtrain_dtype dtype,
                                              gtrain_error* error) {
  return Call(error, [&] {
    return gtrain::capi::AddSharded(checkpointer, name, {data, bytes}, shape, dimensions, sharding, dtype);
  });
}

// NOLINTNEXTLINE(readability-function-size)
gtrain_status gtrain_checkpointer_add_box(gtrain_checkpointer* checkpointer, const char* name, void* data,
                                          size_t bytes, const int64_t* shape, const int64_t* begin,
                                          const int64_t* local_shape, int dimensions, gtrain_dtype dtype,
                                          gtrain_error* error) {
  return Call(error, [&] {
    return gtrain::capi::AddBox(checkpointer, name, {data, bytes}, shape, begin, local_shape, dimensions,
                                dtype);
  });
}

gtrain_status gtrain_checkpointer_add_bytes(gtrain_checkpointer* checkpointer, const char* name,
                                            gtrain_bytes_save save, gtrain_bytes_load load, void* user,
                                            gtrain_per_rank_rule rule, gtrain_error* error) {
  return Call(error, [&] { return gtrain::capi::AddBytes(checkpointer, name, save, load, user, rule); });
}

gtrain_status gtrain_local_box(const int64_t* shape, int dimensions, const gtrain_sharding* sharding,
                               int rank, int64_t* begin, int64_t* local_shape, int* holds,
                               gtrain_error* error) {
  return Call(error, [&] {
    return gtrain::capi::LocalBoxTo(shape, dimensions, sharding, begin, local_shape, holds,
                                    [&](const std::vector<int64_t>& global, const gtrain::Sharding& how) {
                                      return gtrain::LocalBoxOf(global, how, rank);
                                    });
  });
}

gtrain_status gtrain_checkpointer_restored_bytes(gtrain_checkpointer* checkpointer, uint64_t* bytes,
                                                 uint64_t* bytes_read, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(checkpointer));
    if (bytes == nullptr || bytes_read == nullptr)
      return absl::InvalidArgumentError("`bytes` or `bytes_read` is NULL");
    *bytes = checkpointer->restored.bytes;
    *bytes_read = checkpointer->restored.bytes_read;
    return absl::OkStatus();
  });
}

gtrain_status gtrain_checkpointer_add_per_rank(gtrain_checkpointer* checkpointer, const char* name,
                                               void* data, size_t bytes, gtrain_per_rank_rule rule,
                                               gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(gtrain::capi::CheckEntry(checkpointer, name));
    GT_ASSIGN_OR_RETURN(const gtrain::PerRankRule what, gtrain::capi::RuleFrom(rule));
    return checkpointer->checkpointer->AddPerRank(name, {data, bytes}, what);
  });
}

gtrain_status gtrain_checkpointer_restore(gtrain_checkpointer* checkpointer,
                                          const gtrain_restore_options* options, int64_t* step,
                                          gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(checkpointer));
    if (step == nullptr) return absl::InvalidArgumentError("`step` is NULL");
    *step = -1;
    GT_ASSIGN_OR_RETURN(const gtrain::RestoreOptions how, gtrain::capi::RestoreOptionsFrom(options));
    GT_ASSIGN_OR_RETURN(const std::optional<gtrain::RestoredStep> restored,
                        checkpointer->checkpointer->Restore(how));
    checkpointer->restored = restored.value_or(gtrain::RestoredStep());
    if (!restored.has_value()) return absl::OkStatus();
    GT_RETURN_IF_ERROR(gtrain::capi::LoadReducers(checkpointer));
    GT_RETURN_IF_ERROR(gtrain::capi::LoadSamples(checkpointer));
    *step = restored->step;
    return absl::OkStatus();
  });
}

gtrain_status gtrain_checkpointer_save(gtrain_checkpointer* checkpointer, int64_t step, int* saved,
                                       gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(checkpointer));
    return StoreSaved(checkpointer->checkpointer->Save(step), saved);
  });
}

gtrain_status gtrain_checkpointer_save_if_due(gtrain_checkpointer* checkpointer, int64_t step,
                                              gtrain_communicator* comm, int* saved, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(checkpointer));
    if (comm == nullptr) return StoreSaved(checkpointer->checkpointer->SaveIfDue(step, nullptr), saved);
    GT_RETURN_IF_ERROR(CheckHandle(comm));
    return comm->queue->Now(
        [&] { return StoreSaved(checkpointer->checkpointer->SaveIfDue(step, comm->comm.get()), saved); });
  });
}

gtrain_status gtrain_checkpointer_stop_agreed(gtrain_checkpointer* checkpointer, int* out,
                                              gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(checkpointer));
    if (out == nullptr) return absl::InvalidArgumentError("`out` is NULL");
    *out = checkpointer->checkpointer->stop_agreed() ? 1 : 0;
    return absl::OkStatus();
  });
}

gtrain_status gtrain_checkpointer_add_reducer(gtrain_checkpointer* checkpointer, gtrain_reducer* reducer,
                                              gtrain_error* error) {
  return Call(error, [&] { return gtrain::capi::AddReducer(checkpointer, reducer); });
}

gtrain_status gtrain_checkpointer_fence(gtrain_checkpointer* checkpointer, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(checkpointer));
    checkpointer->checkpointer->Fence();
    return absl::OkStatus();
  });
}

gtrain_status gtrain_checkpointer_wait(gtrain_checkpointer* checkpointer, int64_t timeout_ms,
                                       gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(checkpointer));
    GT_ASSIGN_OR_RETURN(const absl::Duration timeout, gtrain::capi::TimeoutFrom(timeout_ms));
    return checkpointer->checkpointer->Wait(timeout);
  });
}

gtrain_status gtrain_checkpointer_last_committed(gtrain_checkpointer* checkpointer, int64_t* step,
                                                 gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(checkpointer));
    if (step == nullptr) return absl::InvalidArgumentError("`step` is NULL");
    *step = checkpointer->checkpointer->LastCommitted().value_or(-1);
    return absl::OkStatus();
  });
}

}  // extern "C"
