// For tests: calls every collective in every way and checks every element.
#pragma once
#include <cstddef>

#include "absl/status/status.h"
#include "comm/port/communicator.h"

#define RETURN_IF_BAD(expr) \
  if (absl::Status s = (expr); !s.ok()) return s

namespace gtrain::comm {

absl::Status CheckAllReduce(Communicator& c, size_t count, DType dtype, ReduceOp op,
                            char* in_place = nullptr);
absl::Status CheckBroadcast(Communicator& c, size_t count, int root);
absl::Status CheckAllGather(Communicator& c, size_t count, bool in_place);
// `input` has room for size() * count elements; nullptr: private memory.
absl::Status CheckReduceScatter(Communicator& c, size_t count, DType dtype, ReduceOp op, bool in_place,
                                char* input = nullptr);
absl::Status CheckReduce(Communicator& c, size_t count, DType dtype, ReduceOp op, int root,
                         char* data = nullptr);
absl::Status CheckAllToAll(Communicator& c, size_t count, char* input = nullptr);

// All types, operations, roots and many sizes, in an order that mixes kinds and sizes.
absl::Status Everything(Communicator& c);
// All-reduce of all types and operations, each in every way there is inside a machine.
absl::Status EveryWay(Communicator& c);
// Between every two ranks, there and back, with all-reduces in between.
absl::Status SendAndReceive(Communicator& c);
// Checks gather, scatter and the collectives of uneven parts.
absl::Status Uneven(Communicator& c);
// Rings, tags, any source, groups.
absl::Status Messages(Communicator& c);
// Checks collectives on memory of Allocate(), on all and on some of the ranks.
absl::Status DirectMemory(Communicator& c);
// Rows and columns of a mesh of two columns, each a communicator of its own; `c` has an even number of ranks.
absl::Status RowsAndColumns(Communicator& c);

}  // namespace gtrain::comm
