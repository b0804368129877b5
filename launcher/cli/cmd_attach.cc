#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "launcher/cli/context.h"
#include "launcher/cli/follow.h"
#include "launcher/cli/target.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"

namespace gtrain::cli {
namespace {

absl::StatusOr<int> Attach(const Args& args) {
  GT_ASSIGN_OR_RETURN(Target target, FindTarget(args));
  if (target.cluster) return Follow(*target.cluster, target.job.id, {});
  Complain(absl::StrCat(OverText(target.job), ". `gtrain logs ", SafeText(target.job.id),
                        "` shows what its ranks wrote"));
  return ExitCodeOf(target.job);
}

int RunAttach(const Args& args) {
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
      "JOB is an id, or a name: then the only job of that name that runs, else the newest that is over. "
      "Without it,\nthe only job that runs.\n"
      "Shows the output of the current generation from its beginning; the exit code is the job's.\n"
      "Ctrl-C detaches: the job goes on, here and on a cluster. `gtrain stop` ends it.\n\n"
      "  gtrain attach fashion-mnist-1";
  verb.flags = {ContextFlag()};
  verb.completes = Completes::kLiveJobs;
  verb.words_max = 1;
  verb.run = RunAttach;
  return verb;
}

}  // namespace gtrain::cli
