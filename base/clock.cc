#include "base/clock.h"

#include <ctime>

#include "absl/time/clock.h"

namespace gtrain {

Instant RealClock::Now() const {
  timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return {static_cast<int64_t>(ts.tv_sec) * 1'000'000'000 + ts.tv_nsec};
}

absl::Time RealClock::WallNow() const { return absl::Now(); }

}  // namespace gtrain
