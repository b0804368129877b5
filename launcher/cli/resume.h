// Decides what a new launch does about checkpoints that are already in the job's directory: it says what it
// resumes, and refuses to continue another job's without being told to.
#pragma once
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "job/spec/job_spec.h"
#include "launcher/cli/args.h"

namespace gtrain::cli {

std::vector<Flag> ResumeFlags();

struct Resume {
  std::string wanted;  // the `resume` of the submit: "", "latest", "fresh", a step or a uri
  std::string news;    // what was found, for people, once the submit is accepted; "": nothing
};

// InvalidArgument when the newest committed checkpoint belongs to a job with another hash and neither flag
// says what to do, and when --resume names what is not there. `run_dirs`: where this job's run directory will
// be, and perhaps that job's is. `local`: the ranks see the files that this process sees.
absl::StatusOr<Resume> ChooseResume(const Args& args, const spec::JobSpec& spec, const std::string& run_dirs,
                                    bool local);

}  // namespace gtrain::cli
