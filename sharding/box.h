// A box of elements of a tensor.
#pragma once
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"

namespace gtrain::sharding {

struct Interval {
  int64_t begin = 0;
  int64_t size = 0;
  // The largest number where there is none for it: boxes are looked at before they are known to be inside.
  int64_t end() const {
    int64_t sum = 0;
    return __builtin_add_overflow(begin, size, &sum) ? std::numeric_limits<int64_t>::max() : sum;
  }
  auto operator<=>(const Interval&) const = default;
};
// One interval a dimension, outermost first. Memory of a box is dense, row by row.
using Box = absl::InlinedVector<Interval, 4>;

Box WholeBox(const std::vector<int64_t>& shape);
uint64_t Elements(const Box& box);  // 1 without dimensions
bool Overlaps(const Box& a, const Box& b);
// "[0:4,8:16]"
std::string Describe(const Box& box);

}  // namespace gtrain::sharding
