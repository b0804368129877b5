#include "launcher/cli/bench_job.h"

#include <system_error>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "launcher/cli/follow.h"
#include "launcher/cli/job_input.h"
#include "launcher/cli/submit.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"

namespace gtrain::cli {

absl::StatusOr<std::filesystem::path> OwnFolder() {
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) return absl::InternalError(absl::StrCat("/proc/self/exe: ", error.message()));
  return program.parent_path();
}

absl::StatusOr<std::vector<std::string>> RunBenchJob(const Args& args, const BenchJob& job) {
  GT_ASSIGN_OR_RETURN(std::vector<std::string> words, RanksFlags(job.ranks, job.nodes));
  words.insert(words.end(), {"--name", "bench"});
  for (const char* flag : {"context", "run-dir"}) {
    if (args.Has(flag)) words.insert(words.end(), {absl::StrCat("--", flag), args.Get(flag)});
  }
  for (const std::string& setting : job.settings) words.insert(words.end(), {"--set", setting});
  for (const std::string& setting : args.All("env")) words.insert(words.end(), {"--env", setting});
  words.push_back("--");
  words.insert(words.end(), job.command.begin(), job.command.end());
  std::vector<Flag> flags = JobFlags();
  flags.push_back(ContextFlag());
  flags.push_back({"run-dir", '\0', "DIR", ""});
  GT_ASSIGN_OR_RETURN(const Args job_args, ParseArgs(words, flags));
  GT_ASSIGN_OR_RETURN(const JobInput input, ReadJob(job_args));
  GT_ASSIGN_OR_RETURN(Submitted submitted, SubmitJob(job_args, input.spec));
  Complain(absl::StrCat(job.what, ": job ", submitted.job));
  std::vector<std::string> lines;
  const int code = Follow(submitted.cluster, submitted.job,
                          {.from_start = true,
                           .ctrl_c_stops = job.ctrl_c_stops || submitted.cluster.is_own(),
                           .bare = &lines,
                           .show = job.show});
  if (code != kDone) return absl::UnavailableError(absl::StrCat(job.what, ": the job did not succeed"));
  return lines;
}

}  // namespace gtrain::cli
