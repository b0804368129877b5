// HeadRecords reads jobs from their records and writes them (job_records.h). PURE. Private to
// runtime/core/head.
//
// A step writes only the part of a job that it changed: an exit costs an exit and a status, however many
// ranks the job has and however long its job file is. HeadState owns it; only the loop's thread uses it; it
// never blocks and has no state of its own. Job::written says which part of a job is stored.
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

  // Takes the jobs out of `jobs`, so that each makes room for the next. DataLoss: two records contradict each
  // other.
  absl::Status LoadJobs(std::map<JobId, StoredJob>& jobs);
  // Writes all jobs that the step has changed.
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
