// Randomness as a parameter. Only FromSystem() reads the system's entropy.
// Algorithm: xoshiro256** 1.0 (Blackman and Vigna, 2018), seeded by splitmix64.
#pragma once
#include <array>
#include <cstdint>

namespace gtrain {

// Not thread-safe. Equal seeds give equal sequences on every platform.
class Rng {
 public:
  explicit Rng(uint64_t seed);
  static Rng FromSystem();

  uint64_t Next();
  uint64_t Below(uint64_t bound);  // uniform in [0, bound); bound > 0
  double Unit();                   // uniform in [0, 1)
  bool Chance(double probability) { return Unit() < probability; }

  // For <random> and std::shuffle.
  using result_type = uint64_t;
  static constexpr uint64_t min() { return 0; }
  static constexpr uint64_t max() { return ~uint64_t{0}; }
  uint64_t operator()() { return Next(); }

 private:
  std::array<uint64_t, 4> state_;
};

}  // namespace gtrain
