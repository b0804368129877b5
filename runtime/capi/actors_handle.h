// The handle of actors, and what its functions begin with.
#pragma once
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "actors/exec/cluster.h"
#include "base/fork_guard.h"
#include "gtrain/actor_c.h"
#include "runtime/capi/handles.h"

struct gtrain_actors {
  pid_t owner = getpid();
  gtrain::ForkGuard fork_guard;
  std::shared_ptr<gtrain::Session> session;
  std::unique_ptr<gtrain::actors::Cluster> cluster;

  ~gtrain_actors() {
    if (session != nullptr) session->SetAsked(nullptr);
  }
};

namespace gtrain::capi {

// As that of other handles, without a system call for each call of an actor.
inline absl::Status CheckActors(const gtrain_actors* handle) {
  if (handle == nullptr) return absl::InvalidArgumentError("the handle is NULL");
  return handle->fork_guard.Forked() ? ForkedError() : absl::OkStatus();
}

inline absl::Status CheckTimeout(int64_t timeout_ms) {
  if (timeout_ms > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("a timeout of ", timeout_ms, " ms: a call has one above 0"));
}

inline absl::string_view View(const void* data, size_t size) {
  return {static_cast<const char*>(data), size};
}

}  // namespace gtrain::capi
