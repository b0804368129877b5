// The records of a store as they are read, and the jobs that they make. PURE.
//
// A store holds a job as several records that change together in one atomic batch: what was submitted, its
// status, the newest grant, the exits of that generation, one for each fault, and the nodes that are being
// freed (records.h). The status counts the others, so a job either comes back whole or is set aside by name:
// it is never taken for one that lacks an exit or a fault.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/core/values/records.h"

namespace gtrain::core {

// The most exits in a JobExitsRecord: a single decode stays small however many ranks a job has.
inline constexpr size_t kExitsPerRecord = 1024;

// The records of one job in a store.
struct StoredJob {
  // A JobExitRecord without the job.
  struct Exit {
    int index = 0;
    RankExit exit;
  };
  JobId id;
  std::optional<JobRecord> whole;  // as an older head wrote it
  std::optional<JobSubmission> submission;
  std::optional<JobStatusRecord> status;
  std::optional<JobGrantRecord> grant;
  std::optional<JobUnreleasedRecord> unreleased;
  std::vector<JobExitsRecord> packed;   // by their first exit
  std::vector<Exit> exits;              // in any order
  std::vector<JobFaultRecord> faults;   // by generation
  std::vector<std::string> unreadable;  // keys
};

// All that a store holds. It is filled while the store is read, record by record in any order, so that
// nothing else needs to hold all of them: a `Record` is as large as the largest of its kinds, an exit is not.
struct StoredRecords {
  StoredRecords() = default;
  StoredRecords(StoredRecords&&) = default;
  StoredRecords& operator=(StoredRecords&&) = default;

  void Add(Record record);
  // A record that is there and cannot be read.
  void SetAside(std::string key);
  bool empty() const { return count == 0; }

  size_t count = 0;  // of what was added
  std::optional<ClusterRecord> cluster;
  std::vector<NodeRecord> nodes;
  std::vector<RequestRecord> requests;
  std::vector<CheckpointRecord> checkpoints;
  std::map<JobId, StoredJob> jobs;     // each of which there is anything
  std::vector<std::string> set_aside;  // keys

 private:
  StoredJob& JobOf(const JobId& id);
  StoredJob* last_ = nullptr;  // in a store the records of a job lie side by side
};

// Gathers the records of one job from a store in memory. For tests and checkers.
StoredJob GatherJob(const std::map<std::string, Record>& store, const JobId& job);

// Returns DataLoss that names the first record that is missing, cannot be read or is one too many. A whole
// record counts for itself: the records beside it are from before a head of an older version took the job up.
absl::Status CheckWhole(const StoredJob& stored);
// Moves out of it. After an error it is as it was.
absl::StatusOr<JobRecord> JoinJob(StoredJob&& stored);

// The keys of all records that are there.
std::vector<std::string> KeysOf(const StoredJob& stored);

// `packed`: how many of the exits lie in JobExitsRecords.
JobStatusRecord StatusRecordOf(const JobRecord& record, size_t packed = 0);

}  // namespace gtrain::core
