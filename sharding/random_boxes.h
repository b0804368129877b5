// Boxes as irregular programs have them. For tests.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "sharding/box.h"

namespace gtrain::sharding {

// A box of a tensor of `shape`, which has elements, for each rank: cut at random places, some on several
// ranks, some ranks without any. A scalar is on all.
inline std::vector<Box> RandomBoxes(Rng* rng, const std::vector<int64_t>& shape, int world) {
  const auto ranks = static_cast<size_t>(world);
  if (shape.empty()) return std::vector<Box>(ranks);
  std::vector<Box> boxes = {WholeBox(shape)};
  for (uint64_t cuts = rng->Below(2 * ranks); cuts > 0 && boxes.size() < ranks; --cuts) {
    Box& box = boxes[rng->Below(boxes.size())];
    const size_t d = rng->Below(box.size());
    if (box[d].size < 2) continue;
    const auto size = static_cast<int64_t>(1 + rng->Below(static_cast<uint64_t>(box[d].size) - 1));
    Box rest = box;
    rest[d] = {box[d].begin + size, box[d].size - size};
    box[d].size = size;
    boxes.push_back(rest);
  }
  std::vector<Box> by_rank = boxes;
  while (by_rank.size() < ranks)
    by_rank.push_back(rng->Below(3) > 0 ? boxes[rng->Below(boxes.size())] : Box(shape.size()));
  for (size_t i = ranks; i > 1; --i) std::swap(by_rank[i - 1], by_rank[rng->Below(i)]);
  return by_rank;
}

}  // namespace gtrain::sharding
