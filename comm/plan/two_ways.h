// Learns which of two ways of doing the same is faster at present. PURE. A hundred bytes and a few operations
// a call, independent of the number of ranks.
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace gtrain::comm {

// Sizes are learned in classes of their own. The answer is a word, so that one rank can decide for all. Not
// thread-safe.
class TwoWays {
 public:
  // Bit c: in class c the second way is to be taken.
  uint64_t choice() const { return choice_; }
  static bool Second(uint64_t choice, uint64_t bytes) { return (choice >> Class(bytes) & 1) != 0; }

  // An operation of `bytes` took so long.
  void Took(bool second, uint64_t bytes, int64_t nanoseconds) {
    Known& known = classes_[Class(bytes)];
    double& cost = known.cost[second ? 1 : 0];
    const double now = static_cast<double>(std::max<int64_t>(1, nanoseconds)) / static_cast<double>(bytes);
    // A rank that lost its core for a moment, or touched its memory for the first time, says nothing about
    // the way. Nothing makes one seem faster than it is.
    cost = cost == 0 ? now : std::min(now, 0.7 * cost + 0.3 * std::min(now, 4 * cost));
    bool next = known.cost[1] != 0 && known.cost[1] < known.cost[0];
    if (known.cost[0] == 0 || known.cost[1] == 0) {
      next = known.cost[1] == 0;
    } else if (LooksAgain(++known.taken)) {
      next = !next;
    }
    const uint64_t bit = uint64_t{1} << Class(bytes);
    choice_ = next ? choice_ | bit : choice_ & ~bit;
  }

  // Every so many operations the slower way gets a chance: machines move virtual processors about. The first
  // chances come early, in case what is known of it was bad luck.
  static constexpr uint64_t kLookAgain = 64;

 private:
  static bool LooksAgain(uint64_t taken) {
    return taken % kLookAgain == 0 || (taken >= 8 && std::has_single_bit(taken));
  }
  static constexpr size_t kClasses = 4;
  struct Known {
    std::array<double, 2> cost = {};  // nanoseconds a byte; 0: not known
    uint64_t taken = 0;
  };
  static size_t Class(uint64_t bytes) {
    return bytes <= 128 << 10 ? 0 : bytes <= 1 << 20 ? 1 : bytes <= 8 << 20 ? 2 : 3;
  }

  std::array<Known, kClasses> classes_;
  uint64_t choice_ = 0;
};

}  // namespace gtrain::comm
