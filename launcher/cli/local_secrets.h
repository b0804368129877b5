// The secrets of a job on the local cluster come from the environment of the command that launches it,
// whoever started the cluster and with what. The head's records hold none, so they travel in files of the
// user's own, <cluster>/secrets/<random>/<variable>, 0600 in a folder of 0700, which the ranks' agent reads
// at each start of a generation. They are removed when the cluster ends because no job is left.
#pragma once
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "launcher/spec/job_spec.h"

namespace gtrain::cli {

// InvalidArgument names the first variable under `secrets:` that this process's environment lacks.
absl::Status CheckSecretsAreSet(const spec::JobSpec& spec);

// The same job with files for the variables under `secrets:`; writes them.
absl::StatusOr<spec::JobSpec> KeepSecrets(const std::string& cluster_dir, spec::JobSpec spec);

// Those of jobs that are over: all but what was kept within the last minute, whose job may be on its way.
void DropSecrets(const std::string& cluster_dir);

}  // namespace gtrain::cli
