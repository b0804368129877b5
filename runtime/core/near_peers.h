// Which machines of a job keep copies of whose shards (`checkpoint.replicas`). PURE: every agent computes the
// same from the grant.
#pragma once
#include <cstddef>
#include <vector>

#include "runtime/core/messages.h"

namespace gtrain::core {

// How much of where they stand two machines share: 0: not even the zone; 1: the zone; 2: the rack; 3: the
// host. What is not known (no label) is taken as shared by all that do not know it either.
int SharedDomains(const NodePlace& a, const NodePlace& b);

// For each of `nodes` who keeps its copies: as many others as `replicas`, or all that can keep some. As
// little shared with it, and then with each other, as can be had; evenly, as far as that allows.
std::vector<std::vector<size_t>> ChooseHolders(const std::vector<NodePlace>& nodes, int replicas);

// Other machines that the ranks of node `self` ask for copies, its holders first, then the others in turn.
inline constexpr size_t kNearPeersMax = 64;
std::vector<size_t> NearPeers(const std::vector<NodePlace>& nodes, size_t self, int replicas);

}  // namespace gtrain::core
