// How often to save when nobody said it: saving costs time, not saving costs the work since the last save.
#pragma once
#include <string>

#include "absl/time/time.h"

namespace gtrain::ckpt {

struct IntervalInput {
  absl::Duration stall;     // of the last save: what training waited for
  absl::Duration writing;   // of the last save: from its beginning to its commit, beside training
  int interruptions = 0;    // generations of this job that ended so far
  absl::Duration observed;  // over how long
};

struct Interval {
  absl::Duration every;
  std::string reason;  // one sentence for people
};

// J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
// Generation Computer Systems 22 (2006), equation 37; to first order it is Young's sqrt(2 cost MTBF). The
// mean time between interruptions begins as one in eight hours and becomes what is seen.
Interval ChooseInterval(const IntervalInput& input);

}  // namespace gtrain::ckpt
