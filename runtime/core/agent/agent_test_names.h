// The names of jobs and nodes in the tests of the agent's core.
#pragma once
#include "runtime/core/values/messages.h"

namespace gtrain::core {

inline const NodeId kMe("00000000000000aa");
inline const JobId kJob("train-1");

}  // namespace gtrain::core
