// Port: starts a process that saves the data which a rank leaves in shared memory, and keeps that memory when
// the rank dies. A session under gtrain is a WriterHost (its keeper does it); outside gtrain it is not.
#pragma once
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"

namespace gtrain::port {

// The rank's ends of what it shares with its writer.
struct WriterLink {
  UniqueFd arena;  // memfd of the bytes asked for, all zero; neither end can change its size
  UniqueFd
      channel;  // connected stream socket: a byte wakes the other side, the end of it says that it is gone
};

// Thread-safe.
class WriterHost {
 public:
  virtual ~WriterHost() = default;
  // Starts a writer. Blocks while writers of an earlier generation of this machine still need their memory,
  // at most `timeout` (DeadlineExceeded) and as long as `wanted`, asked ten times a second, returns true
  // (Cancelled). Unavailable: the generation is over. FailedPrecondition, ResourceExhausted: no writer can be
  // started here; the message says why.
  virtual absl::StatusOr<WriterLink> StartWriter(uint64_t arena_bytes, absl::Duration timeout,
                                                 absl::FunctionRef<bool()> wanted) = 0;
};

}  // namespace gtrain::port
