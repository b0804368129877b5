// The records of a job, as they lie in a store, and the job they make. PURE.
//
// A store holds a job as several records that change together in one atomic batch: what was submitted, its
// status, the newest grant, one for each exit of that generation, one for each fault, and the nodes that are
// being freed (records.h). The status counts the others, so a job either comes back whole or is set aside by
// name: it is never taken for one that lacks an exit or a fault.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/core/records.h"

namespace gtrain::core {

// What a store holds of one job. Points into the records it was gathered from.
struct StoredJob {
  JobId id;
  const JobRecord* whole = nullptr;  // as an older head wrote it
  const JobSubmission* submission = nullptr;
  const JobStatusRecord* status = nullptr;
  const JobGrantRecord* grant = nullptr;
  const JobUnreleasedRecord* unreleased = nullptr;
  std::vector<const JobExitRecord*> exits;
  std::vector<const JobFaultRecord*> faults;
  std::vector<std::string> unreadable;  // keys
};

// Each job of which there is anything. `unreadable`: keys of records that are there and cannot be read.
std::map<JobId, StoredJob> GatherJobs(const std::vector<Record>& records,
                                      const std::vector<std::string>& unreadable);

// Of one job, from a store in memory. For tests and checkers.
StoredJob GatherJob(const std::map<std::string, Record>& store, const JobId& job);

// DataLoss names the first record that is missing, cannot be read or is one too many. A whole record counts
// for itself: what lies beside it is from before a head of an older version took the job up.
absl::Status CheckWhole(const StoredJob& stored);
absl::StatusOr<JobRecord> JoinJob(const StoredJob& stored);

// Of all that is there.
std::vector<std::string> KeysOf(const StoredJob& stored);

JobStatusRecord StatusRecordOf(const JobRecord& record);

}  // namespace gtrain::core
