// What a rank says it is about to do: compared on all ranks before any byte moves (fault L6). PURE.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "gtrain/types.h"

namespace gtrain::comm {

enum class OpKind : uint32_t { kNone, kAllReduce, kBroadcast, kAllGather, kBarrier };

// Lies in shared memory and travels between machines as it is (same build, same byte order:
// both are checked when the communicator is made).
struct OpRecord {
  uint64_t sequence = 0;  // of the communicator, from 1
  uint64_t count = 0;
  OpKind kind = OpKind::kNone;
  DType dtype = DType::kUint8;
  ReduceOp op = ReduceOp::kSum;
  uint16_t reserved = 0;
  int32_t root = 0;
  uint32_t padding = 0;
  // Where the data lies if in memory of Communicator::Allocate; not part of the agreement.
  uint64_t arena = 0;  // 0: private memory
  uint64_t arena_bytes = 0;
  uint64_t arena_offset = 0;
};
static_assert(sizeof(OpRecord) == 56);

std::string Describe(const OpRecord& record);  // "all-reduce #17 of 1000 float32, sum"
bool SameOperation(const OpRecord& a, const OpRecord& b);

// index = rank. FailedPrecondition that names who calls what, or OK.
absl::Status CheckAgreement(absl::Span<const OpRecord> by_rank);

const char* DTypeName(DType dtype);
const char* ReduceOpName(ReduceOp op);

}  // namespace gtrain::comm
