// A long message made short: zstd (RFC 8878). Pure functions, thread-safe.
//
// For what goes to many at once: a grant or a table of an exchange names each machine and rank of a job, and
// is a tenth as long then. `bench_scale --only costs` has the numbers.
#pragma once
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace gtrain::wire {

std::string Pack(absl::string_view bytes);
// DataLoss: it is not what Pack makes, or would be longer than kMessageBytesMax.
absl::StatusOr<std::string> Unpack(absl::string_view packed);

}  // namespace gtrain::wire
