// 10,000 actors of one owner in 64 simulated processes: made, called, lost with their processes, made anew
// and called again; and what each of them costs.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "tests/sim/kernel.h"

namespace gtrain::sim {

struct FleetResult {
  std::vector<std::string> lines;  // for people
  std::vector<Violation> violations;
};
FleetResult RunFleet(uint64_t seed);

}  // namespace gtrain::sim
