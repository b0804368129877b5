// Library functions and sessions of gtrain_c.h.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <limits>
#include <utility>

#include "base/logging.h"
#include "base/status_macros.h"
#include "gtrain/elastic_c.h"
#include "runtime/capi/handles.h"

namespace gtrain::capi {
namespace {

// The process that joined. A child forked from it must not join as the same rank.
std::atomic<pid_t> joined_by{0};

bool InForkedChild() {
  const pid_t joined = joined_by.load();
  return joined != 0 && joined != getpid();
}

std::atomic<bool> log_is_ours{false};

// No log lines are written until the program asks for them: a library does not write to its host's stderr.
void SilenceLogOnce() {
  if (!log_is_ours.exchange(true)) SetLogSink([](LogLevel, absl::string_view) {});
}

gtrain_session::Place PlaceOf(const Session& session) {
  return {session.rank(), session.local_rank(), session.world_size(), session.generation(),
          session.timeline()};
}

absl::Status Join(int64_t timeout_ms, const SessionOptions& how, gtrain_session** out) {
  if (out == nullptr) return absl::InvalidArgumentError("`out` is NULL");
  *out = nullptr;
  if (InForkedChild()) return ForkedError();
  SilenceLogOnce();
  SessionOptions options = how;
  GT_ASSIGN_OR_RETURN(options.join_timeout, TimeoutFrom(timeout_ms));
  GT_ASSIGN_OR_RETURN(std::unique_ptr<Session> session, Session::Join(options));
  auto handle = std::make_unique<gtrain_session>();
  handle->managed = session->managed();
  handle->job = session->job();
  handle->session = std::move(session);
  handle->joined = PlaceOf(*handle->session);
  joined_by = getpid();
  *out = handle.release();
  return absl::OkStatus();
}

absl::Status MeshTo(const gtrain_session* session, gtrain_mesh_axis* out, int capacity, int* count) {
  GT_RETURN_IF_ERROR(CheckHandle(session));
  if (count == nullptr || capacity < 0 || (out == nullptr && capacity > 0))
    return absl::InvalidArgumentError("`count` is NULL, or `out` with a capacity");
  const std::vector<MeshAxis> mesh = session->session->mesh();
  *count = static_cast<int>(mesh.size());
  for (size_t i = 0; i < std::min(mesh.size(), static_cast<size_t>(capacity)); ++i) {
    const auto name = std::ranges::find_if(kMeshAxes, [&](const char* one) { return mesh[i].name == one; });
    if (name == kMeshAxes.end())
      return absl::FailedPreconditionError(absl::StrCat("GTRAIN_MESH has an axis ", mesh[i].name));
    out[i] = {*name, mesh[i].size};
  }
  return absl::OkStatus();
}

}  // namespace

gtrain_session::Place Place(const gtrain_session* session) {
  return session->owner == getpid() ? PlaceOf(*session->session) : session->joined;
}

gtrain_status Fill(const absl::Status& status, gtrain_error* error) noexcept {
  if (error != nullptr) {
    absl::string_view text = status.message();
    if (!status.ok() && text.empty()) text = "no memory left, or an exception without text";
    const size_t length = std::min(text.size(), sizeof(error->message) - 1);
    if (length > 0) std::memcpy(error->message, text.data(), length);
    error->message[length] = '\0';
  }
  return static_cast<gtrain_status>(status.code());
}

absl::StatusOr<absl::Duration> TimeoutFrom(int64_t timeout_ms) {
  if (timeout_ms < 0)
    return absl::InvalidArgumentError("a timeout must not be negative: no wait is without an end");
  return absl::Milliseconds(timeout_ms);
}

absl::StatusOr<DType> DTypeFrom(gtrain_dtype dtype) {
  static_assert(GTRAIN_UINT8 == static_cast<int>(DType::kUint8) &&
                GTRAIN_COMPLEX64 == static_cast<int>(DType::kComplex64));
  if (dtype >= 0 && dtype <= GTRAIN_COMPLEX64) return static_cast<DType>(dtype);
  return absl::InvalidArgumentError(absl::StrCat("no such dtype: ", static_cast<int>(dtype)));
}

absl::Status CheckBuffer(const void* data, size_t count, DType dtype) {
  if (data == nullptr && count > 0)
    return absl::InvalidArgumentError("the buffer is NULL but the count is not 0");
  if (count > static_cast<size_t>(std::numeric_limits<ptrdiff_t>::max()) / DTypeSize(dtype)) {
    return absl::InvalidArgumentError(absl::StrCat("a count of ", count, " elements cannot be in memory"));
  }
  return absl::OkStatus();
}

}  // namespace gtrain::capi

using gtrain::capi::Call;
using gtrain::capi::CheckHandle;
using gtrain::capi::Place;

extern "C" {

int gtrain_abi(void) { return GTRAIN_C_ABI; }

const char* gtrain_version(void) { return GTRAIN_VERSION_TEXT; }

const char* gtrain_status_name(gtrain_status status) {
  switch (status) {
    case GTRAIN_OK:
      return "OK";
    case GTRAIN_CANCELLED:
      return "CANCELLED";
    case GTRAIN_UNKNOWN:
      return "UNKNOWN";
    case GTRAIN_INVALID_ARGUMENT:
      return "INVALID_ARGUMENT";
    case GTRAIN_DEADLINE_EXCEEDED:
      return "DEADLINE_EXCEEDED";
    case GTRAIN_NOT_FOUND:
      return "NOT_FOUND";
    case GTRAIN_ALREADY_EXISTS:
      return "ALREADY_EXISTS";
    case GTRAIN_PERMISSION_DENIED:
      return "PERMISSION_DENIED";
    case GTRAIN_RESOURCE_EXHAUSTED:
      return "RESOURCE_EXHAUSTED";
    case GTRAIN_FAILED_PRECONDITION:
      return "FAILED_PRECONDITION";
    case GTRAIN_ABORTED:
      return "ABORTED";
    case GTRAIN_OUT_OF_RANGE:
      return "OUT_OF_RANGE";
    case GTRAIN_UNIMPLEMENTED:
      return "UNIMPLEMENTED";
    case GTRAIN_INTERNAL:
      return "INTERNAL";
    case GTRAIN_UNAVAILABLE:
      return "UNAVAILABLE";
    case GTRAIN_DATA_LOSS:
      return "DATA_LOSS";
    case GTRAIN_UNAUTHENTICATED:
      return "UNAUTHENTICATED";
  }
  return "UNKNOWN";
}

void gtrain_set_log(gtrain_log_function function, void* user) {
  if (gtrain::capi::InForkedChild()) return;
  Call(nullptr, [&] {
    gtrain::capi::log_is_ours = true;
    gtrain::SetLogSink([function, user](gtrain::LogLevel level, absl::string_view text) {
      if (function != nullptr) function(static_cast<int>(level), std::string(text).c_str(), user);
    });
    return absl::OkStatus();
  });
}

gtrain_status gtrain_session_join(int64_t timeout_ms, gtrain_session** out, gtrain_error* error) {
  return Call(error, [&] { return gtrain::capi::Join(timeout_ms, {}, out); });
}

gtrain_status gtrain_session_join_to_stay(int64_t timeout_ms, gtrain_session** out, gtrain_error* error) {
  return Call(error, [&] { return gtrain::capi::Join(timeout_ms, {.stays = true}, out); });
}

gtrain_status gtrain_session_join_place_later(int64_t timeout_ms, gtrain_session** out, gtrain_error* error) {
  return Call(error,
              [&] { return gtrain::capi::Join(timeout_ms, {.stays = true, .place_later = true}, out); });
}

gtrain_status gtrain_session_rejoin(gtrain_session* session, int64_t timeout_ms, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(session));
    GT_ASSIGN_OR_RETURN(const absl::Duration timeout, gtrain::capi::TimeoutFrom(timeout_ms));
    return session->session->Rejoin({.join_timeout = timeout, .stays = true});
  });
}

void gtrain_session_free(gtrain_session* session) { gtrain::capi::FreeHandle(session); }

int gtrain_session_rank(const gtrain_session* session) { return Place(session).rank; }
int gtrain_session_local_rank(const gtrain_session* session) { return Place(session).local_rank; }
int gtrain_session_world_size(const gtrain_session* session) { return Place(session).world_size; }
uint64_t gtrain_session_generation(const gtrain_session* session) { return Place(session).generation; }
uint64_t gtrain_session_timeline(const gtrain_session* session) { return Place(session).timeline; }
gtrain_status gtrain_session_mesh(const gtrain_session* session, gtrain_mesh_axis* out, int capacity,
                                  int* count, gtrain_error* error) {
  return Call(error, [&] { return gtrain::capi::MeshTo(session, out, capacity, count); });
}

int gtrain_session_managed(const gtrain_session* session) { return session->managed ? 1 : 0; }
const char* gtrain_session_job(const gtrain_session* session) { return session->job.c_str(); }

gtrain_status gtrain_session_report(gtrain_session* session, int64_t step, const double* loss,
                                    int64_t samples, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(session));
    gtrain::ProgressReport report{.step = step, .samples = samples};
    if (loss != nullptr) report.loss = *loss;
    session->session->Report(report);
    return absl::OkStatus();
  });
}

gtrain_status gtrain_session_alive(gtrain_session* session, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(session));
    return session->session->Alive();
  });
}

gtrain_status gtrain_session_stop_requested(gtrain_session* session, int* out, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(session));
    if (out == nullptr) return absl::InvalidArgumentError("`out` is NULL");
    *out = session->session->StopRequested() ? 1 : 0;
    return absl::OkStatus();
  });
}

gtrain_status gtrain_session_notice(gtrain_session* session, double* out_seconds, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(session));
    if (out_seconds == nullptr) return absl::InvalidArgumentError("`out_seconds` is NULL");
    const std::optional<absl::Duration> left = session->session->PreemptionNotice();
    *out_seconds = left.has_value() ? std::max(0.0, absl::ToDoubleSeconds(*left)) : -1;
    return absl::OkStatus();
  });
}

}  // extern "C"
