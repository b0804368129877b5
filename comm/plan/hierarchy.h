// Which ranks share a machine and who speaks for each machine: one leader, or each rank for its part, with
// the ranks at its place on the other machines (a rail). PURE. O(n) of memory and time for n ranks, once a
// communicator.
#pragma once
#include <vector>

#include "base/ids.h"

namespace gtrain::comm {

struct Hierarchy {
  std::vector<std::vector<int>> nodes;  // ranks ascending; nodes in the order of MakeHierarchy
  int node = 0;                         // of this rank, index into nodes
  int local = 0;                        // index into nodes[node]

  bool leader() const { return local == 0; }
  const std::vector<int>& peers() const { return nodes[static_cast<size_t>(node)]; }
  bool one_rank_a_node() const;
  // The number of ranks of each machine that have a partner at their place on every other: that of the
  // smallest machine.
  int rails() const;
  // The ranks at this one's place, by node; empty if not every node has it.
  std::vector<int> Rail() const;
  // Index of the node that `rank` is on.
  int NodeOf(int rank) const;
  // All ranks, node by node: the order in which leaders exchange blocks.
  std::vector<int> NodeMajor() const;
};

// Nodes come in the order of the number that their lowest rank has in `order_of_rank`, and, where that is
// equal or the list empty, in that of their lowest rank.
Hierarchy MakeHierarchy(const std::vector<NodeId>& node_of_rank, int rank,
                        const std::vector<int>& order_of_rank = {});

}  // namespace gtrain::comm
