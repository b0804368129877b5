#include <cstdio>
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/json_text.h"
#include "base/status_macros.h"
#include "job/spec/parse.h"
#include "launcher/cli/console.h"
#include "launcher/cli/context.h"
#include "launcher/cli/target.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"

namespace gtrain::cli {
namespace {

using nlohmann::json;

constexpr int kTimedOut = 124;  // as timeout(1) does

// The exit code of the command.
absl::StatusOr<int> CodeOf(const json& reply) {
  const auto code = reply.find("exit_code");
  if (code == reply.end() || !code->is_number_integer()) {
    return absl::UnavailableError(
        "exec: the head is of an older version and does not say how the command ended: upgrade it");
  }
  if (reply.value("timed_out", false)) {
    Complain(absl::StrCat(
        "exec: the command ran into the time limit of `gtrain exec` and was ended; exit code ", kTimedOut));
    return kTimedOut;
  }
  return code->get<int>();
}

// Runs the command with input, as it comes.
absl::StatusOr<int> ExecWithInput(const Args& args, Cluster& cluster, const JobDoc& job, int rank) {
  SignalPipe signals;
  const bool terminal = args.Has("tty");
  if (terminal) signals.AlsoWindowSize();
  ConsoleInput input;
  GT_ASSIGN_OR_RETURN(
      const ConsoleEnd end,
      RunConsole(cluster,
                 {.job = job.id, .rank = rank, .argv = *args.rest, .terminal = terminal, .signals = &signals},
                 input));
  return end.signal != 0 ? 128 + end.signal : end.exit_code.value_or(kFailed);
}

absl::StatusOr<int> Exec(const Args& args) {
  if (!args.rest || args.rest->empty()) return absl::InvalidArgumentError("exec: give a command after --");
  const bool with_input = args.Has("interactive") || args.Has("tty");
  if (with_input && args.Has("json"))
    return absl::InvalidArgumentError(
        "exec: --json is one document at the end, -i and -t are not: leave one away");
  if (args.Has("tty")) GT_RETURN_IF_ERROR(CheckTerminal("exec"));
  GT_ASSIGN_OR_RETURN(const std::optional<int64_t> rank, args.Int("rank", 0, spec::kRanksMax));
  GT_ASSIGN_OR_RETURN(Target target, FindLiveTarget(args));
  Cluster& cluster = *target.cluster;
  const JobDoc& job = target.job;
  if (with_input) return ExecWithInput(args, cluster, job, static_cast<int>(rank.value_or(0)));
  GT_ASSIGN_OR_RETURN(const std::string text, Ask(cluster,
                                                  core::ClientExec{.job = JobId(job.id),
                                                                   .rank = static_cast<int>(rank.value_or(0)),
                                                                   .argv = *args.rest,
                                                                   .apart = true},
                                                  absl::Seconds(60)));
  const json reply = json::parse(text, nullptr, false);
  if (!reply.is_object()) return absl::InternalError("the head's answer is not a JSON object");
  if (args.Has("json")) {
    Print(text + "\n");
  } else {
    Print(absl::StrCat(TextOf(reply, "text"), TextOf(reply, "stdout")));  // `text`: of an older head
    const std::string words = TextOf(reply, "stderr");
    // Said by the keeper in the place of a command that did not begin.
    const bool never_ran = absl::StartsWith(words, absl::StrCat("cannot run ", args.rest->front(), ": "));
    const std::string said = absl::StrCat(never_ran ? "gtrain: " : "", words);
    std::fwrite(said.data(), 1, said.size(), stderr);  // with what may be binary in it
  }
  return CodeOf(reply);
}

int RunExec(const Args& args) {
  const absl::StatusOr<int> code = Exec(args);
  return code.ok() ? *code : Report(code.status());
}

}  // namespace

Verb ExecVerb() {
  Verb verb;
  verb.name = "exec";
  verb.summary = "Run a command once beside a rank, with its environment";
  verb.usage = "[-i] [-t] [--rank R] [JOB] -- CMD ARGS";
  verb.details =
      "Prints what the command printed, and ends with its exit code: 128+N if it died of signal N, 124 if it "
      "ran\n"
      "longer than 9 s and was ended. Without input and without a terminal.\n\n"
      "With -i it gets what is given to this command, and its output is shown as it comes, for as long as "
      "it\n"
      "runs. -t gives it a terminal of the size of this one, in which every key goes to it, Ctrl-C too. "
      "When\n"
      "this command ends or loses the way to it, it gets the end of its input and SIGHUP, 4 s later "
      "SIGKILL.\n\n"
      "  gtrain exec --rank 3 fashion-mnist-1 -- nvidia-smi\n"
      "  gtrain exec -- env\n"
      "  gtrain exec -it --rank 0 -- bash\n"
      "  gtrain exec -i -- tar cz /scratch/logs > logs.tgz < /dev/null\n"
      "  gtrain exec --json -- sh -c 'df /scratch; exit 3'     {\"exit_code\": 3, \"stdout\": ..., "
      "\"hostname\": "
      "...}";
  verb.flags = {{"rank", '\0', "R", "beside which rank; default 0"},
                {"interactive", 'i', "", "stdin is the command's, and there is no time limit"},
                {"tty", 't', "", "in a terminal, with input: stdin must be one"},
                ContextFlag(),
                {"json", '\0', "", "one document: exit code, stdout, stderr, rank, host"}};
  verb.completes = Completes::kLiveJobs;
  verb.words_max = 1;
  verb.takes_rest = true;
  verb.run = RunExec;
  return verb;
}

}  // namespace gtrain::cli
