#include "launcher/cli/job_input.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/path.h"
#include "base/status_macros.h"
#include "job/spec/values.h"
#include "job/spec/yaml_tree.h"
#include "launcher/cli/rankfile.h"
#include "launcher/cli/terminal.h"

namespace gtrain::cli {
namespace {

spec::Overlay TextOverlay(absl::string_view label, absl::string_view key, absl::string_view text) {
  spec::Overlay overlay;
  overlay.label = std::string(label);
  overlay.key = std::string(key);
  overlay.kind = spec::Overlay::Kind::kText;
  overlay.text = std::string(text);
  return overlay;
}

// $ is taken as it stands: the shell has already expanded what was to be expanded.
std::string Unexpanded(std::string value) {
  for (size_t pos = value.find('$'); pos != std::string::npos; pos = value.find('$', pos + 2))
    value.insert(pos, "$");
  return value;
}

// Adds the overlays of `launch -i` and `-t`. A program at which a person types is not started again
// unnoticed.
void AddInputOverlays(const Args& args, spec::ParseOptions& options) {
  const auto set = [&options](const char* flag, const char* key, const char* value) {
    spec::Overlay overlay = TextOverlay(flag, key, value);
    overlay.kind = spec::Overlay::Kind::kYaml;
    options.overlays.push_back(std::move(overlay));
  };
  if (args.Has("interactive") || args.Has("tty")) set("-i", "stdin", "true");
  if (!args.Has("tty")) return;
  set("-t", "tty", "true");
  set("-t", "restart.budget", "0");
  if (const char* term = std::getenv("TERM"); term != nullptr)
    options.overlays.push_back(TextOverlay("-t", "env.TERM", Unexpanded(term)));
}

absl::Status AddFlagOverlays(const Args& args, spec::ParseOptions& options) {
  AddInputOverlays(args, options);
  for (const std::string& set : args.All("set")) {
    GT_ASSIGN_OR_RETURN(spec::Overlay overlay, spec::ApplySet(set));
    options.overlays.push_back(std::move(overlay));
  }
  for (const std::string& env : args.All("env")) {
    const size_t equals = env.find('=');
    if (equals == std::string::npos || equals == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("--env ", spec::Shown(env.substr(0, equals)), " must be NAME=VALUE"));
    }
    options.overlays.push_back(TextOverlay(absl::StrCat("--env ", env.substr(0, equals)),
                                           absl::StrCat("env.", env.substr(0, equals)),
                                           Unexpanded(env.substr(equals + 1))));
  }
  if (args.Has("name")) options.overlays.push_back(TextOverlay("--name", "name", args.Get("name")));
  for (const auto& [flag, key] : {std::pair("hosts", "where.hosts"), std::pair("exclude", "where.exclude")}) {
    if (!args.Has(flag)) continue;
    const std::string list = absl::StrJoin(args.All(flag), ",");
    options.overlays.push_back(TextOverlay(absl::StrCat("--", flag, " ", list.substr(0, 40)), key, list));
  }
  if (args.Has("rank0-host"))
    options.overlays.push_back(TextOverlay("--rank0-host", "where.rank0", args.Get("rank0-host")));
  // With --topology the plan decides which ranks can keep their places.
  if (args.Has("rankfile") && !args.Has("topology")) {
    GT_ASSIGN_OR_RETURN(spec::Overlay overlay, ReadRankfileFlag(args.Get("rankfile")));
    options.overlays.push_back(std::move(overlay));
  }
  if (args.Has("ranks")) {
    spec::Overlay overlay =
        TextOverlay(absl::StrCat("-n ", args.Get("ranks").substr(0, 40)), "ranks", args.Get("ranks"));
    overlay.kind = spec::Overlay::Kind::kRanks;
    options.overlays.push_back(std::move(overlay));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadJobFile(const std::string& path) {
  absl::StatusOr<std::string> text = ReadFile(path, spec::kTextBytesMax);
  if (text.ok()) return text;
  // Whatever the reason: nothing was started (docs/cli.md).
  return absl::InvalidArgumentError(absl::StrCat("cannot read the job file: ", text.status().message()));
}

// The quotes that `--set env.A="0.1"` would need are taken away by the shell.
std::string EnvAdvice(const spec::SpecError& error) {
  constexpr absl::string_view kSet = "--set env.";
  if (!absl::StartsWith(error.source, kSet) || !absl::StrContains(error.message, "for a string write"))
    return "";
  return absl::StrCat(", or: --env ", error.source.substr(kSet.size()), "=VALUE");
}

// People mean a start with so many ranks; what they get is a job that never has another number.
std::string RangeNote(const Args& args, const std::string& text, const std::string& name,
                      spec::ParseOptions options) {
  if (!args.Has("ranks")) return "";
  std::erase_if(options.overlays,
                [](const spec::Overlay& over) { return over.kind == spec::Overlay::Kind::kRanks; });
  const spec::ParseResult file = spec::ParseJob(text, name, options);
  if (!file.ok() || !file.spec.ranks || file.spec.ranks->min == file.spec.ranks->max) return "";
  const std::string ranks = args.Get("ranks");
  return absl::StrCat("-n ", ranks, " takes the place of `ranks: {min: ", file.spec.ranks->min,
                      ", max: ", file.spec.ranks->max,
                      "}` of the job file: this job never has another number. To ",
                      "keep the range launch it without -n, then: gtrain scale -n ", ranks, " JOB");
}

}  // namespace

std::vector<Flag> JobFlags() {
  return {
      {"ranks", 'n', "N", "number of ranks"},
      {"set", '\0', "KEY=VALUE", "set a key of the job, dotted (checkpoint.every=60s); repeatable", true},
      {"env", '\0', "NAME=VALUE", "an environment variable of the ranks; repeatable", true},
      {"name", '\0', "NAME", "name of the job"},
      {"hosts", '\0', "HOSTS", "only on these, such as tux[0-3,12] (where.hosts); repeatable", true},
      {"exclude", '\0', "HOSTS", "not on these (where.exclude); repeatable", true},
      {"rank0-host", '\0', "HOST", "where rank 0 goes (where.rank0)"},
      {"rankfile", '\0', "FILE", "where each rank goes, as Open MPI writes it (where.ranks)"},
  };
}

absl::StatusOr<std::vector<std::string>> RanksFlags(int64_t ranks, std::optional<int64_t> nodes) {
  if (!nodes) return std::vector<std::string>{"-n", absl::StrCat(ranks)};
  if (*nodes < 1 || ranks % *nodes != 0) {
    return absl::InvalidArgumentError(absl::StrCat("--nodes ", *nodes, ": each node gets as many ranks, and ",
                                                   ranks, " of -n are not a multiple of that"));
  }
  return std::vector<std::string>{"--set", absl::StrCat("nodes=", *nodes), "--set",
                                  absl::StrCat("ranks_per_node=", ranks / *nodes)};
}

std::map<std::string, std::string> Environment() {
  std::map<std::string, std::string> out;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const absl::string_view text(*entry);
    const size_t equals = text.find('=');
    if (equals != absl::string_view::npos && equals > 0) {
      out.emplace(std::string(text.substr(0, equals)), std::string(text.substr(equals + 1)));
    }
  }
  return out;
}

absl::StatusOr<std::string> CurrentDir() {
  char* dir = get_current_dir_name();
  if (dir == nullptr) return ErrnoStatus(errno, "the current directory");
  std::string out(dir);
  std::free(dir);
  if (!spec::IsCleanText(out)) {
    // A job's text is UTF-8, and the head would be told of another directory.
    return absl::InvalidArgumentError(absl::StrCat("the current directory is not UTF-8: ", SafeText(out),
                                                   ". Rename it, or start the job from another directory"));
  }
  return out;
}

absl::StatusOr<JobInput> ReadJob(const Args& args) {
  const std::map<std::string, std::string> environment = Environment();
  spec::ParseOptions options;
  options.variables = &environment;
  GT_ASSIGN_OR_RETURN(options.current_dir, CurrentDir());
  JobInput input;
  std::string text;
  if (!args.words.empty()) {
    if (args.rest) return absl::InvalidArgumentError("give a job file or a command after --, not both");
    input.shown_name = args.words[0];
    GT_ASSIGN_OR_RETURN(text, ReadJobFile(args.words[0]));
    const std::string path = JoinPath(options.current_dir, args.words[0]);
    options.file_dir = path.substr(0, path.rfind('/') + 1);
    options.default_name = spec::NameFrom(path);
  } else if (args.rest && !args.rest->empty()) {
    input.shown_name = "command line";
    options.file_dir = options.current_dir;
    options.default_name = spec::NameFrom(args.rest->front());
    spec::Overlay words;
    words.label = "command line";
    words.key = "run";
    words.kind = spec::Overlay::Kind::kWords;
    words.words = *args.rest;
    options.overlays.push_back(std::move(words));
  } else {
    return absl::InvalidArgumentError(
        "give a job file, or a command after --: gtrain launch -n 4 -- python train.py");
  }
  GT_RETURN_IF_ERROR(AddFlagOverlays(args, options));
  spec::ParseResult result = spec::ParseJob(text, input.shown_name, options);
  for (const spec::SpecError& error : result.errors) {
    const std::string line = SafeText(absl::StrCat(spec::FormatError(error), EnvAdvice(error)));
    std::fprintf(stderr, "%s\n", line.c_str());
    NoteError(line);
  }
  if (!result.ok()) {
    if (const absl::string_view word = args.words.empty() ? "" : absl::string_view(args.words[0]);
        absl::EndsWith(word, ".py") || absl::EndsWith(word, ".sh") || absl::StartsWith(text, "#!")) {
      return absl::InvalidArgumentError(absl::StrCat(
          word,
          " seems to be a program and not a job file: a program goes behind --, as in gtrain launch -n 2 -- ",
          absl::EndsWith(word, ".py")   ? "python3 "
          : absl::EndsWith(word, ".sh") ? "bash "
                                        : "./",
          word, "; nothing was started"));
    }
    return absl::InvalidArgumentError(absl::StrCat(
        result.errors.size(), result.errors.size() == 1 ? " error" : " errors", "; nothing was started"));
  }
  input.spec = std::move(result.spec);
  input.note = RangeNote(args, text, input.shown_name, std::move(options));
  return input;
}

}  // namespace gtrain::cli
