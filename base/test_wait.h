// The wait of tests for what nobody tells them of.
#pragma once
#include "absl/functional/function_ref.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/clock.h"

namespace gtrain {

// Looks every 2 ms until `condition` holds; false: it did not within `patience`.
inline bool Until(absl::FunctionRef<bool()> condition, absl::Duration patience = absl::Seconds(60)) {
  const RealClock clock;
  for (const Instant deadline = clock.Now() + patience; !condition(); absl::SleepFor(absl::Milliseconds(2))) {
    if (clock.Now() > deadline) return false;
  }
  return true;
}

}  // namespace gtrain
