// Permanent schedules as data: commands and expectations, one a line. docs/formats/sim-scenario.md.
#pragma once
#include <string>
#include <vector>

namespace gtrain::sim {

// Runs the text; the sentences of what was not as expected, with their line. `trace` prints every event.
std::vector<std::string> RunScenario(const std::string& text, bool trace);

}  // namespace gtrain::sim
