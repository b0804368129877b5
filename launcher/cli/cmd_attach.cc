#include "base/status_macros.h"
#include "launcher/cli/context.h"
#include "launcher/cli/follow.h"
#include "launcher/cli/verbs.h"

namespace gtrain::cli {
namespace {

absl::StatusOr<int> Attach(const Args& args) {
  GT_ASSIGN_OR_RETURN(Cluster cluster, OpenCluster(args, Start::kIfDied));
  GT_ASSIGN_OR_RETURN(const JobDoc job, FindJob(cluster, args.words.empty() ? "" : args.words[0]));
  return Follow(cluster, job.id, {});
}

int Run(const Args& args) {
  const absl::StatusOr<int> code = Attach(args);
  return code.ok() ? *code : Report(code.status());
}

}  // namespace

Verb AttachVerb() {
  Verb verb;
  verb.name = "attach";
  verb.summary = "Follow a running job as launch does";
  verb.usage = "[JOB]";
  verb.details =
      "JOB is an id, or a name: then the newest of that name. Without it, the only job that runs.\n"
      "Shows the output of the current generation from its beginning; the exit code is the job's.\n"
      "Ctrl-C detaches: the job goes on, here and on a cluster. `gtrain stop` ends it.\n\n"
      "  gtrain attach fashion-mnist-1";
  verb.flags = {ContextFlag()};
  verb.completes = Completes::kJobs;
  verb.words_max = 1;
  verb.run = Run;
  return verb;
}

}  // namespace gtrain::cli
