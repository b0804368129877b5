// Chunks of a collective on their way through the arena of a machine.
//
// Data moves through stages, one phase of the shared-memory group between two ticks: at tick t the ranks work
// on chunk t in the first stage, on chunk t-1 in the second, and so on. With at most four stages and four
// buffers no rank can meet a chunk that another still reads, also across the border of two collectives:
// within the last tick of one and the first of the next different buffers are touched, and a phase lies
// between any further ones. So the stages of a tick may run in any order and at the same time, and the one
// that waits for other machines runs beside the others: a tick takes as long as the longer of the two, not
// their sum.
//
// c chunks through s stages are c + s - 1 ticks, each a meeting of the ranks of the machine.
#pragma once
#include <cstdint>
#include <functional>
#include <initializer_list>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "comm/backends/side_thread.h"
#include "comm/plan/op_record.h"
#include "comm/port/watch.h"
#include "comm/shm/shm_group.h"

namespace gtrain::comm {

// Not thread-safe. `shm` outlives it. A thread, from the first collective of several chunks on in which this
// rank speaks with other machines.
class Pipeline {
 public:
  using Work = std::function<absl::Status(uint64_t chunk)>;
  struct Stage {
    Stage(const Work& of) : work(of) {}  // NOLINT(google-explicit-constructor): a stage is mostly its work
    Stage(const Work& of, bool is_network) : work(of), network(is_network) {}
    const Work& work;
    // It waits for other machines, and shares nothing with the others but the buffers of chunks.
    bool network = false;
  };

  explicit Pipeline(ShmGroup* shm) : shm_(shm) {}

  // Buffers of a chunk of the collective that runs.
  char* Slot(int local, uint64_t chunk) const { return shm_->Slot(local, first_ + chunk); }
  char* Result(uint64_t chunk) const { return shm_->Result(first_ + chunk); }
  // Memory for use right after the entry of a collective: a result that nobody uses before its second tick.
  char* Spare() const { return shm_->Result(first_ + kBuffers - 1); }

  // Enters the collective by `enter`, with the first stage of the first chunk before it, which saves a phase.
  // True: all ranks of this machine passed memory that their peers reach; nothing is staged then.
  absl::StatusOr<bool> Begin(const OpRecord& record, const Work& first, uint64_t chunks,
                             absl::FunctionRef<absl::Status()> enter, const Watch& watch);
  // The ticks after the first.
  absl::Status Run(uint64_t chunks, std::initializer_list<Stage> stages, const Watch& watch);

 private:
  absl::Status Tick(uint64_t tick, uint64_t chunks, std::initializer_list<Stage> stages, const Watch& watch);

  ShmGroup* const shm_;
  uint64_t first_ = 0;  // chunks of all collectives before this one
  SideThread network_;
};

}  // namespace gtrain::comm
