// Runs a schedule of comm/plan over a DataTransport. A message of the schedule is one of the transport for
// each 256 KiB of it; what a round receives to reduce is the scratch, so all of the data with doubling, 1 / n
// of it with a ring of n, and a block of each other member in a reduce-scatter.
#pragma once
#include <vector>

#include "absl/status/status.h"
#include "comm/plan/schedule.h"
#include "comm/port/data_transport.h"
#include "gtrain/types.h"

namespace gtrain::comm {

// Not thread-safe. Keeps its scratch memory between runs.
class ScheduleRunner {
 public:
  // `data` is the whole buffer that the schedule's offsets (in elements of `dtype`) refer to.
  absl::Status Run(const Schedule& schedule, void* data, DType dtype, ReduceOp op, DataTransport* transport,
                   const Watch& watch);
  // Runs a schedule with sends out of `source` instead of `data`.
  absl::Status Run(const Schedule& schedule, const void* source, void* data, DType dtype, ReduceOp op,
                   DataTransport* transport, const Watch& watch);

 private:
  std::vector<char> scratch_;
};

}  // namespace gtrain::comm
