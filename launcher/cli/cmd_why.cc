#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "launcher/cli/context.h"
#include "launcher/cli/job_events.h"
#include "launcher/cli/json_text.h"
#include "launcher/cli/status_doc.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"

namespace gtrain::cli {
namespace {

using nlohmann::json;

// Empty for an event of an older head.
std::string TimeOf(const json& event) {
  absl::Time time;
  std::string error;
  if (!absl::ParseTime(absl::RFC3339_full, SafeTextOf(event, "time"), &time, &error)) return "";
  return PrintClock(time, RealClock().WallNow()) + "  ";
}

std::string FaultsText(const std::string& why) {
  const absl::StatusOr<JobDoc> job = ParseJobDoc(why);  // it has what is known of faults
  std::string out;
  if (!job.ok()) return out;
  for (const std::string& line : FaultLines(*job)) absl::StrAppend(&out, SafeText(line), "\n");
  return out;
}

std::string ExplainBlocker(const json& blocker) {
  const std::string node = SafeTextOf(blocker, "node");
  std::string out =
      absl::StrCat(node.empty() ? "the cluster" : node, ": ", SafeTextOf(blocker, "constraint"));
  if (const auto held = blocker.find("held_by");
      held != blocker.end() && held->is_array() && !held->empty()) {
    out += "; held by";
    for (const json& job : *held)
      absl::StrAppend(&out, " ", job.is_string() ? SafeText(job.get<std::string>()) : "?");
  }
  if (const std::string unblock = SafeTextOf(blocker, "unblocked_by"); !unblock.empty())
    absl::StrAppend(&out, "; unblocked by ", unblock);
  return out;
}

std::string ExplainJob(const std::string& text) {
  const json why = json::parse(text, nullptr, false);
  std::string out = absl::StrCat(SafeTextOf(why, "id"), " is ", SafeTextOf(why, "state"), ": ",
                                 SafeTextOf(why, "reason"), "\n");
  if (const std::string placement = SafeTextOf(why, "placement"); !placement.empty()) {
    absl::StrAppend(&out, "placement: ", placement, "\n");
  }
  for (const auto& [key, label] : {std::pair{"owner", "checkpoint directory"},
                                   {"storage", "storage"},
                                   {"saves", "saves"},
                                   {"progress", "progress"},
                                   {"restore", "restored"},
                                   {"spares", "spares"},
                                   {"waits", "now"},
                                   {"stuck", "now"}}) {
    if (const std::string text = SafeTextOf(why, key); !text.empty())
      absl::StrAppend(&out, label, ": ", text, "\n");
  }
  if (const auto blockers = why.find("blocked_by");
      blockers != why.end() && blockers->is_array() && !blockers->empty()) {
    out += "blocked by:\n";
    for (const json& blocker : *blockers) absl::StrAppend(&out, "  ", ExplainBlocker(blocker), "\n");
  }
  out += FaultsText(text);
  if (const auto events = why.find("events"); events != why.end() && events->is_array()) {
    out += "what happened:\n";
    // The last checkpoint of several in a row is enough: people read this for the decisions.
    for (size_t i = 0; i < events->size(); ++i) {
      const std::string kind = SafeTextOf((*events)[i], "kind");
      if (kind == "checkpoint" && i + 1 < events->size() && SafeTextOf((*events)[i + 1], "kind") == kind)
        continue;
      absl::StrAppend(&out, "  ", TimeOf((*events)[i]), kind, ": ",
                      SafeLines(TextOf((*events)[i], "text"), "      "), "\n");
    }
  }
  return out;
}

absl::Status Why(const Args& args) {
  GT_ASSIGN_OR_RETURN(const std::string why, WhyWithEvents(args, args.words.empty() ? "" : args.words[0]));
  Print(args.Has("json") ? why + "\n" : ExplainJob(why));
  return absl::OkStatus();
}

int RunWhy(const Args& args) {
  const absl::Status status = Why(args);
  return status.ok() ? kDone : Report(status);
}

}  // namespace

Verb WhyVerb() {
  Verb verb;
  verb.name = "why";
  verb.summary = "Say why a job waits, sits where it sits, or was re-formed";
  verb.usage = "[JOB]";
  verb.details =
      "Without JOB: the only job that runs, else the newest that is over. JOB may be the run directory of a "
      "job\n"
      "that is over. The times are those of this machine's zone.\n\n"
      "  gtrain why fashion-mnist-1\n"
      "  gtrain why gtrain-runs/fashion-mnist-1-5c3e90ab";
  verb.flags = {ContextFlag(),
                {"json", '\0', "", "the head's document, with the earlier events of the run directory"}};
  verb.completes = Completes::kJobs;
  verb.words_max = 1;
  verb.run = RunWhy;
  return verb;
}

}  // namespace gtrain::cli
