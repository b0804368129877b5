// The program `gtrain`: finds the verb, parses its flags, runs it. Every verb is one file, cmd_<verb>.cc.
#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/daemon.h"
#include "job/spec/nearest.h"
#include "job/spec/values.h"
#include "launcher/cli/args.h"
#include "launcher/cli/target.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"

namespace gtrain::cli {

namespace {

std::string Overview(const std::vector<Verb>& verbs) {
  std::string out =
      "gtrain launches distributed training and keeps it going.\n\n"
      "  gtrain launch job.yaml                         run a job file\n"
      "  gtrain launch -n 4 -- python train.py          run a command on four ranks\n"
      "  gtrain status                                  what is running\n\nverbs:\n";
  for (const Verb& verb : verbs) {
    if (!verb.hidden)
      absl::StrAppend(&out, "  ", verb.name, std::string(12 - verb.name.size(), ' '), verb.summary, "\n");
  }
  return out +
         "\n`gtrain VERB --help` tells more. Exit codes: 0 done, 1 failed, 2 wrong usage; see docs/cli.md.\n";
}

std::optional<Colour> ColourOf(const std::string& word) {
  if (word == "auto") return Colour::kAuto;
  if (word == "always") return Colour::kAlways;
  return word == "never" ? std::optional(Colour::kNever) : std::nullopt;
}

// A user who asked for JSON reads stdout with a parser: an error is a document, too. Output that is there
// already is one. `verb`: nullptr for one that does not exist.
int ReportAsJson(const Verb* verb, const std::vector<std::string>& argv, int code) {
  const auto end = std::find(argv.begin(), argv.end(), "--");
  const auto gives_json = [](const Flag& f) { return f.name == "json" && f.value_name.empty(); };
  const bool json = std::find(argv.begin(), end, "--json") != end &&
                    (verb == nullptr || std::any_of(verb->flags.begin(), verb->flags.end(), gives_json));
  if (code == kDone || Printed() || !json) return code;
  const nlohmann::json document = {{"error", absl::StrJoin(Errors(), "\n")}};
  Print(document.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
  return code;
}

int RunVerb(const Verb& verb, const std::vector<std::string>& argv) {
  const absl::StatusOr<Args> args = ParseArgs(argv, verb.flags);
  const auto usage = [&](absl::string_view message) {
    Complain(absl::StrCat(verb.name, ": ", message), Tone::kBad);
    Complain(absl::StrCat("usage: gtrain ", verb.name, " ", verb.usage));
    return kUsage;
  };
  if (!args.ok()) return usage(args.status().message());
  const std::optional<Colour> colour = ColourOf(args->Get("color", "auto"));
  if (!colour) return usage("--color is auto, always or never");
  SetColour(*colour);
  if (args->Has("help")) return Print(HelpOf(verb)) ? kDone : kFailed;
  if (args->rest && !verb.takes_rest) return usage("`--` and what follows are not for this verb");
  if (args->words.size() < verb.words_min) return usage("an argument is missing");
  if (args->words.size() > verb.words_max) {
    return usage(absl::StrCat("unexpected argument ", spec::Shown(args->words[verb.words_max]),
                              verb.takes_rest ? "; a command goes after --" : ""));
  }
  if (const absl::Status job = CheckJobWord(verb, *args); !job.ok()) return Report(job);
  return verb.run(*args);
}

// A verb that reports success promises that its output is whole.
int CheckOutput(int code) {
  if (OutputError() == 0) return code;
  Complain(absl::StrCat("the output is not whole, it could not be written: ", strerror(OutputError()),
                        ". Free some space there or write it elsewhere"));
  return code == kDone ? kFailed : code;
}

constexpr int kFilesMin = 64;     // of a client
constexpr int kProcessesMin = 6;  // a client's threads, and a daemon that it starts

int Main(const std::vector<std::string>& argv) {
  const std::vector<Verb> verbs = AllVerbs();
  if (argv.empty()) {
    std::fputs(Overview(verbs).c_str(), stderr);
    return kUsage;
  }
  const std::string& name = argv[0];
  if (name == "--help" || name == "-h" || name == "help") return Print(Overview(verbs)) ? kDone : kFailed;
  const std::string wanted = name == "--version" ? "version" : name;
  std::vector<std::string> names;
  for (const Verb& verb : verbs) {
    if (verb.name == wanted) {
      const std::vector<std::string> rest(argv.begin() + 1, argv.end());
      return ReportAsJson(&verb, rest, RunVerb(verb, rest));
    }
    names.push_back(verb.name);
  }
  // Verbs that people know from Slurm, kubectl, Docker and Ray.
  static const std::map<absl::string_view, std::string> kHabits = {
      {"ps", "status"},     {"queue", "status"}, {"squeue", "status"}, {"list", "status"},
      {"ls", "status"},     {"kill", "stop"},    {"cancel", "stop"},   {"scancel", "stop"},
      {"delete", "stop"},   {"run", "launch"},   {"sbatch", "launch"}, {"srun", "launch"},
      {"submit", "launch"}, {"describe", "why"}, {"sinfo", "nodes"}};
  const auto habit = kHabits.find(name);
  const std::string nearest = habit != kHabits.end() ? habit->second : spec::Nearest(name, names);
  Complain(absl::StrCat("unknown verb ", spec::Shown(name),
                        nearest.empty() ? ";" : absl::StrCat("; did you mean ", nearest, "?"),
                        " `gtrain --help` lists them"),
           Tone::kBad);
  return ReportAsJson(nullptr, argv, kUsage);
}

}  // namespace
}  // namespace gtrain::cli

int main(int argc, char** argv) {
  gtrain::OpenStandardFiles();
  signal(SIGPIPE, SIG_IGN);  // a closed pipe is an error of write, not an end in the middle
  signal(SIGXFSZ, SIG_IGN);  // and so is a file that `ulimit -f` lets grow no further
  try {
    // libzmq ends the program where it finds none.
    absl::Status limits = gtrain::EnsureFileLimit(gtrain::cli::kFilesMin);
    if (limits.ok()) limits = gtrain::EnsureProcessesLeft(gtrain::cli::kProcessesMin);
    if (!limits.ok()) {
      gtrain::cli::Complain(std::string(limits.message()));
      return gtrain::cli::kFailed;
    }
    return gtrain::cli::CheckOutput(gtrain::cli::Main({argv + 1, argv + argc}));
  } catch (const std::exception& e) {
    // Libraries may throw where no adapter catches (out of memory); say it instead of aborting.
    gtrain::cli::Complain(absl::StrCat("unexpected: ", e.what()));
    return gtrain::cli::kFailed;
  }
}
