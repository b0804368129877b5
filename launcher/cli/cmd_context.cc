// `gtrain context`: the clusters this user knows.
#include <unistd.h>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "job/spec/values.h"
#include "job/spec/words.h"
#include "launcher/cli/context.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"
#include "launcher/exec/contexts.h"

namespace gtrain::cli {
namespace {

constexpr size_t kCredentialBytesMax = 4096;

absl::Status ListContexts() {
  GT_ASSIGN_OR_RETURN(const exec::Contexts contexts, exec::ReadContexts());
  std::string out = absl::StrFormat("  %-20s %s\n", "NAME", "HEAD");
  absl::StrAppend(&out, absl::StrFormat("%s %-20s %s\n", contexts.current.empty() ? "*" : " ", "local",
                                        "starts by itself on this machine"));
  for (const exec::Context& c : contexts.contexts) {
    absl::StrAppend(&out, absl::StrFormat("%s %-20s %s\n", c.name == contexts.current ? "*" : " ",
                                          SafeText(c.name), SafeText(c.dir.empty() ? c.endpoint : c.dir)));
  }
  Print(out);
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadCredential(const std::string& path) {
  if (path != "-") return ReadFile(path, kCredentialBytesMax);
  std::string text(kCredentialBytesMax, '\0');
  size_t size = 0;
  while (size < text.size()) {
    const ssize_t n = read(STDIN_FILENO, text.data() + size, text.size() - size);
    if (n <= 0) break;
    size += static_cast<size_t>(n);
  }
  text.resize(size);
  return text;
}

// A context of that name may be an administrator's way to his cluster. The same key for the same head, at
// another address perhaps, is no other context.
absl::Status CheckReplaces(const exec::Context& added, const net::KeyPair& keys) {
  GT_ASSIGN_OR_RETURN(const exec::Contexts contexts, exec::ReadContexts());
  for (const exec::Context& there : contexts.contexts) {
    if (there.name != added.name) continue;
    const absl::StatusOr<net::KeyPair> own = net::LoadKeyPair(there.key_file);
    const bool same = there.dir.empty() && there.head_public_key == added.head_public_key && own.ok() &&
                      own->secret_key == keys.secret_key;
    if (same) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "context ", added.name,
        " exists, with another credential: ", SafeText(there.dir.empty() ? there.endpoint : there.dir),
        ". --replace to replace it, or another name. Nothing was changed"));
  }
  return absl::OkStatus();
}

// The secret goes into a key file of its own; it never stands on a command line, where `ps` shows it.
absl::Status Add(const Args& args, const std::string& name) {
  if (!spec::IsJobName(name) || name == "local") {
    return absl::InvalidArgumentError("a context's name is a word of a-z, 0-9 and -, other than local");
  }
  if (!args.Has("credential")) {
    return absl::InvalidArgumentError(
        "--credential FILE is missing: what `gtrain user add` printed; - is stdin");
  }
  GT_ASSIGN_OR_RETURN(const std::string text, ReadCredential(args.Get("credential")));
  const auto credential = net::ParseJoinToken(absl::StripAsciiWhitespace(text));
  if (!credential.ok()) {
    return absl::InvalidArgumentError(
        "that is not a credential: it is the line that `gtrain user add` printed");
  }
  GT_ASSIGN_OR_RETURN(const net::KeyPair keys, net::KeyPairOfSecret(credential->secret_key));
  GT_ASSIGN_OR_RETURN(const std::string contexts, exec::ContextsPath());
  const std::string folder = contexts.substr(0, contexts.rfind('/'));
  const std::string key_file = absl::StrCat(folder, "/", name, ".key");
  const exec::Context added = {name, "", credential->endpoint, credential->head_public_key, key_file};
  if (!args.Has("replace")) GT_RETURN_IF_ERROR(CheckReplaces(added, keys));
  GT_RETURN_IF_ERROR(MakeDirs(folder));
  GT_RETURN_IF_ERROR(net::SaveKeyPair(key_file, keys));
  GT_RETURN_IF_ERROR(exec::SaveContext(added, exec::MakeCurrent::kNo));
  Print(absl::StrCat("context ", name, " is known: ", credential->endpoint, ". Use it with --context ", name,
                     ", or make it the current one: gtrain context use ", name, "\n"));
  return absl::OkStatus();
}

absl::Status Use(const std::string& name) {
  GT_ASSIGN_OR_RETURN(const exec::Contexts contexts, exec::ReadContexts());
  for (const exec::Context& context : contexts.contexts) {
    if (context.name == name) return exec::SaveContext(context, exec::MakeCurrent::kYes);
  }
  if (name == "local") return exec::UseLocalContext();
  return absl::NotFoundError(
      absl::StrCat("no context ", spec::Shown(name), "; `gtrain context ls` lists them"));
}

absl::Status Do(const Args& args) {
  const std::string& action = args.words[0];
  if (action == "ls" && args.words.size() == 1) return ListContexts();
  if (args.words.size() == 2 && action == "add") return Add(args, args.words[1]);
  if (args.words.size() == 2 && action == "use") return Use(args.words[1]);
  return absl::InvalidArgumentError(
      "it is: gtrain context ls, gtrain context use NAME, or gtrain context add NAME");
}

int RunContext(const Args& args) {
  const absl::Status status = Do(args);
  return status.ok() ? kDone : Report(status);
}

}  // namespace

Verb ContextVerb() {
  Verb verb;
  verb.name = "context";
  verb.summary = "Choose among the clusters you may use";
  verb.usage = "ls | use NAME | add NAME --credential FILE [--replace]";
  verb.details =
      "add does not change which one is the current one; use does.\n\n"
      "  gtrain context add lab --credential ann.credential    what an admin's `gtrain user add` printed\n"
      "  gtrain context use local";
  verb.flags = {{"credential", '\0', "FILE", "file with the credential, - for stdin"},
                {"replace", '\0', "", "of add: a context of that name that has another credential"}};
  verb.actions = {"ls", "use", "add"};
  verb.completes = Completes::kContexts;
  verb.words_min = 1;
  verb.words_max = 2;
  verb.run = RunContext;
  return verb;
}

}  // namespace gtrain::cli
