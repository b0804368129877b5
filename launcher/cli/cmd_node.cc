// `gtrain node revoke`: takes a machine out of the cluster for good. `drain`, `undrain`: for a while.
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "job/spec/values.h"
#include "launcher/cli/context.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"

namespace gtrain::cli {
namespace {

absl::StatusOr<std::string> Revoke(Cluster& cluster, const Args& args) {
  const std::string& node = args.words[1];
  GT_ASSIGN_OR_RETURN(const std::string json, Ask(cluster, core::ClientRevokeNode{node, args.Get("reason")}));
  if (args.Has("json")) return json + "\n";
  return absl::StrCat("node ", SafeText(node), " is revoked: its key is refused, its ranks are given up\n");
}

// The time before the deadline that docs/protocols/notices.md keeps free; the head's kReserve.
constexpr absl::Duration kReserve = absl::Seconds(10);

std::string TimeOfRanks(absl::Duration left) {
  if (left <= kReserve) {
    return absl::StrCat("Its ranks have no time to save: the last ", PrintDuration(kReserve),
                        " before the deadline are kept free. A longer --deadline gives them some");
  }
  return absl::StrCat("Its ranks have ", PrintDuration(left - kReserve), " of that to save, the last ",
                      PrintDuration(kReserve), " are kept free");
}

absl::StatusOr<std::string> Drain(Cluster& cluster, const Args& args, bool undo) {
  core::ClientDrainNode drain{args.words[1], absl::Minutes(2), args.Get("reason"), undo};
  if (args.Has("deadline")) {
    const absl::StatusOr<absl::Duration> left = ParseDuration(args.Get("deadline"));
    if (!left.ok()) return absl::InvalidArgumentError(absl::StrCat("--deadline: ", left.status().message()));
    drain.left = *left;
  }
  GT_ASSIGN_OR_RETURN(const std::string text, Ask(cluster, drain));
  if (args.Has("json")) return text + "\n";
  if (undo) return absl::StrCat("node ", SafeText(drain.node), " is used again\n");
  const auto reply = nlohmann::json::parse(text, nullptr, false);
  const auto jobs = reply.is_object() ? reply.find("jobs") : reply.end();
  const size_t count = jobs != reply.end() && jobs->is_array() ? jobs->size() : 0;
  absl::Duration left = drain.left;  // a head of before does not say it
  if (const auto said = reply.is_object() ? reply.find("left_seconds") : reply.end();
      said != reply.end() && said->is_number_integer()) {
    // The head rounds down what began a moment ago.
    if (const auto heard = absl::Seconds(said->get<int64_t>()); heard + absl::Seconds(2) < left) left = heard;
  }
  return absl::StrCat("node ", SafeText(drain.node), " is leaving: nothing new starts there; ",
                      count == 0 ? "no job has ranks on it"
                                 : absl::StrCat(count, count == 1 ? " job goes" : " jobs go",
                                                " on without it within ", PrintDuration(left),
                                                left < drain.left ? " (an earlier notice of it stands)" : "",
                                                ". ", TimeOfRanks(left)),
                      ". `gtrain node undrain ", SafeText(drain.node), "` takes it back\n");
}

absl::Status Node(const Args& args) {
  const std::string& what = args.words[0];
  if (what != "revoke" && what != "drain" && what != "undrain") {
    return absl::InvalidArgumentError(absl::StrCat(
        "node ", spec::Shown(what), ": it is drain, undrain or revoke; `gtrain nodes` lists them"));
  }
  if (args.Has("deadline") && what != "drain") {
    return absl::InvalidArgumentError("--deadline is for `gtrain node drain`");
  }
  GT_ASSIGN_OR_RETURN(Cluster cluster, OpenCluster(args, Start::kIfDied));
  GT_ASSIGN_OR_RETURN(const std::string text,
                      what == "revoke" ? Revoke(cluster, args) : Drain(cluster, args, what == "undrain"));
  Print(text);
  return absl::OkStatus();
}

int RunNode(const Args& args) {
  const absl::Status status = Node(args);
  return status.ok() ? kDone : Report(status);
}

}  // namespace

Verb NodeVerb() {
  Verb verb;
  verb.name = "node";
  verb.summary = "Take a machine out of use, for a while or for good";
  verb.usage = "drain|undrain|revoke NODE [--deadline TIME] [--reason TEXT]";
  verb.details =
      "drain: nothing new starts there; jobs with ranks on it are told, save, and go on elsewhere before "
      "the\n"
      "deadline, free of charge; the last 10 s before it are kept free, so with 10s or less they cannot "
      "save. It "
      "stays so, also after a reboot, until undrain, which also sets aside what "
      "the\n"
      "machine's cloud said.\n"
      "revoke: its key is refused from now on, its agent ends with an error, its ranks count as lost: their "
      "jobs\n"
      "go on elsewhere. A machine that should come back joins as a new node with a new token.\n\n"
      "  gtrain node drain gpu-7 --deadline 10m --reason 'new disk'\n"
      "  gtrain node undrain gpu-7\n"
      "  gtrain node revoke 9c1e33a0b4d2f765       the id, or the host name if only one node has it";
  verb.flags = {{"deadline", '\0', "TIME",
                 "drain: when the machine may go; default 2m, of which ranks have all but 10s"},
                {"reason", '\0', "TEXT", "kept in the jobs' events and in the audit log"},
                ContextFlag(),
                {"json", '\0', "", "the head's answer as JSON"}};
  verb.actions = {"drain", "undrain", "revoke"};
  verb.completes = Completes::kNodes;
  verb.words_min = 2;
  verb.words_max = 2;
  verb.run = RunNode;
  return verb;
}

}  // namespace gtrain::cli
