// A job on machines that a spot market gives and takes, played from a recorded trace in virtual time with the
// real cores of head, agents and sessions. docs/formats/spot-run.md has the files and what is assumed.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/sim/kernel.h"

namespace gtrain::sim {

// How many machines there are in each stretch of `gap`.
struct SpotTrace {
  int64_t gap = 300 * kSec;
  std::vector<int> nodes;
};

struct SpotOptions {
  bool in_place = true;           // elastic.mode
  int64_t save_every = kMin;      // 0: checkpoints only where a notice says that a machine goes
  std::optional<int64_t> notice;  // so long before its end a machine hears of it
  uint64_t seed = 1;
  int64_t length = INT64_MAX;  // at most so much of the trace is played
  int ranks_min = 1, ranks_max = 16;
  std::string events;  // a file for what happened; empty: none
  bool trace = false;  // print each event
};

struct SpotResult {
  int64_t seconds = 0, steps = 0, generations = 0;
  int64_t told = 0;  // machines that went and had been told in time
  uint64_t events = 0;
  std::vector<Violation> violations;
};

// NotFound, InvalidArgument: what is wrong with the file, for people.
absl::StatusOr<SpotTrace> ReadSpotTrace(const std::string& path);
// Plays it. Takes about 0.3 s for an hour with 16 machines. Errors: the file for events cannot be written.
absl::StatusOr<SpotResult> RunSpot(const SpotTrace& trace, const SpotOptions& options);

}  // namespace gtrain::sim
