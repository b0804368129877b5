// Nodes stand in a row by zone, rack and host. If the largest zone (else rack, else host) has m of them, the
// node m places further on is of another one, as long as m is at most half of all; since that is a mere
// shift, each then keeps exactly one copy. So a node looks for its holder from there on, and takes the one
// that shares the least with it and, of equals, has the least to keep.
#include "runtime/core/near_peers.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <tuple>

namespace gtrain::core {
namespace {

bool CanHold(const NodePlace& node) { return node.near_port > 0 && !node.near_key.empty(); }

// Of the widest domain in which the nodes differ, the size of the largest group.
size_t LargestGroup(const std::vector<NodePlace>& nodes, const std::vector<size_t>& row) {
  for (int level = 1; level <= 3; ++level) {  // groups share at least `level` domains
    size_t largest = 0, size = 0;
    for (size_t i = 0; i < row.size(); ++i) {
      size = i > 0 && SharedDomains(nodes[row[i - 1]], nodes[row[i]]) >= level ? size + 1 : 1;
      largest = std::max(largest, size);
    }
    if (largest < row.size()) return largest;
  }
  return 1;
}

}  // namespace

int SharedDomains(const NodePlace& a, const NodePlace& b) {
  if (a.zone != b.zone) return 0;
  if (a.rack != b.rack) return 1;
  return a.hostname != b.hostname ? 2 : 3;
}

std::vector<std::vector<size_t>> ChooseHolders(const std::vector<NodePlace>& nodes, int replicas) {
  std::vector<std::vector<size_t>> holders(nodes.size());
  if (replicas <= 0) return holders;
  std::vector<size_t> row(nodes.size());
  std::iota(row.begin(), row.end(), size_t{0});
  std::sort(row.begin(), row.end(), [&](size_t a, size_t b) {
    return std::tie(nodes[a].zone, nodes[a].rack, nodes[a].hostname, nodes[a].node) <
           std::tie(nodes[b].zone, nodes[b].rack, nodes[b].hostname, nodes[b].node);
  });
  const size_t shift = LargestGroup(nodes, row);
  std::vector<size_t> keeps(nodes.size());
  for (int copy = 0; copy < replicas; ++copy) {
    for (size_t i = 0; i < row.size(); ++i) {
      const size_t owner = row[i];
      std::vector<size_t>& mine = holders[owner];
      using Cost = std::tuple<int, int, size_t, size_t>;
      std::optional<Cost> best;
      size_t chosen = 0;
      for (size_t far = 0; far < row.size(); ++far) {
        const size_t other = row[(i + shift + far) % row.size()];
        if (other == owner || !CanHold(nodes[other])) continue;
        if (std::find(mine.begin(), mine.end(), other) != mine.end()) continue;
        int shared = 0;
        for (size_t holder : mine) shared = std::max(shared, SharedDomains(nodes[holder], nodes[other]));
        const Cost cost{SharedDomains(nodes[owner], nodes[other]), shared, keeps[other], far};
        if (best && *best <= cost) continue;
        best = cost;
        chosen = other;
      }
      if (!best) continue;
      mine.push_back(chosen);
      ++keeps[chosen];
    }
  }
  return holders;
}

std::vector<size_t> NearPeers(const std::vector<NodePlace>& nodes, size_t self, int replicas) {
  std::vector<size_t> peers = ChooseHolders(nodes, replicas)[self];
  for (size_t i = 1; i < nodes.size() && peers.size() < kNearPeersMax; ++i) {
    const size_t other = (self + i) % nodes.size();
    if (CanHold(nodes[other]) && std::find(peers.begin(), peers.end(), other) == peers.end())
      peers.push_back(other);
  }
  return peers;
}

}  // namespace gtrain::core
