// Completion scripts are made from the same tables as the parser, so they cannot disagree with it.
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"

namespace gtrain::cli {
namespace {

std::string FlagsOf(const Verb& verb) {
  std::vector<std::string> names;
  for (const Flag& flag : verb.flags) names.push_back("--" + flag.name);
  return absl::StrJoin(names, " ");
}

std::string Bash(const std::vector<Verb>& verbs) {
  std::string names;
  std::string cases;
  for (const Verb& verb : verbs) {
    if (verb.hidden) continue;
    absl::StrAppend(&names, names.empty() ? "" : " ", verb.name);
    absl::StrAppend(&cases, "    ", verb.name, ") flags=\"", FlagsOf(verb), "\" ;;\n");
  }
  return absl::StrCat(
      "# bash completion of gtrain: source <(gtrain completion bash)\n"
      "_gtrain() {\n"
      "  local word=${COMP_WORDS[COMP_CWORD]} flags=\n"
      "  if [ \"$COMP_CWORD\" -eq 1 ]; then\n"
      "    COMPREPLY=($(compgen -W \"",
      names,
      "\" -- \"$word\")); return\n"
      "  fi\n"
      "  case ${COMP_WORDS[1]} in\n",
      cases,
      "  esac\n"
      "  case $word in\n"
      "    -*) COMPREPLY=($(compgen -W \"$flags\" -- \"$word\")) ;;\n"
      "    *) COMPREPLY=($(compgen -f -- \"$word\")) ;;\n"
      "  esac\n"
      "}\n"
      "complete -o filenames -F _gtrain gtrain\n");
}

std::string Zsh(const std::vector<Verb>& verbs) {
  return absl::StrCat(
      "# zsh completion of gtrain: source <(gtrain completion zsh)\nautoload -U +X bashcompinit && "
      "bashcompinit\n",
      Bash(verbs));
}

std::string Fish(const std::vector<Verb>& verbs) {
  std::string out = "# fish completion of gtrain: gtrain completion fish | source\n";
  for (const Verb& verb : verbs) {
    if (verb.hidden) continue;
    absl::StrAppend(&out, "complete -c gtrain -n __fish_use_subcommand -a ", verb.name, " -d '", verb.summary,
                    "'\n");
    for (const Flag& flag : verb.flags) {
      absl::StrAppend(&out, "complete -c gtrain -n '__fish_seen_subcommand_from ", verb.name, "' -l ",
                      flag.name, flag.letter == '\0' ? "" : absl::StrCat(" -s ", std::string(1, flag.letter)),
                      flag.value_name.empty() ? "" : " -r", "\n");
    }
  }
  return out;
}

int Run(const Args& args) {
  const std::vector<Verb> verbs = AllVerbs();
  const std::string& shell = args.words[0];
  if (shell == "bash") return Print(Bash(verbs)) ? kDone : kFailed;
  if (shell == "zsh") return Print(Zsh(verbs)) ? kDone : kFailed;
  if (shell == "fish") return Print(Fish(verbs)) ? kDone : kFailed;
  Complain("completion: the shell must be bash, zsh or fish");
  return kUsage;
}

}  // namespace

Verb CompletionVerb() {
  Verb verb;
  verb.name = "completion";
  verb.summary = "Print the completion script of a shell";
  verb.usage = "bash | zsh | fish";
  verb.details = "  source <(gtrain completion bash)";
  verb.words_min = 1;
  verb.words_max = 1;
  verb.run = Run;
  return verb;
}

}  // namespace gtrain::cli
