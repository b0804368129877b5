// The history of a job, as the head tells it and the run directory, where this machine sees it.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "launcher/cli/args.h"

namespace gtrain::cli {

// One JSON object: the answer to ClientWhy, or where no head answers what the job left, which is said on
// stderr. A head keeps a job's newest events, and only its own: `events` begins with those of all heads, as
// far as the last `bytes_max` of events.jsonl go. `word`: an id, a name, a run directory, or nothing for the
// job that FindJob chooses. The events.jsonl of a job that is over is the one beside its result, wherever
// that was moved to. `differences` gets a sentence for each event that stands there with the same number and
// says something else, and for each that is missing among those of the answer.
absl::StatusOr<std::string> WhyWithEvents(const Args& args, const std::string& word,
                                          size_t bytes_max = 256 << 10,
                                          std::vector<std::string>* differences = nullptr);

}  // namespace gtrain::cli
