#include "sharding/ledger/shuffle.h"

#include "base/check.h"

namespace gtrain::sharding {
namespace {

// The finaliser of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
// 2014).
uint64_t Mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

}  // namespace

Shuffle::Shuffle(int64_t n, uint64_t seed, int64_t epoch) : n_(static_cast<uint64_t>(n)) {
  GT_CHECK(n > 0 && n <= int64_t{1} << 60);
  while (uint64_t{1} << (2 * half_bits_) < n_) ++half_bits_;
  // The epoch is mixed before it meets the seed, so that (seed, epoch + 1) is no order of (seed + 1, epoch).
  uint64_t key = Mix(seed) ^ Mix(Mix(static_cast<uint64_t>(epoch)));
  for (uint64_t& round : keys_) round = key = Mix(key);
}

int64_t Shuffle::At(int64_t position) const {
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  uint64_t value = static_cast<uint64_t>(position);
  do {
    uint64_t left = value >> half_bits_, right = value & mask;
    for (const uint64_t key : keys_) {
      const uint64_t next = left ^ (Mix(right ^ key) & mask);
      left = right;
      right = next;
    }
    value = left << half_bits_ | right;
  } while (value >= n_);
  return static_cast<int64_t>(value);
}

}  // namespace gtrain::sharding
