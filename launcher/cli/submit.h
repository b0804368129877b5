// Sending a job to the head. One path for launch and bench.
#pragma once
#include <string>

#include "absl/status/statusor.h"
#include "job/spec/job_spec.h"
#include "launcher/cli/args.h"
#include "launcher/cli/context.h"

namespace gtrain::cli {

struct Submitted {
  Cluster cluster;
  std::string job;   // its id
  std::string json;  // the head's whole answer
};

// The cluster, the run directory and what to resume from are those of the flags. Starts the local cluster if
// it is used and does not run; on it a program or folder that is not there is an error now.
absl::StatusOr<Submitted> SubmitJob(const Args& args, const spec::JobSpec& spec);

}  // namespace gtrain::cli
