// For tests: calls every collective in every way and checks every element.
#pragma once
#include <cstddef>

#include "absl/status/status.h"
#include "gtrain/communicator.h"

#define RETURN_IF_BAD(expr) \
  if (absl::Status s = (expr); !s.ok()) return s

namespace gtrain::comm {

absl::Status CheckAllReduce(Communicator& c, size_t count, DType dtype, ReduceOp op,
                            char* in_place = nullptr);
absl::Status CheckBroadcast(Communicator& c, size_t count, int root);
absl::Status CheckAllGather(Communicator& c, size_t count, bool in_place);

// All types, operations, roots and many sizes, in an order that mixes kinds and sizes.
absl::Status Everything(Communicator& c);
// The same with memory of Allocate(), on all and on some of the ranks.
absl::Status DirectMemory(Communicator& c);

}  // namespace gtrain::comm
