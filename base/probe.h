// GT_PROBE("outbox.covered_grant_dropped"): says that a rare branch was taken. The simulator lists every
// probe of the program, the ones never reached too. Costs a relaxed increment; not for inline functions or
// templates.
#pragma once
#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

namespace gtrain {

struct Probe {
  const char* name;
  std::atomic<uint64_t> hits;
};

// Every probe linked into this program with its hits so far, by name; several places may share one.
std::vector<std::pair<const char*, uint64_t>> Probes();

}  // namespace gtrain

#define GT_PROBE(probe_name)                                                                                 \
  do {                                                                                                       \
    __attribute__((section("gtrain_probes"), used)) static constinit ::gtrain::Probe gt_probe = {probe_name, \
                                                                                                 {0}};       \
    gt_probe.hits.fetch_add(1, std::memory_order_relaxed);                                                   \
  } while (false)
