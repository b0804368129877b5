// Hostlists as Slurm writes them: "tux[0-3,12],login" is tux0 tux1 tux2 tux3 tux12 login. PURE.
#pragma once
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace gtrain::topology {

inline constexpr size_t kHostlistMax = 262'144;

// Leading zeros give the width: "n[08-11]" is n08 to n11. One name may have several brackets. InvalidArgument
// for an open bracket, a range that runs backwards, an empty name, or more than `names_max` names.
absl::StatusOr<std::vector<std::string>> ParseHostlist(absl::string_view text,
                                                       size_t names_max = kHostlistMax);

// Ranges over the last number of each name, in the order in which their beginnings come first.
std::string PrintHostlist(const std::vector<std::string>& names);

// The name of a machine without its domain. An address has none.
absl::string_view ShortName(absl::string_view name);

// "0-3,7" both ways. Parse: ascending and each once, 0 to kDevicesMax.
absl::StatusOr<std::vector<int>> ParseNumbers(absl::string_view text);
std::string PrintNumbers(const std::vector<int>& numbers);

}  // namespace gtrain::topology
