// Topology files (docs/formats/topology.md): read with every error as file:line, and written. PURE: the
// caller reads and writes the file.
#pragma once
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "topology/topology.h"

namespace gtrain::topology {

inline constexpr size_t kTopologyBytesMax = size_t{64} << 20;

// InvalidArgument lists up to twenty errors, one a line, each as "file:line: where: what".
absl::StatusOr<Topology> ParseTopology(absl::string_view text, absl::string_view filename);

// What ParseTopology reads back to an equal value. Machines that are alike and links of the same kind share
// an entry.
std::string PrintTopology(const Topology& topology);

}  // namespace gtrain::topology
