// Completion scripts are made from the same tables as the parser, so they cannot disagree with it. For words
// that only a cluster knows they ask `gtrain completion words KIND`.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "job/spec/keys.h"
#include "launcher/cli/context.h"
#include "launcher/cli/status_doc.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"
#include "launcher/exec/contexts.h"

namespace gtrain::cli {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(2);  // somebody waits with a finger on the key

const char* KindOf(Completes completes) {
  switch (completes) {
    case Completes::kFiles:
      return "files";
    case Completes::kJobs:
      return "jobs";
    case Completes::kLiveJobs:
      return "live-jobs";
    case Completes::kNodes:
      return "nodes";
    case Completes::kContexts:
      return "contexts";
  }
  return "files";
}

// Returns a kind of words; or the words themselves after a "=", or after a "+" where it may be a file, too.
// An upper-case word (STEP and URI of latest|STEP|URI) stands for a value and is left out.
std::string ValuesOf(const Flag& flag) {
  if (flag.name == "context") return "contexts";
  if (flag.name == "set") return "keys";
  if (!absl::StrContains(flag.value_name, '|')) return "files";
  std::vector<std::string> words = absl::StrSplit(flag.value_name, '|');
  const size_t all = words.size();
  std::erase_if(words, [](const std::string& word) {
    return std::any_of(word.begin(), word.end(), [](unsigned char c) { return absl::ascii_isupper(c); });
  });
  return absl::StrCat(words.size() == all ? "=" : "+", absl::StrJoin(words, " "));
}

std::string Cases(const Verb& verb) {
  std::vector<std::string> names;
  std::string values;
  for (const Flag& flag : verb.flags) {
    names.push_back("--" + flag.name);
    if (flag.value_name.empty()) continue;
    const std::string letter = flag.letter == '\0' ? "" : absl::StrCat("|-", std::string(1, flag.letter));
    absl::StrAppend(&values, "        --", flag.name, letter, ") kind='", ValuesOf(flag), "' ;;\n");
  }
  return absl::StrCat("    ", verb.name, ")\n      flags='", absl::StrJoin(names, " "), "' actions='",
                      absl::StrJoin(verb.actions, " "), "' kind=", KindOf(verb.completes),
                      "\n      case $before in\n", values, "        *) value= ;;\n      esac ;;\n");
}

constexpr char kBashHead[] = R"sh(# bash completion of gtrain: source <(gtrain completion bash)
_gtrain() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} flags= actions= kind=files value=1 i
  local -a context=()
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; ++i)); do
    [ "${COMP_WORDS[i]}" = -- ] && { COMPREPLY=($(compgen -f -- "$word")); return; }
    [ "${COMP_WORDS[i]}" = --context ] && context=(--context "${COMP_WORDS[i+1]}")
  done
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W ")sh";

constexpr char kBashTail[] = R"sh(  esac
  case $value$word in
    -*) COMPREPLY=($(compgen -W "$flags" -- "$word")); return ;;
  esac
  if [ -z "$value" ] && [ -n "$actions" ] && [ "$COMP_CWORD" -eq 2 ]; then
    COMPREPLY=($(compgen -W "$actions" -- "$word")); return
  fi
  case $kind in
    files) COMPREPLY=($(compgen -f -- "$word")) ;;
    =*) COMPREPLY=($(compgen -W "${kind#=}" -- "$word")) ;;
    +*) COMPREPLY=($(compgen -W "${kind#+}" -- "$word") $(compgen -f -- "$word")) ;;
    *) COMPREPLY=($(compgen -W "$("${COMP_WORDS[0]}" completion words "$kind" "${context[@]}" 2>/dev/null)" -- "$word")) ;;
  esac
  if [ "$kind" = keys ]; then compopt -o nospace 2>/dev/null; fi
}
complete -o filenames -F _gtrain gtrain
)sh";

std::string Bash(const std::vector<Verb>& verbs) {
  std::vector<std::string> names;
  std::string cases;
  for (const Verb& verb : verbs) {
    if (verb.hidden) continue;
    names.push_back(verb.name);
    cases += Cases(verb);
  }
  return absl::StrCat(kBashHead, absl::StrJoin(names, " "),
                      "\" -- \"$word\")); return\n  fi\n  case ${COMP_WORDS[1]} in\n", cases, kBashTail);
}

std::string Zsh(const std::vector<Verb>& verbs) {
  return absl::StrCat(
      "# zsh completion of gtrain: source <(gtrain completion zsh)\nautoload -U +X bashcompinit && "
      "bashcompinit\n",
      Bash(verbs));
}

// Words for fish: `(gtrain completion words jobs)` or words as they are.
std::string FishWords(const std::string& kind) {
  if (kind == "files") return "";
  if (kind[0] == '=' || kind[0] == '+') return absl::StrCat(" -a '", kind.substr(1), "'");
  return absl::StrCat(" -f -a '(gtrain completion words ", kind, " 2>/dev/null)'");
}

std::string Fish(const std::vector<Verb>& verbs) {
  std::string out = "# fish completion of gtrain: gtrain completion fish | source\n";
  for (const Verb& verb : verbs) {
    if (verb.hidden) continue;
    absl::StrAppend(&out, "complete -c gtrain -n __fish_use_subcommand -a ", verb.name, " -d '", verb.summary,
                    "'\n");
    const std::string after =
        absl::StrCat("complete -c gtrain -n '__fish_seen_subcommand_from ", verb.name, "'");
    if (!verb.actions.empty())
      absl::StrAppend(&out, after, " -f -a '", absl::StrJoin(verb.actions, " "), "'\n");
    if (const std::string words = FishWords(KindOf(verb.completes)); !words.empty())
      absl::StrAppend(&out, after, words, "\n");
    for (const Flag& flag : verb.flags) {
      absl::StrAppend(&out, after, " -l ", flag.name,
                      flag.letter == '\0' ? "" : absl::StrCat(" -s ", std::string(1, flag.letter)),
                      flag.value_name.empty() ? "" : absl::StrCat(" -r", FishWords(ValuesOf(flag))), "\n");
    }
  }
  return out;
}

// ---------------------------------------------------------------- words

absl::StatusOr<std::vector<std::string>> ContextNames() {
  GT_ASSIGN_OR_RETURN(const auto contexts, exec::ReadContexts());
  std::vector<std::string> words = {"local"};
  for (const exec::Context& context : contexts.contexts) words.push_back(context.name);
  return words;
}

// Jobs that are over are looked at, too; but not stopped, nor is anything run beside them.
absl::StatusOr<std::vector<std::string>> Jobs(Cluster& cluster, bool live_only) {
  GT_ASSIGN_OR_RETURN(const std::string json, Ask(cluster, core::ClientStatus{}, kTimeout));
  GT_ASSIGN_OR_RETURN(const StatusDoc doc, ParseStatusDoc(json));
  std::vector<std::string> words;
  for (const JobDoc& job : doc.jobs) {
    if (!live_only || !job.Final()) words.push_back(job.id);
  }
  return words;
}

absl::StatusOr<std::vector<std::string>> Nodes(Cluster& cluster) {
  GT_ASSIGN_OR_RETURN(const std::string json, Ask(cluster, core::ClientNodes{}, kTimeout));
  GT_RETURN_IF_ERROR(ExpectKey(json, "nodes"));
  const nlohmann::json doc = nlohmann::json::parse(json);
  std::vector<std::string> words;
  for (const nlohmann::json& node : doc.at("nodes")) words.push_back(node.value("hostname", ""));
  return words;
}

absl::StatusOr<std::vector<std::string>> WordsOf(const Args& args, const std::string& kind) {
  if (kind == "contexts") return ContextNames();
  if (kind == "keys") {
    std::vector<std::string> words = spec::JobKeys();
    for (std::string& word : words) word += "=";
    return words;
  }
  if (kind != "jobs" && kind != "live-jobs" && kind != "nodes")
    return absl::InvalidArgumentError("completion words: it is jobs, live-jobs, nodes, contexts or keys");
  GT_ASSIGN_OR_RETURN(Cluster cluster, OpenCluster(args, Start::kNever));
  return kind == "nodes" ? Nodes(cluster) : Jobs(cluster, kind == "live-jobs");
}

int PrintWords(const Args& args) {
  const absl::StatusOr<std::vector<std::string>> words =
      WordsOf(args, args.words.size() < 2 ? "" : args.words[1]);
  if (!words.ok()) return Report(words.status());
  std::string out;
  for (const std::string& word : *words) absl::StrAppend(&out, SafeText(word), "\n");
  return out.empty() || Print(out) ? kDone : kFailed;
}

int RunCompletion(const Args& args) {
  const std::vector<Verb> verbs = AllVerbs();
  const std::string& shell = args.words[0];
  if (shell == "words") return PrintWords(args);
  if (shell == "bash") return Print(Bash(verbs)) ? kDone : kFailed;
  if (shell == "zsh") return Print(Zsh(verbs)) ? kDone : kFailed;
  if (shell == "fish") return Print(Fish(verbs)) ? kDone : kFailed;
  Complain("completion: the shell must be bash, zsh or fish", Tone::kBad);
  return kUsage;
}

}  // namespace

Verb CompletionVerb() {
  Verb verb;
  verb.name = "completion";
  verb.summary = "Print the completion script of a shell";
  verb.usage = "bash | zsh | fish | words jobs|live-jobs|nodes|contexts|keys";
  verb.details =
      "The scripts complete verbs, flags, jobs, nodes, contexts and keys of --set.\n\n"
      "  source <(gtrain completion bash)\n"
      "  gtrain completion words jobs                   what the script asks for";
  verb.actions = {"bash", "zsh", "fish"};
  verb.flags = {ContextFlag()};
  verb.words_min = 1;
  verb.words_max = 2;
  verb.run = RunCompletion;
  return verb;
}

}  // namespace gtrain::cli
