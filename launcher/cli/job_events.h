// The history of a job, as the head tells it and the run directory, where this machine sees it.
#pragma once
#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "launcher/cli/args.h"

namespace gtrain::cli {

// One JSON object: the answer to ClientWhy, or where no head answers what the job left, which is said on
// stderr. A head keeps a job's newest events, and only its own: `events` begins with those of all heads, as
// far as the last `bytes_max` of events.jsonl go. `word`: an id, a name, a run directory, or nothing for the
// job that FindJob chooses.
absl::StatusOr<std::string> WhyWithEvents(const Args& args, const std::string& word,
                                          size_t bytes_max = 256 << 10);

}  // namespace gtrain::cli
