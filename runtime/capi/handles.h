// The objects behind the opaque handles of gtrain_c.h, and the frame that every call runs in.
#pragma once
#include <sys/types.h>
#include <unistd.h>

#include <array>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "checkpoint/engine/checkpoint.h"
#include "comm/exec/async_calls.h"
#include "comm/port/communicator.h"
#include "comm/reducer/reducer.h"
#include "gtrain/gtrain_c.h"
#include "runtime/port/session.h"
#include "sharding/ledger/ledger.h"

// Members are declared so that they are destroyed in the right order: what depends comes last.
struct gtrain_session {
  pid_t owner = getpid();
  std::shared_ptr<gtrain::Session> session;
  struct Place {
    int rank = 0, local_rank = 0, world_size = 1;
    uint64_t generation = 0, timeline = 0;
  };
  // Copies, so that a forked child can ask without touching the session.
  Place joined;
  bool managed = false;
  std::string job;
};

struct gtrain_communicator {
  pid_t owner = getpid();
  std::shared_ptr<gtrain::Session> session;
  std::shared_ptr<gtrain::Communicator> comm;
  int rank = 0, size = 1;
  absl::Duration timeout;
  std::unique_ptr<gtrain::AsyncCalls> queue;
};

struct gtrain_request {
  pid_t owner = getpid();
  std::optional<gtrain::AsyncCall> call;  // a collective, or else:
  std::shared_ptr<gtrain::PendingMessages> messages;
  gtrain_message* list = nullptr;  // the caller's, to be filled once
  size_t list_size = 0;
};

// Shared with checkpointers that save what it carries over.
struct gtrain_reducer {
  pid_t owner = getpid();
  struct Parts {
    std::shared_ptr<gtrain::Session> session;
    std::shared_ptr<gtrain::Communicator> comm;
    size_t gradients = 0;
    std::unique_ptr<gtrain::Reducer> reducer;
  };
  std::shared_ptr<Parts> parts;
  gtrain::ReducedStep last;  // whose `unused` the caller may read
};

// Shared with checkpointers that save its cursor.
struct gtrain_samples {
  pid_t owner = getpid();
  struct Parts {
    std::shared_ptr<gtrain::Session> session;
    std::string name;
    gtrain::sharding::SampleOptions options;
    gtrain::sharding::SampleCursor cursor;
    int share = 0, shares = 1;                  // where it is not `by_rank`
    bool by_rank = true;                        // of the session's place in its newest generation
    int64_t shared_to = 0;                      // batches, of which the share was asked for
    bool saved = false;                         // with a checkpointer
    bool said_begin = false, said_end = false;  // by this process, since the last restore
    uint64_t said_in = 0;                       // the generation in which it was said last
  };
  std::shared_ptr<Parts> parts;
};

struct gtrain_compressed_mean {
  pid_t owner = getpid();
  std::shared_ptr<gtrain::Session> session;
  std::unique_ptr<gtrain::Communicator> comm;  // its own
  std::unique_ptr<gtrain::CompressedCollective> mean;
};

struct gtrain_checkpointer {
  pid_t owner = getpid();
  std::shared_ptr<gtrain::Session> session;
  struct Carried {
    std::shared_ptr<gtrain_reducer::Parts> reducer;
    std::vector<float> block;  // registered
  };
  std::vector<std::unique_ptr<Carried>> carried;
  struct SavedSamples {
    std::shared_ptr<gtrain_samples::Parts> samples;
    gtrain::sharding::SampleBlock block{};  // registered
  };
  std::vector<std::unique_ptr<SavedSamples>> samples;
  std::unique_ptr<gtrain::Checkpointer> checkpointer;
  gtrain::RestoredStep restored;  // by the last restore
};

namespace gtrain::capi {

gtrain_status Fill(const absl::Status& status, gtrain_error* error) noexcept;

// Runs the body of one C function: an exception becomes a status.
template <typename Body>
gtrain_status Call(gtrain_error* error, Body body) noexcept {
  try {
    return Fill(body(), error);
  } catch (const std::bad_alloc&) {
    return Fill(absl::Status(absl::StatusCode::kResourceExhausted, ""), error);
  } catch (const std::exception& e) {
    return Fill(absl::InternalError(e.what()), error);
  } catch (...) {
    return Fill(absl::Status(absl::StatusCode::kInternal, ""), error);
  }
}

inline absl::Status ForkedError() {
  return absl::FailedPreconditionError(
      "this process was forked from the rank that joined; only that one may call gtrain");
}

// Of the newest generation; in a forked child, of the first.
gtrain_session::Place Place(const gtrain_session* session);

// The handle is there and belongs to this process.
template <typename Handle>
absl::Status CheckHandle(const Handle* handle) {
  if (handle == nullptr) return absl::InvalidArgumentError("the handle is NULL");
  return handle->owner == getpid() ? absl::OkStatus() : ForkedError();
}

// In a forked child the handle is left alone: its threads and sockets are the parent's.
template <typename Handle>
void FreeHandle(Handle* handle) noexcept {
  if (handle != nullptr && handle->owner == getpid()) delete handle;
}

gtrain_communicator* HandleOf(std::shared_ptr<Communicator> comm, std::shared_ptr<Session> session,
                              absl::Duration timeout);

absl::StatusOr<absl::Duration> TimeoutFrom(int64_t timeout_ms);
absl::StatusOr<DType> DTypeFrom(gtrain_dtype dtype);
// Fails where data is NULL with a count, or count elements cannot exist.
absl::Status CheckBuffer(const void* data, size_t count, DType dtype);

}  // namespace gtrain::capi
