// The common parts of backends that work on the memory of this host: sums, and collectives that move data
// through the arena of the machine.
#pragma once
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "comm/backends/pipeline.h"
#include "comm/codec/reduce.h"
#include "comm/plan/hierarchy.h"
#include "comm/port/collective_backend.h"
#include "comm/shm/shm_group.h"

namespace gtrain::comm {

// The bytes that are staged at once inside a machine: small enough for the caches of the ranks.
inline constexpr size_t kStagedChunkBytes = 256 << 10;
static_assert(kStagedChunkBytes <= kSlotBytes);

// Sums of several ranks' elements. Kept between calls, so that they allocate nothing. Not thread-safe.
class Summands {
 public:
  void Clear() { from_.clear(); }
  void Add(const char* from) { from_.push_back(from); }
  // to[count] becomes the reduction of all summands, in the order in which they were added, by the operation
  // of `record`; a mean is a sum divided by `divisor`.
  void Into(char* to, uint64_t count, const OpRecord& record, int divisor) const {
    Reduce(to, from_.data(), from_.size(), count, record.dtype, record.op, divisor);
  }
  // Writes the reduction to several places at once.
  void Into(absl::Span<void* const> to, uint64_t count, const OpRecord& record, int divisor) const {
    ReduceInto(to.data(), to.size(), from_.data(), from_.size(), {count, record.dtype, record.op, divisor});
  }

 private:
  std::vector<const void*> from_;
};

// The divisor of a sum over `ranks` ranks. Means of integers are not made here (comm/exec/integer_mean.h).
inline int DivisorOf(const OpRecord& record, int ranks) {
  return record.op == ReduceOp::kMean && !IsInteger(record.dtype) ? ranks : 1;
}

// Several ranks on some machine. `hierarchy` and `shm` outlive it.
class StagedBackend : public CollectiveBackend {
 protected:
  StagedBackend(const Hierarchy* hierarchy, ShmGroup* shm)
      : hierarchy_(*hierarchy), shm_(shm), pipeline_(shm), order_(hierarchy->NodeMajor()) {
    for (const auto& ranks : hierarchy_.nodes) world_ += static_cast<int>(ranks.size());
  }

  int nodes() const { return static_cast<int>(hierarchy_.nodes.size()); }
  int world() const { return world_; }
  int rank() const { return hierarchy_.peers()[static_cast<size_t>(hierarchy_.local)]; }
  int Divisor(const OpRecord& record) const { return DivisorOf(record, world_); }

  // Compares the records of this machine, which all of it have entered.
  absl::Status CompareNeighbours(const OpRecord& record) const;

  // Between the machines: bytes [0, bytes) of Result(chunk) from the root's machine to all.
  using Carry = std::function<absl::Status(uint64_t chunk, uint64_t bytes)>;
  // `carry` is null on one machine. `beside`: it goes on beside the copies.
  absl::Status StagedBroadcast(const OpRecord& record, char* data, const Carry& carry, bool beside,
                               const Watch& watch);
  // Result(chunk) has `bytes` of every rank, in the order of order_; `carry` makes those of one machine those
  // of all.
  absl::Status StagedAllGather(const OpRecord& record, const char* input, char* output, const Carry& carry,
                               bool beside, const Watch& watch);

  const Hierarchy& hierarchy_;
  ShmGroup* const shm_;
  Pipeline pipeline_;
  Summands summands_;
  const std::vector<int> order_;  // the ranks, machine by machine

 private:
  int world_ = 0;
};

// Compares the records of all ranks. Where they differ the error has the mark KnownToAll.
absl::Status CompareRecords(absl::Span<const OpRecord> by_rank);

}  // namespace gtrain::comm
