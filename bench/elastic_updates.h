// What processes of an elastic program have written of their updates: DIR/trained.PID with a line each,
// "GENERATION STEP NANOSECONDS ...".
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <vector>

namespace gtrain::bench {

struct Applied {
  int generation = 0;
  int64_t step = 0, at_ns = 0;  // of the machine's monotonic clock
  int64_t fourth = 0;           // the number behind these, where there is one
};

// All of them, in order; a line that is not whole yet is left out.
std::map<pid_t, std::vector<Applied>> ReadUpdates(const std::filesystem::path& folder);
// The last one of each process that lives, whatever it wrote before.
std::map<pid_t, Applied> LastUpdates(const std::filesystem::path& folder);
bool Lives(pid_t pid);
int64_t NowNs();  // of that clock

}  // namespace gtrain::bench
