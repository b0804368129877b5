// What every wait loop of a collective asks: is the generation alive, is there time left?
#pragma once
#include <optional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "comm/port/bootstrap.h"

namespace gtrain::comm {

// Made for one operation and asked by one thread. Time runs from the first question: an operation that never
// waits never reads a clock.
class Watch {
 public:
  Watch(const Bootstrap* bootstrap, absl::Duration timeout) : bootstrap_(bootstrap), timeout_(timeout) {}

  // Unavailable with the reason once the generation is over; DeadlineExceeded when time is up.
  absl::Status Check() const;
  // Time left, at least zero.
  absl::Duration Left() const;
  absl::Duration timeout() const { return timeout_; }
  // Since the first question; zero if there was none.
  absl::Duration Waited() const;

 private:
  Instant Deadline() const;

  const Bootstrap* bootstrap_;
  absl::Duration timeout_;
  mutable std::optional<Instant> deadline_;
};

}  // namespace gtrain::comm
