// Sizes and durations as people write them, and back. One grammar for job
// files, flags and status output.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace gtrain {

// "512", "64KiB", "1GiB", "2TB"; decimal (kB MB GB TB) and binary (KiB MiB GiB TiB,
// also Ki Mi Gi Ti). Only digits before the unit; InvalidArgument otherwise or on overflow.
absl::StatusOr<uint64_t> ParseBytes(absl::string_view text);
std::string PrintBytes(uint64_t bytes);

// "90s", "15m", "24h", "500ms", "2d"; one number, one unit; InvalidArgument otherwise.
absl::StatusOr<absl::Duration> ParseDuration(absl::string_view text);
// The shortest exact form ParseDuration reads back ("90s" prints as "90s", "60m" as "1h").
std::string PrintDuration(absl::Duration d);

// A share, "0.01" or "1%", in parts of a million; digits, at most one point, no more decimals than it has
// parts; InvalidArgument otherwise or above 1000. Printed as a decimal fraction.
absl::StatusOr<int> ParseShare(absl::string_view text);
std::string PrintShare(int parts);

// Numbers as people write sets of ranks: {0,1,2,5} -> "0-2,5".
std::string PrintRanks(std::vector<int> ranks);

}  // namespace gtrain
