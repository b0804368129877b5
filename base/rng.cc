#include "base/rng.h"

#include <sys/random.h>

#include <bit>

#include "base/check.h"

namespace gtrain {

Rng::Rng(uint64_t seed) {
  for (uint64_t& word : state_) {
    seed += 0x9e3779b97f4a7c15;
    uint64_t z = seed;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    word = z ^ (z >> 31);
  }
}

Rng Rng::FromSystem() {
  uint64_t seed = 0;
  GT_CHECK(getrandom(&seed, sizeof seed, 0) == sizeof seed);
  return Rng(seed);
}

uint64_t Rng::Next() {
  const uint64_t result = std::rotl(state_[1] * 5, 7) * 9;
  const uint64_t t = state_[1] << 17;
  state_[2] ^= state_[0];
  state_[3] ^= state_[1];
  state_[1] ^= state_[2];
  state_[0] ^= state_[3];
  state_[2] ^= t;
  state_[3] = std::rotl(state_[3], 45);
  return result;
}

uint64_t Rng::Below(uint64_t bound) {
  GT_CHECK(bound > 0);
  const uint64_t limit = max() - max() % bound;  // rejection keeps it uniform
  uint64_t value = Next();
  while (value >= limit) value = Next();
  return value % bound;
}

double Rng::Unit() { return static_cast<double>(Next() >> 11) * 0x1.0p-53; }

}  // namespace gtrain
