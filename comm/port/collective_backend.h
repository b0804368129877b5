// Port: one way of carrying out the collectives of a communicator. Adapters: comm/backends/shared_memory (all
// ranks on one machine), comm/backends/flat (one rank on each machine), comm/backends/hierarchical (several
// machines, of which some have several ranks). A communicator makes one backend when it is made. It checks
// arguments, numbers the calls, sets deadlines and tells peers of errors; the backend compares the calls of
// the ranks and moves the data. Each adapter says what a call costs.
#pragma once
#include <cstdint>

#include "absl/status/status.h"
#include "comm/plan/op_record.h"
#include "comm/port/watch.h"

namespace gtrain::comm {

// kDevice: for backends to come; those that are here work on memory of the host.
enum class MemoryKind : uint8_t { kHost, kDevice };

// The memory of one call, owned by the caller until the call returns, or, on a stream, until what the call
// has put on the stream is done. Sizes follow from the record.
struct Operands {
  const void* input = nullptr;
  void* output = nullptr;  // all-reduce, reduce and broadcast work in place: the same as `input`
  MemoryKind memory = MemoryKind::kHost;
  // kDevice: the CUstream that the data is ready on and that waits for the result; nullptr is the default
  // one.
  void* stream = nullptr;
};

// Not thread-safe: one call at a time. Every call ends by its Watch, even if peers were killed at any point.
// After an error the backend is used no more. All ranks first compare `record`; where they differ all return
// the same error, which is marked KnownToAll, and nobody's memory has changed.
class CollectiveBackend {
 public:
  virtual ~CollectiveBackend() = default;

  // The comparison alone: a barrier.
  virtual absl::Status Enter(const OpRecord& record, const Watch& watch) = 0;

  virtual absl::Status AllReduce(const OpRecord& record, const Operands& operands, const Watch& watch) = 0;
  virtual absl::Status Broadcast(const OpRecord& record, const Operands& operands, const Watch& watch) = 0;
  // `input`: record.count elements, `output`: as many of every rank. They may overlap where they are the same
  // elements.
  virtual absl::Status AllGather(const OpRecord& record, const Operands& operands, const Watch& watch) = 0;
  // `input`: record.count elements for every rank, `output`: record.count.
  virtual absl::Status ReduceScatter(const OpRecord& record, const Operands& operands,
                                     const Watch& watch) = 0;
  // Reduces to the root; only the root's memory changes.
  virtual absl::Status Reduce(const OpRecord& record, const Operands& operands, const Watch& watch) = 0;
  // Both: record.count elements for every rank.
  virtual absl::Status AllToAll(const OpRecord& record, const Operands& operands, const Watch& watch) = 0;
};

}  // namespace gtrain::comm
