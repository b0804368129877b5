// The record of a collective that a rank is about to run: all ranks compare theirs before any byte moves
// (fault L6). PURE. A record is 56 bytes, of which the first 24 are compared; CheckAgreement reads n of them,
// and its error names n ranks.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "gtrain/types.h"

namespace gtrain::comm {

enum class OpKind : uint8_t {
  kNone,
  kAllReduce,
  kBroadcast,
  kAllGather,
  kBarrier,
  kReduceScatter,
  kReduce,
  kAllToAll,
  kGather,
  kScatter,
  // Collectives of uneven parts, for which `root` is a hash of the counts.
  kAllGatherV,
  kReduceScatterV,
  kAllToAllV
};

// Lies in shared memory and travels between machines as it is (same build, same byte order:
// both are checked when the communicator is made).
struct OpRecord {
  uint64_t sequence = 0;  // of the communicator, from 1
  uint64_t count = 0;
  OpKind kind = OpKind::kNone;
  DType dtype = DType::kUint8;
  ReduceOp op = ReduceOp::kSum;
  uint8_t no_data = 0;  // 1: there should be some, and the pointer is null
  int32_t root = 0;
  // The place of the data, which ranks need not agree on.
  uint64_t arena = 0;  // of Communicator::Allocate; 0: private memory
  uint64_t arena_bytes = 0;
  uint64_t arena_offset = 0;
  // Set by the first rank of a machine: on one machine TwoWays for the next staged collective, among several
  // machines whether links should be measured again.
  uint64_t choice = 0;
};
// All fields that ranks must agree on lie before this offset.
inline constexpr size_t kAgreedBytes = offsetof(OpRecord, arena);
static_assert(sizeof(OpRecord) == 56);

// "all-reduce #17 of 1000 float32, sum".
std::string Describe(const OpRecord& record);
inline bool SameOperation(const OpRecord& a, const OpRecord& b) {
  return std::memcmp(&a, &b, kAgreedBytes) == 0;
}

// InvalidArgument: no rank can do this, whatever the others call.
absl::Status CheckArguments(const OpRecord& record, int world);

// Compares the records of all ranks (index = rank). Returns OK, an InvalidArgument that names the rank with
// impossible arguments, or a FailedPrecondition that names the ranks and their different calls.
absl::Status CheckAgreement(absl::Span<const OpRecord> by_rank);

const char* DTypeName(DType dtype);
const char* ReduceOpName(ReduceOp op);

}  // namespace gtrain::comm
