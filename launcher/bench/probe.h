// Measures the machines of a communicator against each other: the speed of pairs under load, the groups that
// come of it, and what leaves each group (topology/measured.h says why so).
//
// A round takes some tenths of a second, and there are 2 (n - 1) of them for up to 64 machines, some 56 + 4
// log2 n for more, and two for each group. A process has a connection to each machine that it is in a pair
// with, and keeps some 300 bytes for each pair of all.
#pragma once
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "comm/port/communicator.h"
#include "runtime/port/session.h"
#include "topology/measured.h"

namespace gtrain {

// Collective, and all get the same. `rank_of`: the rank of each machine, which has no other; `names`: of the
// machines. Errors are those of the communicator.
absl::StatusOr<topology::Measured> Probe(Communicator& comm, std::vector<int> rank_of,
                                         std::vector<std::string> names);

// What `gtrain topology measure` runs on each machine. Rank 0 prints "machine INDEX NODE GROUP...", a group a
// level; "pair INDEX INDEX GB_S US"; and "group LEVEL GROUP GB_S".
absl::Status PrintProbe(Session& session);

}  // namespace gtrain
