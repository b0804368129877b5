#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "launcher/cli/context.h"
#include "launcher/cli/json_text.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"

namespace gtrain::cli {
namespace {

using nlohmann::json;

uint64_t Number(const json& object, const char* key) {
  const auto it = object.find(key);
  return it != object.end() && it->is_number() ? it->get<uint64_t>() : 0;
}

size_t Count(const json& object, const char* key) {
  const auto it = object.find(key);
  return it != object.end() && it->is_array() ? it->size() : 0;
}

std::string JobsOf(const json& node) {
  std::vector<std::string> names;
  if (const auto jobs = node.find("jobs"); jobs != node.end() && jobs->is_array()) {
    for (const json& job : *jobs) names.push_back(job.is_string() ? SafeText(job.get<std::string>()) : "?");
  }
  return absl::StrJoin(names, " ");
}

// Below a node's line: what its cloud or a person said of it.
std::string NoticesOf(const json& node, bool* leaving) {
  std::string lines;
  const auto notices = node.find("notices");
  if (notices == node.end() || !notices->is_array()) return lines;
  for (const json& notice : *notices) {
    const std::string kind = SafeTextOf(notice, "kind");
    const absl::Duration left = absl::Seconds(Number(notice, "left_seconds"));
    *leaving = *leaving || kind == "leave";
    absl::StrAppend(&lines, "  ", kind, ": ", SafeTextOf(notice, "source"),
                    left > absl::ZeroDuration() ? absl::StrCat(", ", PrintDuration(left), " left") : "",
                    "\n");
  }
  return lines;
}

std::string SlownessOf(const json& node) {
  std::string lines;
  const auto slow = node.find("slow");
  if (slow == node.end() || !slow->is_array()) return lines;
  for (const json& one : *slow) {
    const auto score = one.find("score");
    if (score == one.end() || !score->is_number()) continue;
    absl::StrAppend(&lines,
                    absl::StrFormat("  slow: in %s its ranks take %.1f times as long as the others for "
                                    "their own part of a step\n",
                                    SafeTextOf(one, "job"), score->get<double>()));
  }
  return lines;
}

std::string Table(const json& nodes) {
  std::string out = absl::StrFormat("%-20s %-17s %-8s %11s %19s %7s  %s\n", "HOST", "NODE", "STATE",
                                    "CPUS FREE", "MEMORY FREE", "GPUS", "JOBS");
  for (const json& n : nodes) {
    const bool unclean = n.contains("unclean") && n["unclean"] == true;
    const std::string quarantine = SafeTextOf(n, "quarantine");
    bool leaving = false;
    const std::string notices = NoticesOf(n, &leaving);
    absl::StrAppend(&out,
                    absl::StrFormat("%-20s %-17s %-8s %11s %19s %7s  %s\n", SafeTextOf(n, "hostname"),
                                    SafeTextOf(n, "id"),
                                    unclean                                        ? "unclean"
                                    : leaving && SafeTextOf(n, "state") == "alive" ? "leaving"
                                                                                   : SafeTextOf(n, "state"),
                                    absl::StrCat(Number(n, "cpus_free"), "/", Number(n, "cpus")),
                                    absl::StrCat(PrintBytes(Number(n, "memory_free_bytes")), "/",
                                                 PrintBytes(Number(n, "memory_bytes"))),
                                    absl::StrCat(Count(n, "gpus_free"), "/", Count(n, "gpus")), JobsOf(n)));
    if (!quarantine.empty()) absl::StrAppend(&out, "  ", quarantine, "\n");
    if (const std::string via = SafeTextOf(n, "via"); !via.empty()) {
      const auto relay = std::find_if(nodes.begin(), nodes.end(),
                                      [&](const json& one) { return SafeTextOf(one, "id") == via; });
      absl::StrAppend(&out, "  through ", relay == nodes.end() ? via : SafeTextOf(*relay, "hostname"), "\n");
    }
    out += SlownessOf(n);
    out += notices;
  }
  return out;
}

absl::Status Nodes(const Args& args) {
  GT_ASSIGN_OR_RETURN(Cluster cluster, OpenCluster(args, Start::kNever));
  GT_ASSIGN_OR_RETURN(const std::string text, Ask(cluster, core::ClientNodes{}));
  if (args.Has("json")) {
    Print(text + "\n");
    return absl::OkStatus();
  }
  const json reply = json::parse(text, nullptr, false);
  if (!reply.is_object() || !reply.contains("nodes") || !reply["nodes"].is_array()) {
    return absl::InternalError("the head's answer lists no nodes");
  }
  Print(Table(reply["nodes"]));
  return absl::OkStatus();
}

int RunNodes(const Args& args) {
  const absl::Status status = Nodes(args);
  return status.ok() ? kDone : Report(status);
}

}  // namespace

Verb NodesVerb() {
  Verb verb;
  verb.name = "nodes";
  verb.summary = "Show the machines of a cluster and what is free there";
  verb.details = "  gtrain nodes --json";
  verb.flags = {ContextFlag(), {"json", '\0', "", "the head's document as it is"}};
  verb.run = RunNodes;
  return verb;
}

}  // namespace gtrain::cli
