// `gtrain token`: join tokens for new machines.
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "job/spec/values.h"
#include "launcher/cli/context.h"
#include "launcher/cli/target.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"

namespace gtrain::cli {
namespace {

absl::Status Create(const Args& args, Cluster& cluster) {
  core::ClientJoinToken request;
  GT_ASSIGN_OR_RETURN(const std::optional<int64_t> uses, args.Int("uses", 1, 10'000));
  request.uses = static_cast<int>(uses.value_or(1));
  if (args.Has("life") && !absl::ParseDuration(args.Get("life"), &request.life)) {
    return absl::InvalidArgumentError("--life is a time like 15m or 24h");
  }
  GT_ASSIGN_OR_RETURN(const std::string text, Ask(cluster, request));
  if (args.Has("json")) {
    Print(text + "\n");
    return absl::OkStatus();
  }
  GT_RETURN_IF_ERROR(ExpectKey(text, "token"));
  const nlohmann::json answer = nlohmann::json::parse(text);
  Print(answer.at("token").get<std::string>() + "\n");
  return absl::OkStatus();
}

absl::Status ListTokens(const Args& args, Cluster& cluster) {
  GT_ASSIGN_OR_RETURN(const std::string text, Ask(cluster, core::ClientTokens{}));
  if (args.Has("json")) {
    Print(text + "\n");
    return absl::OkStatus();
  }
  GT_RETURN_IF_ERROR(ExpectKey(text, "tokens"));
  const nlohmann::json answer = nlohmann::json::parse(text);
  std::string out = absl::StrFormat("%-17s %9s %9s  %s\n", "TOKEN", "USES LEFT", "ENDS IN", "MADE BY");
  for (const nlohmann::json& token : answer.at("tokens")) {
    absl::StrAppend(
        &out,
        absl::StrFormat("%-17s %9d %9s  %s\n", SafeText(token.value("id", "")), token.value("uses_left", 0),
                        absl::FormatDuration(absl::Seconds(token.value("expires_seconds", 0))),
                        SafeText(token.value("by", ""))));
  }
  Print(out);
  return absl::OkStatus();
}

absl::Status Token(const Args& args) {
  const std::string& action = args.words[0];
  if (action != "create" && action != "ls" && action != "revoke") {
    return absl::InvalidArgumentError(
        absl::StrCat("token ", spec::Shown(action), ": it is create, ls or revoke"));
  }
  if ((action == "revoke") != (args.words.size() == 2)) {
    return absl::InvalidArgumentError("`gtrain token revoke TOKEN` names one that `gtrain token ls` shows");
  }
  if (action == "revoke") GT_RETURN_IF_ERROR(CheckId(args.words[1], "token", "gtrain token ls"));
  GT_ASSIGN_OR_RETURN(Cluster cluster, OpenCluster(args, Start::kIfDied));
  if (action == "create") return Create(args, cluster);
  if (action == "ls") return ListTokens(args, cluster);
  GT_RETURN_IF_ERROR(Ask(cluster, core::ClientRevokeToken{args.words[1]}).status());
  Print(absl::StrCat("token ", SafeText(args.words[1]), " is revoked; nodes that joined with it stay\n"));
  return absl::OkStatus();
}

int RunToken(const Args& args) {
  const absl::Status status = Token(args);
  return status.ok() ? kDone : Report(status);
}

}  // namespace

Verb TokenVerb() {
  Verb verb;
  verb.name = "token";
  verb.summary = "Make, list and revoke join tokens for new machines";
  verb.usage = "create [--uses N] [--life TIME] | ls | revoke TOKEN";
  verb.details =
      "  gtrain token create > FILE              for one machine, 15 minutes: gtrain agent --join FILE\n"
      "  gtrain token create --uses 64 --life 2h\n"
      "  gtrain token revoke 3f9c0a7712e4b5d8    the id, as `gtrain token ls` shows it";
  verb.flags = {{"uses", '\0', "N", "how many machines may join with it; default 1"},
                {"life", '\0', "TIME", "how long it is good; default 15m, at most 7 days"},
                ContextFlag(),
                {"json", '\0', "", "the head's answer as JSON"}};
  verb.actions = {"create", "ls", "revoke"};
  verb.words_min = 1;
  verb.words_max = 2;
  verb.run = RunToken;
  return verb;
}

}  // namespace gtrain::cli
