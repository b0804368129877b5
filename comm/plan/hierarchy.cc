#include "comm/plan/hierarchy.h"

#include <algorithm>
#include <cstddef>
#include <map>

namespace gtrain::comm {

bool Hierarchy::one_rank_a_node() const {
  return std::all_of(nodes.begin(), nodes.end(), [](const auto& ranks) { return ranks.size() == 1; });
}

int Hierarchy::rails() const {
  size_t least = nodes.front().size();
  for (const auto& ranks : nodes) least = std::min(least, ranks.size());
  return static_cast<int>(least);
}

std::vector<int> Hierarchy::Rail() const {
  std::vector<int> rail;
  if (local >= rails()) return rail;
  for (const auto& ranks : nodes) rail.push_back(ranks[static_cast<size_t>(local)]);
  return rail;
}

int Hierarchy::NodeOf(int rank) const {
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (std::binary_search(nodes[i].begin(), nodes[i].end(), rank)) return static_cast<int>(i);
  }
  return -1;
}

std::vector<int> Hierarchy::NodeMajor() const {
  std::vector<int> order;
  for (const auto& ranks : nodes) order.insert(order.end(), ranks.begin(), ranks.end());
  return order;
}

Hierarchy MakeHierarchy(const std::vector<NodeId>& node_of_rank, int rank,
                        const std::vector<int>& order_of_rank) {
  Hierarchy h;
  std::map<NodeId, size_t> index;
  for (size_t r = 0; r < node_of_rank.size(); ++r) {
    const auto [it, added] = index.try_emplace(node_of_rank[r], h.nodes.size());
    if (added) h.nodes.emplace_back();
    h.nodes[it->second].push_back(static_cast<int>(r));
  }
  if (!order_of_rank.empty()) {
    std::ranges::stable_sort(h.nodes, {}, [&](const std::vector<int>& ranks) {
      return order_of_rank[static_cast<size_t>(ranks.front())];
    });
  }
  h.node = h.NodeOf(rank);
  h.local = static_cast<int>(std::ranges::find(h.peers(), rank) - h.peers().begin());
  return h;
}

}  // namespace gtrain::comm
