// `gtrain user`: the users of a cluster. The key pair of a new user is made here; the head gets its public
// half.
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "job/spec/values.h"
#include "launcher/cli/context.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"

namespace gtrain::cli {
namespace {

absl::Status Add(const Args& args, Cluster& cluster) {
  const std::string& name = args.words[1];
  const net::KeyPair keys = net::MakeKeyPair();
  core::ClientAddUser request{name, args.Get("role", "user"), keys.public_key};
  if (request.role == "read-only") request.role = "readonly";
  GT_ASSIGN_OR_RETURN(const std::string text, Ask(cluster, request));
  GT_RETURN_IF_ERROR(ExpectKey(text, "endpoint"));
  const nlohmann::json answer = nlohmann::json::parse(text);
  const std::string credential = net::PrintJoinToken(
      {answer.at("endpoint").get<std::string>(), cluster.head.options.server_public_key, keys.secret_key});
  Complain(absl::StrCat(name, " may use the cluster as ", request.role,
                        ". The line on stdout is the credential, shown this once: whoever has it is ", name,
                        ". On the other machine: gtrain context add NAME --credential FILE"));
  Print(credential + "\n");
  return absl::OkStatus();
}

absl::Status ListUsers(const Args& args, Cluster& cluster) {
  GT_ASSIGN_OR_RETURN(const std::string text, Ask(cluster, core::ClientUsers{}));
  if (args.Has("json")) {
    Print(text + "\n");
    return absl::OkStatus();
  }
  GT_RETURN_IF_ERROR(ExpectKey(text, "users"));
  const nlohmann::json answer = nlohmann::json::parse(text);
  std::string out = absl::StrFormat("%-24s %-9s %s\n", "NAME", "ROLE", "KEY");
  for (const nlohmann::json& user : answer.at("users")) {
    absl::StrAppend(&out, absl::StrFormat("%-24s %-9s %s\n", SafeText(user.value("name", "")),
                                          SafeText(user.value("role", "")), SafeText(user.value("key", ""))));
  }
  Print(out);
  return absl::OkStatus();
}

absl::Status User(const Args& args) {
  const std::string& action = args.words[0];
  if (action != "add" && action != "ls" && action != "revoke") {
    return absl::InvalidArgumentError(
        absl::StrCat("user ", spec::Shown(action), ": it is add, ls or revoke"));
  }
  if ((action != "ls") != (args.words.size() == 2)) {
    return absl::InvalidArgumentError("`gtrain user add NAME` and `gtrain user revoke NAME` name one user");
  }
  GT_ASSIGN_OR_RETURN(Cluster cluster, OpenCluster(args, Start::kIfDied));
  if (action == "add") return Add(args, cluster);
  if (action == "ls") return ListUsers(args, cluster);
  GT_RETURN_IF_ERROR(Ask(cluster, core::ClientRevokeUser{args.words[1]}).status());
  Print(absl::StrCat(SafeText(args.words[1]), " is refused from now on; jobs go on\n"));
  return absl::OkStatus();
}

int RunUser(const Args& args) {
  const absl::Status status = User(args);
  return status.ok() ? kDone : Report(status);
}

}  // namespace

Verb UserVerb() {
  Verb verb;
  verb.name = "user";
  verb.summary = "Say who may use a cluster, and as what";
  verb.usage = "add NAME [--role ROLE] | ls | revoke NAME";
  verb.details =
      "  gtrain user add ann > ann.credential                        may submit, and reach her own jobs\n"
      "  gtrain user add screen --role readonly > screen.credential  may look at everything\n"
      "  gtrain user revoke ann                                      at once, on open connections too";
  verb.flags = {{"role", '\0', "ROLE", "admin, user or readonly; default user"},
                ContextFlag(),
                {"json", '\0', "", "ls: the head's answer as JSON"}};
  verb.actions = {"add", "ls", "revoke"};
  verb.words_min = 1;
  verb.words_max = 2;
  verb.run = RunUser;
  return verb;
}

}  // namespace gtrain::cli
