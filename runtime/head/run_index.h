// The jobs of a local cluster that are over, in one file beside its keys (docs/formats/run-directory.md):
// what `gtrain status` shows when the cluster has ended. Blocks on the disk; one thread uses it.
#pragma once
#include <atomic>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/ids.h"

namespace gtrain::head {

class RunIndex {
 public:
  static constexpr size_t kRunsMax = 500;  // the newest

  RunIndex(std::string path, ClusterId cluster);

  bool Has(const JobId& job) const;
  // Adds the part of a job's result that a list shows, in place of an earlier entry of the job, and writes
  // the index; while that fails, Write tries again.
  absl::Status Put(const std::string& result);
  // Writes the entries that are not written yet.
  absl::Status Write();
  bool pending() const { return !written_; }  // any thread may ask

 private:
  struct Run {
    std::string job, ended, json;
  };
  void Load();

  const std::string path_;
  const ClusterId cluster_;
  std::vector<Run> runs_;  // in the order in which they ended
  std::atomic<bool> written_ = true;
};

}  // namespace gtrain::head
