// Which machines the words of a job file mean. PURE.
#pragma once
#include <cstddef>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace gtrain::spec {

inline constexpr size_t kHostsMax = 65'536;  // that one key may name

// One word of `where.hosts`: a host name or a node's id, or, with a bracket or a comma in it, a hostlist as
// Slurm writes it ("tux[0-3,12]"). InvalidArgument says what is wrong with the list.
absl::StatusOr<std::vector<std::string>> HostsOf(absl::string_view word);

// "0-3,7": numbers below `max` in the order in which they are written.
absl::StatusOr<std::vector<int>> ParseRankList(absl::string_view text, int max);
std::string PrintRankList(const std::vector<int>& numbers);

using HostNames = std::set<std::string, std::less<>>;

// All that the words of a key name. A word that HostsOf refuses names nothing: the parser has seen them all.
HostNames NamesOf(const std::vector<std::string>& words);

}  // namespace gtrain::spec
