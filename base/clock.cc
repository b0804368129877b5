#include "base/clock.h"

#include <ctime>

#include "absl/time/clock.h"

namespace gtrain {

Instant RealClock::Now() const {
  timespec ts;
  clock_gettime(CLOCK_BOOTTIME, &ts);  // goes on while the machine is suspended, as leases do
  return {static_cast<int64_t>(ts.tv_sec) * 1'000'000'000 + ts.tv_nsec};
}

absl::Time RealClock::WallNow() const { return absl::Now(); }

}  // namespace gtrain
