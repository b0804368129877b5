// Counts what a program allocates: takes the place of operator new in the test that links it. All threads.
#pragma once
#include <cstdint>

namespace gtrain {

int64_t AllocatedBytes();      // now
int64_t PeakAllocatedBytes();  // the most since the last reset
void ResetPeakAllocatedBytes();

}  // namespace gtrain
