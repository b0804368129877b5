// What every wait loop of a collective asks: is the generation alive, is there time left?
#pragma once
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "comm/port/bootstrap.h"

namespace gtrain::comm {

// Made for one operation. Thread-safe.
class Watch {
 public:
  Watch(const Bootstrap* bootstrap, absl::Duration timeout);

  // Unavailable with the reason once the generation is over; DeadlineExceeded when time is up.
  absl::Status Check() const;
  // Time left, at least zero.
  absl::Duration Left() const;
  absl::Duration timeout() const { return timeout_; }

 private:
  const Bootstrap* bootstrap_;
  absl::Duration timeout_;
  bool forever_;
  Instant deadline_;
};

}  // namespace gtrain::comm
