// The median of measured numbers. PURE.
#pragma once
#include <algorithm>
#include <vector>

#include "base/check.h"

namespace gtrain::cli {

// Of an even count the mean of the two in the middle. At least one number.
inline double MedianOf(std::vector<double> values) {
  GT_CHECK(!values.empty());
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

}  // namespace gtrain::cli
