#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "launcher/cli/context.h"
#include "launcher/cli/follow.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"
#include "launcher/spec/parse.h"

namespace gtrain::cli {
namespace {

absl::Status Exec(const Args& args) {
  if (!args.rest || args.rest->empty()) return absl::InvalidArgumentError("exec: give a command after --");
  GT_ASSIGN_OR_RETURN(const std::optional<int64_t> rank, args.Int("rank", 0, spec::kRanksMax));
  GT_ASSIGN_OR_RETURN(Cluster cluster, OpenCluster(args, Start::kIfDied));
  GT_ASSIGN_OR_RETURN(const JobDoc job, FindJob(cluster, args.words.empty() ? "" : args.words[0]));
  GT_ASSIGN_OR_RETURN(
      const std::string text,
      Ask(cluster, core::ClientExec{JobId(job.id), static_cast<int>(rank.value_or(0)), *args.rest},
          absl::Seconds(60)));
  if (args.Has("json")) {
    Print(text + "\n");
    return absl::OkStatus();
  }
  const nlohmann::json reply = nlohmann::json::parse(text, nullptr, false);
  if (!reply.is_object() || !reply.contains("text") || !reply["text"].is_string()) {
    return absl::InternalError("the head's answer holds no text");
  }
  Print(reply["text"].get<std::string>());
  return absl::OkStatus();
}

int Run(const Args& args) {
  const absl::Status status = Exec(args);
  return status.ok() ? kDone : Report(status);
}

}  // namespace

Verb ExecVerb() {
  Verb verb;
  verb.name = "exec";
  verb.summary = "Run a command once beside a rank, with its environment";
  verb.usage = "[--rank R] [JOB] -- CMD ARGS";
  verb.details =
      "Prints what the command printed; without input and without a terminal.\n\n"
      "  gtrain exec --rank 3 fashion-mnist-1 -- nvidia-smi\n"
      "  gtrain exec -- env";
  verb.flags = {{"rank", '\0', "R", "beside which rank; default 0"},
                ContextFlag(),
                {"json", '\0', "", "the answer as JSON"}};
  verb.completes = Completes::kJobs;
  verb.words_max = 1;
  verb.takes_rest = true;
  verb.run = Run;
  return verb;
}

}  // namespace gtrain::cli
