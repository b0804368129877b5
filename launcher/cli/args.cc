#include "launcher/cli/args.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "job/spec/nearest.h"
#include "job/spec/values.h"

namespace gtrain::cli {
namespace {

constexpr size_t kArgsMax = 10'000;

absl::Status Unknown(absl::string_view written, const std::vector<Flag>& flags) {
  std::vector<std::string> names;
  for (const Flag& flag : flags) names.push_back("--" + flag.name);
  // Flags that people know from torchrun, Slurm and Open MPI.
  static constexpr std::pair<absl::string_view, absl::string_view> kHabits[] = {
      {"--nproc_per_node", "-n"},
      {"--nproc-per-node", "-n"},
      {"--np", "-n"},
      {"--ntasks", "-n"},
      {"--nnodes", "--set nodes=N --set ranks_per_node=M"},
      {"--nodes", "--set nodes=N --set ranks_per_node=M"},
      {"--gpus", "--set resources.gpus=N"},
      {"--gpus-per-task", "--set resources.gpus=N"},
      {"--cpus-per-task", "--set resources.cpus=N"},
      {"--mem", "--set resources.memory=SIZE"},
      {"--job-name", "--name"}};
  const bool of_jobs = std::find(names.begin(), names.end(), "--set") != names.end();
  for (const auto& [habit, ours] : kHabits) {
    if (of_jobs && written == habit)
      return absl::InvalidArgumentError(
          absl::StrCat("unknown flag ", spec::Shown(written), "; here it is ", ours));
  }
  const std::string nearest = spec::Nearest(written, names);
  return absl::InvalidArgumentError(
      absl::StrCat("unknown flag ", spec::Shown(written),
                   nearest.empty() ? "" : absl::StrCat("; did you mean ", nearest, "?")));
}

const Flag* FindName(const std::vector<Flag>& flags, absl::string_view name) {
  const auto it = std::find_if(flags.begin(), flags.end(), [&](const Flag& f) { return f.name == name; });
  return it == flags.end() ? nullptr : &*it;
}

const Flag* FindLetter(const std::vector<Flag>& flags, char letter) {
  const auto it = std::find_if(flags.begin(), flags.end(), [&](const Flag& f) { return f.letter == letter; });
  return it == flags.end() ? nullptr : &*it;
}

// The result of matching one argument: the flag and, for --flag=value and -n8, the value in the same word.
struct Match {
  const Flag* flag = nullptr;
  std::optional<std::string> value;
};

absl::StatusOr<Match> MatchFlag(absl::string_view arg, const std::vector<Flag>& flags) {
  Match match;
  if (absl::StartsWith(arg, "--")) {
    const size_t equals = arg.find('=');
    match.flag = FindName(flags, arg.substr(2, equals == absl::string_view::npos ? equals : equals - 2));
    if (match.flag == nullptr) return Unknown(arg.substr(0, equals), flags);
    if (equals != absl::string_view::npos) match.value = std::string(arg.substr(equals + 1));
  } else {
    match.flag = FindLetter(flags, arg[1]);
    const bool joined = arg.size() > 2;
    if (match.flag == nullptr || (joined && match.flag->value_name.empty())) return Unknown(arg, flags);
    if (joined) {
      if (match.flag->letter == 'n' && arg.find_first_not_of("0123456789", 2) != absl::string_view::npos) {
        return absl::InvalidArgumentError(
            absl::StrCat("unknown flag ", spec::Shown(arg), "; did you mean -n?"));
      }
      match.value = std::string(arg.substr(2));
    }
  }
  if (match.value && match.flag->value_name.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("--", match.flag->name, " takes no value"));
  }
  return match;
}

// -it for -i -t: letters of flags without values.
bool IsBundle(absl::string_view arg, const std::vector<Flag>& flags) {
  return arg.size() > 2 && arg[0] == '-' && std::all_of(arg.begin() + 1, arg.end(), [&](char letter) {
           const Flag* flag = FindLetter(flags, letter);
           return flag != nullptr && flag->value_name.empty();
         });
}

}  // namespace

std::string Args::Get(absl::string_view flag, absl::string_view otherwise) const {
  const auto it = values_.find(flag);
  return it == values_.end() ? std::string(otherwise) : it->second.back();
}

std::vector<std::string> Args::All(absl::string_view flag) const {
  const auto it = values_.find(flag);
  return it == values_.end() ? std::vector<std::string>() : it->second;
}

absl::StatusOr<std::optional<int64_t>> Args::Int(absl::string_view flag, int64_t min, int64_t max) const {
  if (!Has(flag)) return std::optional<int64_t>();
  const std::string text = Get(flag);
  int64_t value = 0;
  const bool digits =
      !text.empty() && text.find_first_not_of("0123456789", text[0] == '-' ? 1 : 0) == std::string::npos;
  if (!digits || !absl::SimpleAtoi(text, &value) || value < min || value > max) {
    return absl::InvalidArgumentError(
        absl::StrCat("--", flag, " ", spec::Shown(text), " is not a whole number from ", min, " to ", max));
  }
  return std::optional<int64_t>(value);
}

absl::StatusOr<Args> ParseArgs(const std::vector<std::string>& argv, const std::vector<Flag>& flags) {
  if (argv.size() > kArgsMax)
    return absl::InvalidArgumentError(absl::StrCat("more than ", kArgsMax, " arguments"));
  Args args;
  for (size_t i = 0; i < argv.size(); ++i) {
    const std::string& arg = argv[i];
    if (arg == "--") {
      args.rest.emplace(argv.begin() + static_cast<ptrdiff_t>(i) + 1, argv.end());
      break;
    }
    if (arg.size() < 2 || arg[0] != '-') {
      args.words.push_back(arg);
      continue;
    }
    if (IsBundle(arg, flags)) {
      for (const char letter : arg.substr(1)) args.values_[FindLetter(flags, letter)->name].emplace_back();
      continue;
    }
    absl::StatusOr<Match> match = MatchFlag(arg, flags);
    if (!match.ok()) return match.status();
    std::vector<std::string>& values = args.values_[match->flag->name];
    if (!values.empty() && !match->flag->repeated && !match->flag->value_name.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("--", match->flag->name, " is given twice"));
    }
    if (!match->flag->value_name.empty() && !match->value) {
      if (i + 1 == argv.size() || argv[i + 1] == "--") {
        return absl::InvalidArgumentError(
            absl::StrCat("--", match->flag->name, " needs a value: ", match->flag->value_name));
      }
      match->value = argv[++i];
    }
    values.push_back(match->value.value_or(""));
  }
  return args;
}

std::string HelpOf(const Verb& verb) {
  std::string out = absl::StrCat("usage: gtrain ", verb.name, verb.usage.empty() ? "" : " ", verb.usage,
                                 "\n\n", verb.summary, ".\n");
  if (!verb.details.empty()) absl::StrAppend(&out, "\n", verb.details, "\n");
  out += "\nflags:\n";
  for (const Flag& flag : verb.flags) {
    std::string left =
        flag.letter == '\0' ? "      --" : absl::StrCat("  -", std::string(1, flag.letter), ", --");
    absl::StrAppend(&left, flag.name, flag.value_name.empty() ? "" : " ", flag.value_name);
    const size_t width = 30;
    absl::StrAppend(&out, left, std::string(left.size() < width ? width - left.size() : 1, ' '), flag.help,
                    "\n");
  }
  return out;
}

}  // namespace gtrain::cli
