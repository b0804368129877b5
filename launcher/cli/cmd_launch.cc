// `gtrain launch`: reads and checks the job, finds or starts the cluster, submits once (the request id makes
// a repeated submit harmless), then follows the job.
#include <signal.h>

#include <optional>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "launcher/cli/console.h"
#include "launcher/cli/follow.h"
#include "launcher/cli/job_input.h"
#include "launcher/cli/resume.h"
#include "launcher/cli/submit.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"

namespace gtrain::cli {
namespace {

bool HasOneRank(const spec::JobSpec& spec) {
  return spec.ranks && spec.ranks->min == 1 && spec.ranks->max == 1;
}

absl::Status CheckInput(const Args& args, const spec::JobSpec& spec) {
  if (args.Has("tty")) {
    GT_RETURN_IF_ERROR(CheckTerminal("launch"));
    if (!HasOneRank(spec)) {
      return absl::InvalidArgumentError(
          "launch -t: a terminal is for a job of one rank (-n 1). With -i alone rank 0 of several gets "
          "stdin");
    }
  }
  if (spec.takes_input && args.Has("detach")) {
    return absl::InvalidArgumentError(
        "launch: who gives input (-i, -t, `stdin: true`) has to stay: leave -d away");
  }
  return absl::OkStatus();
}

// The terminal is rank 0's until the job is over; output that comes too late for that is in the log.
absl::StatusOr<int> FollowInTerminal(Cluster& cluster, const std::string& job) {
  FollowOptions options{.ctrl_c_stops = cluster.is_own()};
  int signal = 0;
  {
    SignalPipe signals;
    signals.AlsoWindowSize();
    const absl::StatusOr<ConsoleEnd> end =
        RunRankConsoles(cluster, {.job = job, .terminal = true, .signals = &signals});
    if (end.ok()) {
      signal = end->signal;
      options.shown_generation = end->generation;
      options.shown_bytes = end->shown_bytes;
    } else {
      Complain(SafeText(std::string(end.status().message())));
    }
  }
  if (signal != 0 && signal != SIGINT) return 128 + signal;
  EndOnCtrlC(2, "interrupted");
  if (signal == SIGINT) raise(SIGINT);  // for whom follows now
  return Follow(cluster, job, options);
}

absl::StatusOr<int> Launch(const Args& args) {
  if (args.Has("json") && !args.Has("detach")) {
    return absl::InvalidArgumentError(
        "--json needs -d: a launch that follows its job shows what the ranks write. `gtrain launch -d "
        "--json` "
        "prints the job's id, `gtrain status --json JOB` the rest");
  }
  EndOnCtrlC(1, "interrupted; no job was submitted");
  GT_ASSIGN_OR_RETURN(const JobInput input, ReadJob(args));
  GT_RETURN_IF_ERROR(CheckInput(args, input.spec));
  if (!input.note.empty()) Complain(SafeText(input.note));
  GT_ASSIGN_OR_RETURN(Submitted submitted, SubmitJob(args, input.spec));
  if (args.Has("detach")) {
    const std::string said = args.Has("json") ? submitted.json : SafeText(submitted.job);
    if (Print(said + "\n")) return kDone;
    Complain(absl::StrCat("job ", submitted.job, " was submitted and goes on"));
    return kFailed;
  }
  Cluster& cluster = submitted.cluster;
  Complain(
      absl::StrCat("job ", submitted.job, " on ",
                   cluster.is_own() ? absl::StrCat("the ", cluster.name(), " cluster") : cluster.name()));
  if (args.Has("tty")) return FollowInTerminal(cluster, submitted.job);
  std::optional<InputFeeder> feeder;
  if (input.spec.takes_input) feeder.emplace(args, submitted.job);
  return Follow(cluster, submitted.job,
                {.from_start = true,
                 .ctrl_c_stops = cluster.is_own(),
                 .tell_restore = input.spec.checkpoint.uri.empty()});
}

int RunLaunch(const Args& args) {
  const absl::StatusOr<int> code = Launch(args);
  return code.ok() ? *code : Report(code.status());
}

}  // namespace

Verb LaunchVerb() {
  Verb verb;
  verb.name = "launch";
  verb.summary = "Run a job file or a command, and follow it to its end";
  verb.usage = "[flags] JOB.yaml | -- CMD ARGS";
  verb.details =
      "Without a cluster it starts one of your own on this machine, which ends after its last job.\n"
      "Ctrl-C stops a local job (it may save; a second one stops now) and detaches from a cluster's job; "
      "closing\n"
      "the terminal detaches. The exit code is the job's: 0, 1, 93, 128+N; 2 when nothing was started.\n\n"
      "  gtrain launch job.yaml\n"
      "  gtrain launch -n 4 -- python train.py --lr 1e-3\n"
      "  gtrain launch job.yaml --set checkpoint.every=60s --env LR=0.1\n"
      "  gtrain launch -n 1 -it -- python -m pdb train.py        in this terminal\n"
      "  gtrain launch job.yaml --exclude tux[3,7]      not on these machines\n"
      "  gtrain launch job.yaml --rankfile ranks.txt    rank by rank where `gtrain status JOB "
      "--rankfile-out` had "
      "them\n"
      "  gtrain launch -d job.yaml                      print the job's id and return\n"
      "  gtrain launch job.yaml --fresh                 do not resume from the checkpoints that are there";
  verb.flags = JobFlags();
  for (Flag& flag : ResumeFlags()) verb.flags.push_back(std::move(flag));
  verb.flags.push_back({"interactive", 'i', "", "stdin is rank 0's"});
  verb.flags.push_back(
      {"tty", 't', "", "the one rank runs in this terminal, and is not started again if it fails"});
  verb.flags.push_back({"detach", 'd', "", "return once the job is accepted"});
  verb.flags.push_back(
      {"run-dir", '\0', "DIR", "logs and reports go to DIR/<job id>-<cluster>; default ./gtrain-runs"});
  verb.flags.push_back({"json", '\0', "", "with -d: one JSON document with job and run_dir"});
  verb.flags.push_back(ContextFlag());
  verb.words_max = 1;
  verb.takes_rest = true;
  verb.run = RunLaunch;
  return verb;
}

}  // namespace gtrain::cli
