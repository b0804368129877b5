// The order in which the gradients of a step are added where a job wants the same bits at any number of ranks
// (`elastic.determinism: bitwise`). PURE.
//
// A batch is cut into `leaves` parts, the virtual ranks of the step, and their gradients are summed along one
// binary tree: node [b, b + 2h) with b a multiple of 2h is [b, b + h) + [b + h, b + 2h), and a node whose
// right half lies behind the last leaf is its left half. Which rank adds does not matter, only the tree does.
// A rank computes consecutive leaves and folds them as they come, as a binary counter carries: it ends up
// with the largest nodes that lie within its leaves, at most two of each size. What is left of the tree is
// added level by level: the rank that has the first leaf of a node owns it, and gets the right half from the
// rank that owns that. In the end rank 0 has the root.
#pragma once
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace gtrain::elastic {

// A node, as the leaves [begin, end) below it; or consecutive leaves.
struct TreeBlock {
  int begin = 0;
  int end = 0;
  int size() const { return end - begin; }
  bool operator==(const TreeBlock&) const = default;
};

// Whether `left` and `right` are the halves of one node. O(1).
bool AreSiblings(TreeBlock left, TreeBlock right, int leaves);
// Adds up the end of `blocks`, which lie behind each other, as far as it goes: while the last two are
// siblings they become one. Returns how often. O(log leaves).
int MergeEnd(std::vector<TreeBlock>& blocks, int leaves);

// The leaves of `rank`: the first leaves % ranks ranks have one more than the others. Empty where there are
// more ranks than leaves. O(1).
TreeBlock RunOf(int leaves, int rank, int ranks);
// The rank that has this leaf. O(1).
int OwnerOf(int leaf, int leaves, int ranks);

// One exchange of a rank, at one level of the tree. Both may happen at once.
struct TreeRound {
  int level = 0;          // of the halves: nodes of 2^level leaves
  int send_to = -1;       // gets the first block that this rank has left; -1: none is sent
  int receive_from = -1;  // sends what is added to the last block of this rank; -1: nothing comes
  int merges = 0;         // so often the last two blocks are added then
  bool operator==(const TreeRound&) const = default;
};

// The exchanges of `rank`, in their order, behind the folding of its own leaves. At most log2(leaves),
// rounded up, each of at most one message either way; a rank of n that all have the same power of two of
// leaves sends one block, and rank 0 receives log2(n). O(leaves of this rank + log leaves).
std::vector<TreeRound> RoundsOf(int leaves, int rank, int ranks);

// The largest nodes within `run`, in order: what a rank has when it has folded its leaves. At most
// 2 log2(run.size()) + 1. O(run.size()).
std::vector<TreeBlock> BlocksOf(int leaves, TreeBlock run);

// The seed of what is drawn for one virtual rank in one step. Never changes: training that is continued
// rests on it. Source: three rounds of the finaliser of splitmix64 (Steele, Lea, Flood: "Fast splittable
// pseudorandom number generators", OOPSLA 2014).
uint64_t PartSeed(uint64_t seed, int64_t step, int64_t virtual_rank);

}  // namespace gtrain::elastic
