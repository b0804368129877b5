// The linker gathers the probes of all objects into one section and marks its ends.
#include "base/probe.h"

#include <algorithm>
#include <string>

extern "C" {
extern gtrain::Probe __start_gtrain_probes[] __attribute__((weak, visibility("hidden")));
extern gtrain::Probe __stop_gtrain_probes[] __attribute__((weak, visibility("hidden")));
}

namespace gtrain {

std::vector<std::pair<const char*, uint64_t>> Probes() {
  std::vector<std::pair<const char*, uint64_t>> probes;
  for (Probe* probe = __start_gtrain_probes; probe != __stop_gtrain_probes; ++probe) {
    probes.emplace_back(probe->name, probe->hits.load(std::memory_order_relaxed));
  }
  std::sort(probes.begin(), probes.end(),
            [](const auto& a, const auto& b) { return std::string(a.first) < b.first; });
  return probes;
}

}  // namespace gtrain
