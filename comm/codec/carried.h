// Arrays that a codec carries over from step to step: float32, or bfloat16 rounded at random, up with the
// probability of what rounding down would lose. So what is rounded away is zero on average, where rounding to
// nearest would lose the same small gradient step after step.
//
// The random bits are a function of a seed (made of the step) and the element's index, so the same on every
// processor and for every way through the array. A word of them serves two elements, `index` and `index +
// 16`, which also share a word of memory, the first in its lower half: a vector of words becomes two vectors
// of floats, and back, without moving anything between lanes. An array is 4 or 2 bytes an element, and no
// scratch is needed. PURE.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace gtrain::comm {

// Elements in a block of words; arrays, and parts of them that are worked on alone, begin with whole blocks.
inline constexpr size_t kHalvesBlock = 32;
// Nothing finite becomes infinite.
inline constexpr float kLargestHalf = 0x1.fep127f;

inline constexpr uint32_t kHashStep = 0x9e3779b9, kHashFactor = 0x21f0aaad;

inline size_t WordOf(size_t index) { return index / kHalvesBlock * 16 + index % 16; }
inline bool InUpperHalf(size_t index) { return (index & 16) != 0; }
inline size_t PlaceOf(size_t index) { return WordOf(index) * 2 + (InUpperHalf(index) ? 1 : 0); }

inline uint32_t RandomWord(uint32_t seed, uint32_t word) {
  uint32_t x = seed + word * kHashStep;
  x = (x ^ (x >> 16)) * kHashFactor;
  return x ^ (x >> 15);
}
// Two arrays of one step do not share their seed.
inline uint32_t OtherSeed(uint32_t seed) { return ~seed; }

// `index`: of the element in the whole gradient.
inline uint16_t RoundAtRandom(float value, uint32_t seed, size_t index) {
  const uint32_t word = RandomWord(seed, static_cast<uint32_t>(WordOf(index)));
  const uint32_t random = InUpperHalf(index) ? word >> 16 : word & 0xffff;
  const float bounded = std::clamp(value, -kLargestHalf, kLargestHalf);
  return static_cast<uint16_t>((std::bit_cast<uint32_t>(bounded) + random) >> 16);
}

// Element `index` of an array, which is null for one of zeros.
inline float CarriedAt(const float* array, size_t index) { return array[index]; }
inline float CarriedAt(const uint16_t* array, size_t index) {
  return std::bit_cast<float>(static_cast<uint32_t>(array[PlaceOf(index)]) << 16);
}

// `first`: index of the array's first element in the whole gradient.
inline void Carry(float value, uint32_t, size_t, size_t index, float* array) { array[index] = value; }
inline void Carry(float value, uint32_t seed, size_t first, size_t index, uint16_t* array) {
  array[PlaceOf(index)] = RoundAtRandom(value, seed, first + index);
}

}  // namespace gtrain::comm
