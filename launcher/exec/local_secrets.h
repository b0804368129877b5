// The secrets of a job on the local cluster come from the environment of its own launch, whichever command
// started the cluster. The head's records hold none, so they travel in files of the user's
// own, <cluster>/secrets/<random>/<variable>, 0600 in a folder of 0700, which the ranks' agent reads at each
// start of a generation. They are removed when the cluster ends because no job is left, and at once when the
// launch is refused. A launch on its way holds the lock of <random>.lock beside its folder, so that a head
// that is just ending does not take them for those of a job that is over.
#pragma once
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "job/spec/job_spec.h"

namespace gtrain::exec {

// InvalidArgument names the first variable under `secrets:` that this process's environment lacks, or the
// first value here that is longer than an agent would take.
absl::Status CheckSecretsAreSet(const spec::JobSpec& spec);

struct KeptSecrets {
  spec::JobSpec spec;  // the same job with files for the variables under `secrets:`
  std::string folder;  // of those files; empty: it needed none
  UniqueFd lock;
};
absl::StatusOr<KeptSecrets> KeepSecrets(const std::string& cluster_dir, spec::JobSpec spec);

// Removes the secrets of a launch that was refused.
void Remove(const KeptSecrets& kept);

// Removes the secrets of jobs that are over, which are all but those of launches on their way.
void DropSecrets(const std::string& cluster_dir);

}  // namespace gtrain::exec
