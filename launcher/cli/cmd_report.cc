#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/clock.h"
#include "base/json_depth.h"
#include "base/status_macros.h"
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

// ---------------------------------------------------------------- what there is

absl::StatusOr<std::string> AskStatus(const Args& args, const std::string& word) {
  GT_ASSIGN_OR_RETURN(Cluster cluster, OpenCluster(args, Start::kNever));
  GT_ASSIGN_OR_RETURN(const JobDoc job, FindJob(cluster, word, Without::kNewest));
  return Ask(cluster, core::ClientStatus{JobId(job.id)});
}

// The job as `status --json` has it: as the head says, or where none answers as the job left it.
absl::StatusOr<json> FindReported(const Args& args, const std::string& word) {
  absl::StatusOr<std::string> asked = IsRunDirectory(word) ? LeftJob(args, word) : AskStatus(args, word);
  if (!asked.ok() && !IsRunDirectory(word)) {
    GT_ASSIGN_OR_RETURN(LeftAnswer left, LeftInstead(asked.status(), args, word));
    Complain(SafeText(left.note));
    asked = std::move(left.json);
  }
  GT_ASSIGN_OR_RETURN(const std::string text, std::move(asked));
  json job = json::parse(ShallowJson(text), nullptr, /*allow_exceptions=*/false);
  if (const auto jobs = job.find("jobs"); job.is_object() && jobs != job.end() && jobs->is_array()) {
    if (jobs->empty()) return absl::NotFoundError(absl::StrCat("the head has no job ", word));
    job = json(jobs->front());
  }
  if (!job.is_object()) return absl::InternalError("what is known of the job is not a JSON object");
  return job;
}

// ---------------------------------------------------------------- how it is shown

std::optional<double> NumberOf(const json& object, const char* key) {
  const auto it = object.is_object() ? object.find(key) : object.end();
  return it != object.end() && it->is_number() ? std::optional(it->get<double>()) : std::nullopt;
}

std::string CountOf(const json& object, const char* key, const char* one, const char* more) {
  const double count = NumberOf(object, key).value_or(0);
  return absl::StrFormat("%.0f %s", count, count == 1 ? one : more);
}

// The labels in the order of the table.
constexpr std::pair<const char*, const char*> kRows[] = {
    {"step", "steps"},
    {"recomputed", "recomputed steps"},
    {"checkpoint_stall", "waiting for checkpoints"},
    {"idle", "waiting for other ranks"},
    {"lost", "lost with a generation"},
    {"reforming", "re-forming"},
    {"starting", "starting"},
    {"unreported", "running, no steps reported"},
    {"waiting_for_capacity", "waiting for capacity"},
    {"waiting_for_storage", "waiting for the storage"},
    {"ending", "ending"},
};

std::string TimeRow(absl::string_view label, double seconds, double all) {
  return absl::StrFormat("  %-28s %14.1f %6.1f %%\n", label, seconds, all > 0 ? 100 * seconds / all : 0.0);
}

std::string TableOf(const json& goodput) {
  const double all = NumberOf(goodput, "rank_seconds").value_or(0);
  const json seconds = goodput.value("seconds", json::object());
  std::string out = absl::StrFormat("  %-28s %14s %8s\n", "", "RANK-SECONDS", "SHARE");
  for (const auto& [key, label] : kRows) {
    if (const std::optional<double> of = NumberOf(seconds, key)) {
      out += TimeRow(label, *of, all);
    } else if (absl::string_view(key) != "unreported") {
      absl::StrAppendFormat(&out, "  %-28s %14s\n", label, "not measured");
    }
  }
  for (const auto& [key, value] : seconds.items()) {  // of a newer head
    const bool known = std::ranges::any_of(kRows, [&](const auto& row) { return key == row.first; });
    if (!known && value.is_number()) out += TimeRow(SafeText(key), value.get<double>(), all);
  }
  return out + TimeRow("all", all, all);
}

std::string StepsOf(const json& goodput) {
  const json steps = goodput.value("steps", json::object());
  const std::optional<double> first = NumberOf(steps, "first"), last = NumberOf(steps, "last");
  if (!first || !last) return "steps: none reported\n";
  std::string out = absl::StrFormat("steps: %.0f to %.0f", *first, *last);
  const std::optional<double> applied = NumberOf(steps, "applied"), again = NumberOf(steps, "recomputed");
  if (applied && again) {
    absl::StrAppendFormat(&out, ", %.0f applied, %.0f recomputed", *applied, *again);
  } else {
    absl::StrAppend(&out, "; the program counts its steps anew, so that which it recomputed is not known");
  }
  return out + "\n";
}

std::string SinceText(const json& goodput) {
  absl::Time since;
  std::string error;
  if (!absl::ParseTime(absl::RFC3339_full, SafeTextOf(goodput, "since"), &since, &error)) return "";
  return absl::StrCat(" since ", PrintClock(since, RealClock().WallNow()));
}

std::string ReportOf(const json& job, const json& goodput) {
  std::string out = absl::StrCat(SafeTextOf(job, "id"), " ", SafeTextOf(job, "state"), ": ",
                                 CountOf(goodput, "generations", "generation", "generations"), ", ",
                                 CountOf(goodput, "losses", "loss", "losses"), "\n");
  const json seconds = goodput.value("seconds", json::object());
  const bool whole = seconds.contains("idle") && seconds.contains("checkpoint_stall");
  if (const std::optional<double> share = NumberOf(goodput, "goodput")) {
    absl::StrAppendFormat(&out, "goodput: %s%.1f %% of all rank-seconds went into steps that count%s\n",
                          whole ? "" : "at most ", 100 * *share,
                          whole ? "" : " (what is not measured is part of them)");
  } else {
    absl::StrAppend(&out, "goodput: not known, since no steps were reported\n");
  }
  absl::StrAppend(&out, StepsOf(goodput), "rank-seconds", SinceText(goodput), ", of ",
                  CountOf(goodput, "wanted", "rank", "ranks"), ", the most that the job asks for:\n",
                  TableOf(goodput));
  return out;
}

absl::Status ReportGoodput(const Args& args) {
  GT_ASSIGN_OR_RETURN(const json job, FindReported(args, args.words.empty() ? "" : args.words[0]));
  const json goodput = job.value("goodput", json());
  if (!goodput.is_object()) {
    return absl::NotFoundError(absl::StrCat("nobody counted where the time of ", SafeTextOf(job, "id"),
                                            " went: an older version of gtrain ran it. `gtrain status ",
                                            SafeTextOf(job, "id"), "` has what it left"));
  }
  if (!args.Has("json")) return Print(ReportOf(job, goodput)), absl::OkStatus();
  Print(OneLine({{"job", TextOf(job, "id")},
                 {"name", TextOf(job, "name")},
                 {"state", TextOf(job, "state")},
                 {"goodput", goodput}}) +
        "\n");
  return absl::OkStatus();
}

int RunReport(const Args& args) {
  const absl::Status status = ReportGoodput(args);
  return status.ok() ? kDone : Report(status);
}

}  // namespace

Verb ReportVerb() {
  Verb verb;
  verb.name = "report";
  verb.summary = "Tell where the time of a job's ranks went";
  verb.usage = "[JOB]";
  verb.details =
      "Every second of every rank that the job asks for, by what it went into: steps, steps that were made "
      "again,\n"
      "checkpoints, other ranks, re-forming, starting, waiting for room. Without JOB: the only job that "
      "runs, "
      "else\n"
      "the newest that is over. JOB may be the run directory of a job that is over. What nobody measured is "
      "said so\n"
      "and is part of the steps.\n\n"
      "  gtrain report fashion-mnist-1\n"
      "  gtrain report gtrain-runs/fashion-mnist-1-5c3e90ab\n"
      "  gtrain report --json          as `goodput` in `gtrain status --json`";
  verb.flags = {ContextFlag(), {"json", '\0', "", "one document: job, name, state, goodput"}};
  verb.completes = Completes::kJobs;
  verb.words_max = 1;
  verb.run = RunReport;
  return verb;
}

}  // namespace gtrain::cli
