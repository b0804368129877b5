// RateLimit: so many at once, and then so many a second (a token bucket). PURE.
#pragma once
#include <algorithm>

#include "absl/time/time.h"
#include "base/clock.h"

namespace gtrain {

// A small value; not thread-safe.
class RateLimit {
 public:
  // Begins with the whole burst.
  RateLimit(double burst, double per_second, Instant now)
      : burst_(burst), per_second_(per_second), left_(burst), at_(now) {}

  // True: there is one left, and it is taken.
  bool Take(Instant now) {
    left_ = std::min(burst_, left_ + per_second_ * absl::ToDoubleSeconds(now - at_));
    at_ = now;
    if (left_ < 1) return false;
    left_ -= 1;
    return true;
  }
  Instant asked_at() const { return at_; }  // last

 private:
  double burst_, per_second_, left_;
  Instant at_;
};

}  // namespace gtrain
