// Time as a parameter. Cores receive Instants; only clock.cc reads a clock.
#pragma once
#include <compare>
#include <cstdint>
#include <limits>
#include <string>

#include "absl/time/time.h"

namespace gtrain {

// A point on the monotonic clock of one machine. Never sent to another machine
// and never compared with one made there.
struct Instant {
  int64_t ns = 0;
  auto operator<=>(const Instant&) const = default;
  // Saturating: a duration that somebody sent may be longer than any clock runs.
  Instant operator+(absl::Duration d) const {
    const int64_t by = absl::ToInt64Nanoseconds(d);
    int64_t sum = 0;
    if (!__builtin_add_overflow(ns, by, &sum)) return {sum};
    return {by > 0 ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int64_t>::min()};
  }
  Instant operator-(absl::Duration d) const { return *this + -d; }
  absl::Duration operator-(Instant other) const { return absl::Nanoseconds(ns - other.ns); }
};

// Thread-safe. Implementations: RealClock, ManualClock (tests, simulator).
class Clock {
 public:
  virtual ~Clock() = default;
  virtual Instant Now() const = 0;         // for every decision
  virtual absl::Time WallNow() const = 0;  // for people, and for what must outlive this process
};

class RealClock final : public Clock {
 public:
  Instant Now() const override;
  absl::Time WallNow() const override;
};

// A wall that shows the same time wherever a test or a simulation says that it is `now`.
inline absl::Time ManualWall(Instant now) {
  return absl::FromUnixSeconds(1'800'000'000) + absl::Nanoseconds(now.ns);
}

// Not thread-safe: one owner advances it.
class ManualClock final : public Clock {
 public:
  Instant Now() const override { return now_; }
  absl::Time WallNow() const override { return ManualWall(now_); }
  void Advance(absl::Duration d) { now_ = now_ + d; }

 private:
  Instant now_;
};

}  // namespace gtrain
