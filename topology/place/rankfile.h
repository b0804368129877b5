// Rankfiles as Open MPI writes them, "rank 0=node1 slot=3": which machine and which place on it each rank
// has. PURE.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "topology/place/fabric.h"
#include "topology/topology.h"

namespace gtrain::topology {

struct RankfileRow {
  std::string host;
  int slot = 0;
  int line = 0;
};

// [rank]: its row, whatever hosts there are. InvalidArgument with file:line for a line of another form, and a
// rank that is missing or there twice. What Open MPI has beside numbers of slots is refused by its name.
absl::StatusOr<std::vector<RankfileRow>> ReadRankfile(absl::string_view text, absl::string_view filename);
std::string PrintRankfileRow(int rank, absl::string_view host, int slot);

inline constexpr size_t kRankfileBytesMax = size_t{64} << 20;

// A slot's number counts the places of its machine from 0.
std::string PrintRankfile(const Topology& topology, const Fabric& fabric,
                          const std::vector<int32_t>& slot_of_rank);

// [rank]: its slot; -1 where the topology has no such machine or place, which `Replace` fills.
// InvalidArgument with file:line for a line of another form, a rank that is missing or there twice, and a
// place that two ranks have.
absl::StatusOr<std::vector<int32_t>> ParseRankfile(absl::string_view text, absl::string_view filename,
                                                   const Topology& topology, const Fabric& fabric);

}  // namespace gtrain::topology
