// Part of bench_elastic: a whole training that loses a rank every few seconds.
#pragma once
#include "bench/harness.h"

namespace gtrain::bench {

inline constexpr char kFashion[] = "fashion";  // for --only

// fashion_mnist on four ranks in place, undisturbed and then with a rank killed every five seconds for five
// minutes, or as long as it trains. Prints what the kills cost. Returns the exit status of main(): 1 when a
// survivor lost its process, a kill cost more than the step in flight, the accuracy is more than 0.3 points
// away from that of the undisturbed training, or `gtrain data audit` finds a sample that was not trained
// once.
int MeasureFashion(const Options& options);

}  // namespace gtrain::bench
