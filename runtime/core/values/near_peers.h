// Which machines keep copies of whose shards of a job (`checkpoint.replicas`). PURE: every agent computes the
// same from the grant, and the head from more machines than it then names there.
#pragma once
#include <cstddef>
#include <vector>

#include "runtime/core/values/messages.h"

namespace gtrain::core {

// How much of where they stand two machines share: 0: not even the zone; 1: the zone; 2: the rack; 3: the
// host. What is not known (no label) is taken as shared by all that do not know it either.
int SharedDomains(const NodePlace& a, const NodePlace& b);

// For each of `nodes`, those of the job, who keeps its copies: as many others as `replicas`, or all that can
// keep some. An index from nodes.size() on is of `outside`: machines that run no rank of the job, best first.
// As little shared with it as can be had, then of the job rather than outside, then as little shared with
// each other; evenly, as far as that allows. One outside on the same host is of no use. Taking away those of
// `outside` that nobody chose changes nothing.
std::vector<std::vector<size_t>> ChooseHolders(const std::vector<NodePlace>& nodes, int replicas,
                                               const std::vector<NodePlace>& outside = {});

// Other machines that the ranks of node `self` ask for copies, its holders first, then the others outside,
// then those of the job in turn.
inline constexpr size_t kNearPeersMax = 64;
std::vector<size_t> NearPeers(const std::vector<NodePlace>& nodes, size_t self, int replicas,
                              const std::vector<NodePlace>& outside = {});

}  // namespace gtrain::core
