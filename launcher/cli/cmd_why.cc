#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/clock.h"
#include "base/json_depth.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "launcher/cli/context.h"
#include "launcher/cli/follow.h"
#include "launcher/cli/json_text.h"
#include "launcher/cli/left.h"
#include "launcher/cli/status_doc.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"

namespace gtrain::cli {
namespace {

using nlohmann::json;

// Of a head of before, nothing.
std::string TimeOf(const json& event) {
  absl::Time time;
  std::string error;
  if (!absl::ParseTime(absl::RFC3339_full, SafeTextOf(event, "time"), &time, &error)) return "";
  return PrintClock(time, RealClock().WallNow()) + "  ";
}

uint64_t SequenceOf(const json& event) {
  const auto it = event.find("sequence");
  return it != event.end() && it->is_number_unsigned() ? it->get<uint64_t>() : 0;
}

// The newest lines of a file that somebody else may have made: nothing is followed or waited for.
std::string EndOfFile(const std::string& path) {
  constexpr off_t kBytesMax = 256 << 10;
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat info = {};
  if (!file.valid() || fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode)) return "";
  const off_t begin = std::max<off_t>(0, info.st_size - kBytesMax);
  std::string text(static_cast<size_t>(info.st_size - begin), '\0');
  const ssize_t got = pread(file.get(), text.data(), text.size(), begin);
  text.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
  return begin == 0 ? text : text.substr(std::min(text.find('\n'), text.size()));  // not a part of a line
}

// A head keeps a job's newest events, and only its own; the run directory has those of all heads, where this
// machine sees it.
void AddEarlierEvents(const std::string& run_dir, json& why) {
  const auto events = why.find("events");
  if (events == why.end() || !events->is_array()) return;
  const uint64_t known = events->empty() ? UINT64_MAX : SequenceOf(events->front());
  if (known <= 1 || run_dir.empty()) return;
  json all = json::array();
  const std::string text = EndOfFile(run_dir + "/events.jsonl");
  for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    json event = json::parse(ShallowJson(line), nullptr, /*allow_exceptions=*/false);
    if (event.is_object() && SequenceOf(event) > 0 && SequenceOf(event) < known)
      all.push_back(std::move(event));
  }
  for (json& event : *events) all.push_back(std::move(event));
  *events = std::move(all);
}

std::string FirstFaultText(const json& why) {
  const auto fault = why.find("first_fault");
  if (fault == why.end() || !fault->is_object()) return "";
  std::string out = absl::StrCat("first fault: ", SafeTextOf(*fault, "message"), "\n");
  for (const std::string& line : LastLines(TextOf(*fault, "tail")))
    absl::StrAppend(&out, "  ", SafeText(line), "\n");
  return out;
}

std::string ExplainJob(const json& why) {
  std::string out = absl::StrCat(SafeTextOf(why, "id"), " is ", SafeTextOf(why, "state"), ": ",
                                 SafeTextOf(why, "reason"), "\n");
  if (const std::string placement = SafeTextOf(why, "placement"); !placement.empty()) {
    absl::StrAppend(&out, "placement: ", placement, "\n");
  }
  for (const auto& [key, label] : {std::pair{"owner", "checkpoint directory"},
                                   {"storage", "storage"},
                                   {"saves", "saves"},
                                   {"progress", "progress"},
                                   {"stuck", "now"}}) {
    if (const std::string text = SafeTextOf(why, key); !text.empty())
      absl::StrAppend(&out, label, ": ", text, "\n");
  }
  if (const auto blockers = why.find("blocked_by");
      blockers != why.end() && blockers->is_array() && !blockers->empty()) {
    out += "blocked by:\n";
    for (const json& b : *blockers) {
      const std::string node = SafeTextOf(b, "node");
      absl::StrAppend(&out, "  ", node.empty() ? "the cluster" : node, ": ", SafeTextOf(b, "constraint"));
      if (const auto held = b.find("held_by"); held != b.end() && held->is_array() && !held->empty()) {
        out += "; held by";
        for (const json& job : *held)
          absl::StrAppend(&out, " ", job.is_string() ? SafeText(job.get<std::string>()) : "?");
      }
      if (const std::string unblock = SafeTextOf(b, "unblocked_by"); !unblock.empty())
        absl::StrAppend(&out, "; unblocked by ", unblock);
      out += "\n";
    }
  }
  out += FirstFaultText(why);
  if (const auto events = why.find("events"); events != why.end() && events->is_array()) {
    out += "what happened:\n";
    // Of a run of checkpoints the last is enough: decisions are what this is read for.
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

absl::StatusOr<std::string> AskWhy(const Args& args, const std::string& word, std::string* run_dir) {
  GT_ASSIGN_OR_RETURN(Cluster cluster, OpenCluster(args, Start::kNever));
  GT_ASSIGN_OR_RETURN(const JobDoc job, FindJob(cluster, word, Without::kNewest));
  *run_dir = job.run_dir;
  return Ask(cluster, core::ClientWhy{JobId(job.id)});
}

absl::Status Why(const Args& args) {
  const std::string word = args.words.empty() ? "" : args.words[0];
  std::string run_dir;
  absl::StatusOr<std::string> asked =
      IsRunDirectory(word) ? LeftJob(args, word) : AskWhy(args, word, &run_dir);
  if (!asked.ok() && !IsRunDirectory(word)) {
    GT_ASSIGN_OR_RETURN(LeftAnswer left, LeftInstead(asked.status(), args, word));
    Complain(SafeText(left.note));
    asked = std::move(left.json);
  }
  GT_ASSIGN_OR_RETURN(const std::string text, std::move(asked));
  json why = json::parse(ShallowJson(text), nullptr, false);
  if (!why.is_object()) return absl::InternalError("the head's answer is not a JSON object");
  AddEarlierEvents(run_dir, why);
  Print(args.Has("json") ? why.dump(-1, ' ', false, json::error_handler_t::replace) + "\n" : ExplainJob(why));
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
