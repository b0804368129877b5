#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "launcher/cli/context.h"
#include "launcher/cli/follow.h"
#include "launcher/cli/screen.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"

namespace gtrain::cli {
namespace {

std::string Table(const StatusDoc& doc) {
  if (doc.jobs.empty()) return absl::StrCat("no jobs; ", doc.nodes, doc.nodes == 1 ? " node\n" : " nodes\n");
  size_t width = 4;
  for (const JobDoc& job : doc.jobs) width = std::max(width, job.id.size());
  std::string out = absl::StrFormat("%-*s  %-13s %5s  %s\n", static_cast<int>(width), "JOB", "STATE", "RANKS",
                                    "PROGRESS AND REASON");
  for (const JobDoc& job : doc.jobs) {
    const std::string progress = PrintProgress(job);
    absl::StrAppend(
        &out,
        absl::StrFormat("%-*s  %-13s %5d  ", static_cast<int>(width), job.id, job.state, job.world_size),
        SafeText(job.stuck), job.stuck.empty() ? "" : "; ", progress, progress.empty() ? "" : "; ",
        SafeText(job.reason), "\n");
  }
  return out;
}

std::string Details(const JobDoc& job) {
  std::string out;
  for (const std::string& line : StatusBlock(job, "", 10'000)) absl::StrAppend(&out, line, "\n");
  for (const std::string& note : job.notes) absl::StrAppend(&out, "   ", SafeText(note), "\n");
  if (job.first_fault) absl::StrAppend(&out, "   first fault: ", SafeText(job.first_fault->message), "\n");
  if (!job.run_dir.empty()) absl::StrAppend(&out, "   logs: ", job.run_dir, "/logs\n");
  return out;
}

absl::Status Status(const Args& args) {
  absl::StatusOr<Cluster> cluster = OpenCluster(args, Start::kNever);
  if (absl::IsNotFound(cluster.status()) && args.Has("json")) {
    Print("{\"jobs\": []}\n");  // no local cluster means no local jobs
    return absl::OkStatus();
  }
  if (!cluster.ok()) return cluster.status();
  std::string id;
  if (!args.words.empty()) {
    GT_ASSIGN_OR_RETURN(const JobDoc job, FindJob(*cluster, args.words[0]));
    id = job.id;
  }
  GT_ASSIGN_OR_RETURN(const std::string json, Ask(*cluster, core::ClientStatus{JobId(id)}));
  if (args.Has("json")) {
    Print(json + "\n");
    return absl::OkStatus();
  }
  GT_ASSIGN_OR_RETURN(const StatusDoc doc, ParseStatusDoc(json));
  if (id.empty()) {
    Print(Table(doc));
  } else {
    for (const JobDoc& job : doc.jobs) Print(Details(job));
  }
  return absl::OkStatus();
}

int Run(const Args& args) {
  const absl::Status status = Status(args);
  return status.ok() ? kDone : Report(status);
}

}  // namespace

Verb StatusVerb() {
  Verb verb;
  verb.name = "status";
  verb.summary = "Show the jobs of a cluster, or one job in detail";
  verb.usage = "[JOB]";
  verb.details =
      "  gtrain status\n"
      "  gtrain status fashion-mnist\n"
      "  gtrain status --json          everything the head says; {\"jobs\": []} when no local cluster runs";
  verb.flags = {ContextFlag(), {"json", '\0', "", "the head's document as it is"}};
  verb.words_max = 1;
  verb.run = Run;
  return verb;
}

}  // namespace gtrain::cli
