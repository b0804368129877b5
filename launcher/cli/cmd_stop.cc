#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/json_text.h"
#include "base/status_macros.h"
#include "launcher/cli/context.h"
#include "launcher/cli/target.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"

namespace gtrain::cli {
namespace {

// The document that the head gives for a job that is over.
std::string OverJson(const JobDoc& job) {
  const nlohmann::json answer = {{"job", job.id}, {"state", job.state}, {"stop", "over"}};
  return answer.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

absl::Status Stop(const Args& args) {
  GT_ASSIGN_OR_RETURN(Target target, FindTarget(args));
  const JobDoc& job = target.job;
  if (job.Final() || !target.cluster) {
    Print(absl::StrCat(args.Has("json") ? OverJson(job) : OverText(job), "\n"));
    return absl::OkStatus();
  }
  const bool now = args.Has("now");
  GT_ASSIGN_OR_RETURN(
      const std::string json,
      Ask(*target.cluster, core::ClientStop{JobId(job.id), now, args.Get("reason", "gtrain stop")}));
  // A user who asks twice means it: the head says whether it stops now.
  const auto answer = nlohmann::json::parse(json, nullptr, /*allow_exceptions=*/false);
  const bool at_once = now || (TextOf(answer, "stop") == "now");
  Print(args.Has("json")
            ? json + "\n"
            : absl::StrCat(SafeText(job.id), at_once ? ": stopping now\n"
                                                     : ": stopping; the ranks may save. Again, or --now, "
                                                       "stops at once\n"));
  return absl::OkStatus();
}

int RunStop(const Args& args) {
  const absl::Status status = Stop(args);
  return status.ok() ? kDone : Report(status);
}

}  // namespace

Verb StopVerb() {
  Verb verb;
  verb.name = "stop";
  verb.summary = "End a job: gracefully, or at once with --now";
  verb.usage = "[--now] [JOB]";
  verb.details =
      "Returns when the head has accepted it; the ranks get SIGTERM and `stop_grace` to save (those with a "
      "session are asked by stop_requested, and get SIGTERM near its end). A second stop "
      "is --now.\n\n"
      "  gtrain stop fashion-mnist-1\n"
      "  gtrain stop --now fashion-mnist-1";
  verb.flags = {{"now", '\0', "", "SIGKILL at once"},
                {"reason", '\0', "TEXT", "kept with the job"},
                ContextFlag(),
                {"json", '\0', "", "the head's answer as JSON"}};
  verb.completes = Completes::kLiveJobs;
  verb.words_max = 1;
  verb.run = RunStop;
  return verb;
}

}  // namespace gtrain::cli
