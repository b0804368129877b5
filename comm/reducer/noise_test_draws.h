// For tests: random numbers that stand for the noise of a gradient.
#pragma once
#include <cstdint>
#include <numbers>

#include "base/rng.h"

namespace gtrain {

// A random number of mean 0 and deviation 1, from four numbers that are uniformly distributed.
inline float Noise(Rng& rng) {
  const uint64_t bits = rng.Next();
  float sum = 0;
  for (int i = 0; i < 4; ++i) sum += static_cast<float>(bits >> (16 * i) & 0xffff) / 65536 - 0.5f;
  return sum * std::numbers::sqrt3_v<float>;
}

}  // namespace gtrain
