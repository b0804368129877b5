// Writes the files of the head in run directories and the index of its runs, on a thread of their own.
#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "base/logging.h"
#include "runtime/head/run_files.h"
#include "runtime/head/service.h"

namespace gtrain::head {
namespace {

constexpr absl::Duration kLogPause = absl::Seconds(10);

}  // namespace

void HeadService::operator()(const core::EmitEvent& event) {
  if (event.run_dir.empty()) return;
  PostRunFile(
      [dir = event.run_dir, owner = RunFolderOwner{files_.cluster, event.job, ""}, line = EventLine(event),
       make = options_.local] { return AppendEvent(dir, owner, line, make); },
      event.run_dir);
}

void HeadService::operator()(const core::WriteFailure& failure) {
  if (failure.run_dir.empty()) return;
  PostRunFile([dir = failure.run_dir, owner = RunFolderOwner{files_.cluster, failure.job, ""},
               document = failure.document,
               make = options_.local] { return WriteFailureFile(dir, owner, document->Json(), make); },
              failure.run_dir);
}

// Writes the result after the job's events, on the same thread.
void HeadService::operator()(const core::WriteResult& result) {
  PostRunFile(
      [result, owner = RunFolderOwner{files_.cluster, result.job, ""}, make = options_.local && !result.late,
       runs = runs_] {
        const std::string json = result.document->Json();
        const absl::Status in_run_dir =
            result.run_dir.empty() ? absl::OkStatus() : WriteResultFile(result.run_dir, owner, json, make);
        const absl::Status in_index = runs == nullptr ? absl::OkStatus() : runs->Put(json);
        return in_index.ok() ? in_run_dir : in_index;
      },
      result.run_dir);
}

// A head that died between the end of a job and its result leaves that to the next.
void HeadService::FindUnwritten() {
  (void)files_thread_->Post(
      [finished = core_->Finished(), cluster = files_.cluster, runs = runs_, completions = completions_] {
        Completions::Item item;
        const size_t listed = finished.size() - std::min(finished.size(), RunIndex::kRunsMax);
        for (size_t i = 0; i < finished.size(); ++i) {
          const auto& [job, run_dir] = finished[i];
          const bool unlisted = runs != nullptr && i >= listed && !runs->Has(job);
          if (unlisted || LacksResultFile(run_dir, {cluster, job, ""})) item.unwritten.push_back(job);
        }
        if (!item.unwritten.empty()) completions->Push(std::move(item));
      });
}

void HeadService::PostRunFile(std::function<absl::Status()> write, const std::string& what) {
  const bool posted = files_thread_->Post([write = std::move(write)] {
    const absl::Status status = write();
    // Without the directory the job came from another machine, whose client has its own.
    if (!status.ok() && !absl::IsNotFound(status)) LogWarning("run directory: ", status.message());
  });
  if (posted) return;
  ++counters_.run_file_drops;
  const Instant now = clock_->Now();
  if (now - run_file_log_ < kLogPause) return;
  run_file_log_ = now;
  LogWarning("the run directory ", what, " does not keep up; ", counters_.run_file_drops,
             " lines dropped so far");
}

void HeadService::WriteLate(const std::vector<JobId>& jobs) {
  for (const JobId& job : jobs) {
    std::optional<core::WriteResult> result = core_->ResultOf(job);
    if (!result) continue;
    result->late = true;
    (*this)(*result);
  }
}

}  // namespace gtrain::head
