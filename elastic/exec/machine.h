// What the bits that a rank computes depend on, beside its program. Ranks that are to compute the same ones
// have it alike (elastic/exec/likeness.h).
#pragma once
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace gtrain::elastic {

// This machine's processor and `threads`, the thread settings of the process, in one line. Reads
// /proc/cpuinfo, whose error it returns. FailedPrecondition: that does not say which processor it is.
absl::StatusOr<std::string> DescribeMachine(absl::string_view threads);

}  // namespace gtrain::elastic
