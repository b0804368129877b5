// Which machines keep copies of whose shards of a job (`checkpoint.replicas`). PURE: every agent computes the
// same from the grant, and the head computes it from more machines than it then names there.
#pragma once
#include <cstddef>
#include <vector>

#include "runtime/core/values/messages.h"

namespace gtrain::core {

// How many of their domains two machines share: 0: not even the zone; 1: the zone; 2: the rack; 3: the host.
// A domain that is not known (no label) counts as shared by all machines that do not know it either.
int SharedDomains(const NodePlace& a, const NodePlace& b);

// For each of `nodes`, which are those of the job, the machines that keep its copies: as many others as
// `replicas`, or all that can keep some. An index from nodes.size() on is of `outside`: machines that run no
// rank of the job, best first. Holders that share as few domains with the node as can be had come first, then
// those of the job before those outside, then those that share few domains with each other; copies are spread
// evenly, as far as that allows. A machine outside on the same host is of no use. Taking away machines of
// `outside` that were not chosen changes nothing.
std::vector<std::vector<size_t>> ChooseHolders(const std::vector<NodePlace>& nodes, int replicas,
                                               const std::vector<NodePlace>& outside = {});

// Other machines that the ranks of node `self` ask for copies, its holders first, then the others outside,
// then those of the job in turn.
inline constexpr size_t kNearPeersMax = 64;
std::vector<size_t> NearPeers(const std::vector<NodePlace>& nodes, size_t self, int replicas,
                              const std::vector<NodePlace>& outside = {});

}  // namespace gtrain::core
