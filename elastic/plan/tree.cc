#include "elastic/plan/tree.h"

#include <algorithm>

namespace gtrain::elastic {
namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;

uint64_t Mix(uint64_t x) {
  x += kGolden;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

}  // namespace

// A left half is never cut short by the last leaf: its sibling would lie behind it.
bool AreSiblings(TreeBlock left, TreeBlock right, int leaves) {
  const int half = left.size();
  const bool is_power = half > 0 && (half & (half - 1)) == 0;
  return is_power && left.begin % (2 * int64_t{half}) == 0 && right.begin == left.end &&
         right.end == std::min<int64_t>(left.begin + 2 * int64_t{half}, leaves);
}

int MergeEnd(std::vector<TreeBlock>& blocks, int leaves) {
  int merges = 0;
  while (blocks.size() > 1 && AreSiblings(blocks[blocks.size() - 2], blocks.back(), leaves)) {
    const int end = blocks.back().end;
    blocks.pop_back();
    blocks.back().end = end;
    ++merges;
  }
  return merges;
}

TreeBlock RunOf(int leaves, int rank, int ranks) {
  const int each = leaves / ranks, more = leaves % ranks;
  const int begin = rank * each + std::min(rank, more);
  return {begin, begin + each + (rank < more ? 1 : 0)};
}

int OwnerOf(int leaf, int leaves, int ranks) {
  const int each = leaves / ranks, more = leaves % ranks;
  const int in_larger = more * (each + 1);
  return leaf < in_larger ? leaf / (each + 1) : more + (leaf - in_larger) / each;
}

std::vector<TreeBlock> BlocksOf(int leaves, TreeBlock run) {
  std::vector<TreeBlock> blocks;
  for (int leaf = run.begin; leaf < run.end; ++leaf) {
    blocks.push_back({leaf, leaf + 1});
    MergeEnd(blocks, leaves);
  }
  return blocks;
}

std::vector<TreeRound> RoundsOf(int leaves, int rank, int ranks) {
  const TreeBlock run = RunOf(leaves, rank, ranks);
  std::vector<TreeRound> rounds;
  if (run.size() == 0) return rounds;
  std::vector<TreeBlock> blocks = BlocksOf(leaves, run);
  for (int level = 0; (int64_t{1} << level) < leaves; ++level) {
    const int64_t half = int64_t{1} << level, whole = 2 * half;
    TreeRound round{.level = level};
    // A right half within the run whose left half begins before it: the first right half, or there is none.
    const int64_t right = half + (run.begin > half ? (run.begin - half + whole - 1) / whole * whole : 0);
    if (right < run.end && right - half < run.begin)
      round.send_to = OwnerOf(static_cast<int>(right - half), leaves, ranks);
    // A left half that begins within the run and whose right half begins behind it: the last left half.
    const int64_t left = (run.end - 1) / whole * whole;
    if (left >= run.begin && left + half >= run.end && left + half < leaves) {
      round.receive_from = OwnerOf(static_cast<int>(left + half), leaves, ranks);
      blocks.back().end = static_cast<int>(std::min<int64_t>(left + whole, leaves));
    }
    if (round.send_to < 0 && round.receive_from < 0) continue;
    if (round.send_to >= 0) blocks.erase(blocks.begin());
    if (round.receive_from >= 0) round.merges = MergeEnd(blocks, leaves);
    rounds.push_back(round);
  }
  return rounds;
}

uint64_t PartSeed(uint64_t seed, int64_t step, int64_t virtual_rank) {
  return Mix(Mix(Mix(seed) + static_cast<uint64_t>(step)) + static_cast<uint64_t>(virtual_rank));
}

}  // namespace gtrain::elastic
