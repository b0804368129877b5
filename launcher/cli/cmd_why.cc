#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "launcher/cli/context.h"
#include "launcher/cli/follow.h"
#include "launcher/cli/left.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"

namespace gtrain::cli {
namespace {

using nlohmann::json;

std::string RawText(const json& object, const char* key) {
  const auto it = object.find(key);
  return it != object.end() && it->is_string() ? it->get<std::string>() : "";
}

std::string Text(const json& object, const char* key) { return SafeText(RawText(object, key)); }

// Of a head of before, nothing.
std::string TimeOf(const json& event) {
  absl::Time time;
  std::string error;
  if (!absl::ParseTime(absl::RFC3339_full, Text(event, "time"), &time, &error)) return "";
  return PrintClock(time, RealClock().WallNow()) + "  ";
}

std::string Explain(const json& why) {
  std::string out =
      absl::StrCat(Text(why, "id"), " is ", Text(why, "state"), ": ", Text(why, "reason"), "\n");
  if (const std::string placement = Text(why, "placement"); !placement.empty()) {
    absl::StrAppend(&out, "placement: ", placement, "\n");
  }
  for (const auto& [key, label] : {std::pair{"owner", "checkpoint directory"},
                                   {"storage", "storage"},
                                   {"saves", "saves"},
                                   {"progress", "progress"},
                                   {"stuck", "now"}}) {
    if (const std::string text = Text(why, key); !text.empty())
      absl::StrAppend(&out, label, ": ", text, "\n");
  }
  if (const auto blockers = why.find("blocked_by");
      blockers != why.end() && blockers->is_array() && !blockers->empty()) {
    out += "blocked by:\n";
    for (const json& b : *blockers) {
      const std::string node = Text(b, "node");
      absl::StrAppend(&out, "  ", node.empty() ? "the cluster" : node, ": ", Text(b, "constraint"));
      if (const auto held = b.find("held_by"); held != b.end() && held->is_array() && !held->empty()) {
        out += "; held by";
        for (const json& job : *held)
          absl::StrAppend(&out, " ", job.is_string() ? SafeText(job.get<std::string>()) : "?");
      }
      if (const std::string unblock = Text(b, "unblocked_by"); !unblock.empty())
        absl::StrAppend(&out, "; unblocked by ", unblock);
      out += "\n";
    }
  }
  if (const auto events = why.find("events"); events != why.end() && events->is_array()) {
    out += "what happened:\n";
    // Of a run of checkpoints the last is enough: decisions are what this is read for.
    for (size_t i = 0; i < events->size(); ++i) {
      const std::string kind = Text((*events)[i], "kind");
      if (kind == "checkpoint" && i + 1 < events->size() && Text((*events)[i + 1], "kind") == kind) continue;
      absl::StrAppend(&out, "  ", TimeOf((*events)[i]), kind, ": ",
                      SafeLines(RawText((*events)[i], "text"), "      "), "\n");
    }
  }
  return out;
}

absl::StatusOr<std::string> AskWhy(const Args& args, const std::string& word) {
  GT_ASSIGN_OR_RETURN(Cluster cluster, OpenCluster(args, Start::kNever));
  GT_ASSIGN_OR_RETURN(const JobDoc job, FindJob(cluster, word, Without::kNewest));
  return Ask(cluster, core::ClientWhy{JobId(job.id)});
}

absl::Status Why(const Args& args) {
  const std::string word = args.words.empty() ? "" : args.words[0];
  absl::StatusOr<std::string> asked = IsRunDirectory(word) ? LeftJob(args, word) : AskWhy(args, word);
  if (!asked.ok() && !IsRunDirectory(word)) {
    GT_ASSIGN_OR_RETURN(LeftAnswer left, LeftInstead(asked.status(), args, word));
    Complain(SafeText(left.note));
    asked = std::move(left.json);
  }
  GT_ASSIGN_OR_RETURN(const std::string text, std::move(asked));
  if (args.Has("json")) {
    Print(text + "\n");
    return absl::OkStatus();
  }
  const json why = json::parse(text, nullptr, false);
  if (!why.is_object()) return absl::InternalError("the head's answer is not a JSON object");
  Print(Explain(why));
  return absl::OkStatus();
}

int Run(const Args& args) {
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
  verb.flags = {ContextFlag(), {"json", '\0', "", "the head's document as it is"}};
  verb.completes = Completes::kJobs;
  verb.words_max = 1;
  verb.run = Run;
  return verb;
}

}  // namespace gtrain::cli
