// Jobs that measure: gtrain-bench, or a peer's launcher, run like any other job, on the cluster that a
// training would run on. One path for `gtrain bench` and `gtrain topology measure`.
#pragma once
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "launcher/cli/args.h"

namespace gtrain::cli {

struct BenchJob {
  std::string what;  // for people
  std::vector<std::string> command;
  int ranks = 1;
  std::optional<int64_t> nodes = std::nullopt;
  std::vector<std::string> settings = {};  // as of --set
  bool show = true;                        // what the ranks write on stdout; false: it is rank 0's alone
  bool ctrl_c_stops = false;               // else only where the cluster is this command's own
};

// The folder of this program, where gtrain-bench is, too.
absl::StatusOr<std::filesystem::path> OwnFolder();

// Runs it to its end and returns the lines of its ranks. `args` may have --context, --run-dir and --env.
// Unavailable: it did not succeed, which was said on stderr.
absl::StatusOr<std::vector<std::string>> RunBenchJob(const Args& args, const BenchJob& job);

}  // namespace gtrain::cli
