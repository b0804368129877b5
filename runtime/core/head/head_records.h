// HeadRecords: jobs from their records and into them (job_records.h). PURE. Private to runtime/core/head.
//
// A step writes of a job what it changed: an exit costs an exit and a status, however many ranks the job has
// and however long its job file is. Owned by HeadState; the loop's thread only; never blocks; what it needs
// to know of a job lies in Job::written.
#pragma once
#include <map>

#include "absl/status/status.h"
#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_model.h"
#include "runtime/core/values/job_records.h"

namespace gtrain::core {

class Recovery;

class HeadRecords {
 public:
  HeadRecords(HeadContext& context, HeadModel& model, Recovery& recovery);

  // Leaves `jobs` empty. DataLoss: a record contradicts another.
  absl::Status LoadJobs(std::map<JobId, StoredJob>& jobs);
  // All that changed in the step that runs.
  void WriteDirtyJobs(Instant now);
  void DeleteJob(const Job& job);

 private:
  void WriteJob(Job& job);
  void WriteExits(Job& job);
  void DeleteExits(const Job& job);

  HeadContext& context_;
  HeadModel& model_;
  Recovery& recovery_;
};

}  // namespace gtrain::core
