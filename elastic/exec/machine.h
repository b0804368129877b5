// Ranks that are to compute the same bits run on processors of one kind, with the same numbers of threads.
#pragma once
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "comm/port/communicator.h"

namespace gtrain::elastic {

// This machine's processor and `threads`, the thread settings of the process, in one line. Reads
// /proc/cpuinfo, whose error it returns. FailedPrecondition: that does not say which processor it is.
absl::StatusOr<std::string> DescribeMachine(absl::string_view threads);

// Collective. Compares `machine` with that of rank `reference`, whose bits count. Where all are equal it
// costs an all-gather of 16 bytes a rank, else 2 broadcasts of 1 KiB more. FailedPrecondition on the ranks
// that differ: it names them and both machines. Unavailable on all others: they cannot go on with those, and
// may in another generation.
absl::Status CheckMachines(Communicator& comm, const std::string& machine, int reference);

}  // namespace gtrain::elastic
