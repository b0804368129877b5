// Nodes stand in a row by zone, rack and host. If the largest zone (else rack, else host) has m of them, the
// node m places further on is of another one, as long as m is at most half of all; since that is a mere
// shift, each then keeps exactly one copy. So a node looks for its holder from there on, and takes the one
// that shares the least with it and, of equals, has the least to keep. Machines outside the job come after
// all of its own: each is worth it only where none of the job is as far away.
#include "runtime/core/values/near_peers.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <tuple>

namespace gtrain::core {
namespace {

constexpr int kSameHost = 3;

bool CanHold(const NodePlace& node) { return node.near_port > 0 && !node.near_key.empty(); }

// The size of the largest group in the widest domain in which the nodes differ.
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
  return a.hostname != b.hostname ? 2 : kSameHost;
}

std::vector<std::vector<size_t>> ChooseHolders(const std::vector<NodePlace>& nodes, int replicas,
                                               const std::vector<NodePlace>& outside) {
  std::vector<std::vector<size_t>> holders(nodes.size());
  if (replicas <= 0) return holders;
  std::vector<size_t> row(nodes.size());
  std::iota(row.begin(), row.end(), size_t{0});
  std::sort(row.begin(), row.end(), [&](size_t a, size_t b) {
    return std::tie(nodes[a].zone, nodes[a].rack, nodes[a].hostname, nodes[a].node) <
           std::tie(nodes[b].zone, nodes[b].rack, nodes[b].hostname, nodes[b].node);
  });
  const size_t shift = LargestGroup(nodes, row);
  const auto place = [&](size_t i) -> const NodePlace& {
    return i < nodes.size() ? nodes[i] : outside[i - nodes.size()];
  };
  std::vector<size_t> keeps(nodes.size() + outside.size());
  for (int copy = 0; copy < replicas; ++copy) {
    for (size_t i = 0; i < row.size(); ++i) {
      const size_t owner = row[i];
      std::vector<size_t>& mine = holders[owner];
      // Shared with the owner, of the job or not, shared with the other holders, copies there, way there.
      using Cost = std::tuple<int, bool, int, size_t, size_t>;
      std::optional<Cost> best;
      size_t chosen = 0;
      for (size_t far = 0; far < keeps.size(); ++far) {
        const bool of_job = far < row.size();
        if (!of_job && best && std::get<0>(*best) == 0 && !std::get<1>(*best)) break;  // none is better
        const size_t other = of_job ? row[(i + shift + far) % row.size()] : far;
        if (other == owner || !CanHold(place(other))) continue;
        if (std::find(mine.begin(), mine.end(), other) != mine.end()) continue;
        const int with_owner = SharedDomains(nodes[owner], place(other));
        if (!of_job && with_owner == kSameHost) continue;
        int shared = 0;
        for (size_t holder : mine) shared = std::max(shared, SharedDomains(place(holder), place(other)));
        const Cost cost{with_owner, !of_job, shared, keeps[other], far};
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

std::vector<size_t> NearPeers(const std::vector<NodePlace>& nodes, size_t self, int replicas,
                              const std::vector<NodePlace>& outside) {
  std::vector<size_t> peers = ChooseHolders(nodes, replicas, outside)[self];
  const auto add = [&](size_t other, const NodePlace& place) {
    if (peers.size() < kNearPeersMax && CanHold(place) &&
        std::find(peers.begin(), peers.end(), other) == peers.end()) {
      peers.push_back(other);
    }
  };
  for (size_t i = 0; i < outside.size(); ++i) add(nodes.size() + i, outside[i]);
  for (size_t i = 1; i < nodes.size(); ++i) add((self + i) % nodes.size(), nodes[(self + i) % nodes.size()]);
  return peers;
}

}  // namespace gtrain::core
