// A job as a person gives it: a file, flags over it, or a command after "--". One path for
// launch, validate and plan.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "job/spec/parse.h"
#include "launcher/cli/args.h"

namespace gtrain::cli {

// The flags that overlay a job file: -n, --set, --env, --name, --hosts, --exclude, --rank0-host, --rankfile.
std::vector<Flag> JobFlags();

// The flags of JobFlags for so many ranks; with `nodes`, equally many on each of them.
absl::StatusOr<std::vector<std::string>> RanksFlags(int64_t ranks, std::optional<int64_t> nodes);

struct JobInput {
  spec::JobSpec spec;
  std::string shown_name;  // the file, or "command line"
  std::string note;        // what a launch says of flags over the file; empty: nothing
};

// Reads and checks. Errors of the job are printed to stderr, one a line ("file:line:column: message"),
// and InvalidArgument says how many there were. Never blocks on what is not a regular file (fault J13).
absl::StatusOr<JobInput> ReadJob(const Args& args);

// The absolute current directory.
absl::StatusOr<std::string> CurrentDir();

// This process's environment. The only reader of it besides paths.cc.
std::map<std::string, std::string> Environment();

}  // namespace gtrain::cli
