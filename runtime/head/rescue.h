// Commands of a person for a head's records: copy them, put a copy back, or begin again from what the agents
// hold (faults H7-H10). Free functions that block; docs/operations.md tells when to use which.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "runtime/control/cluster_dir.h"
#include "runtime/core/values/job_records.h"
#include "runtime/port/meta_store.h"

namespace gtrain::head {

// Records that are there and cannot be read, as an older or a damaged version might have written them, are
// set aside: they stay in the store, each is named in the log, and so is each job of which a record is
// missing. DataLoss: the record of the cluster itself is among these.
absl::StatusOr<core::StoredRecords> LoadRecords(port::MetaStore& store);

// All of these return a text for the person who asked.

// Copies store, keys and the list of allowed keys into directory `dir`, beside commits. The copy is verified.
absl::StatusOr<std::string> BackupCluster(port::MetaStore& store, const net::ClusterFiles& files,
                                          const std::string& dir);
// Makes the same backup while no head runs.
absl::StatusOr<std::string> BackupOffline(const std::string& cluster_dir, const std::string& dir);

struct RestoreOptions {
  std::string cluster_dir;  // made from the backup where it is missing
  std::string backup_dir;
  uint32_t id = 0;               // 0: the newest
  bool replace = false;          // an existing store may be moved aside
  bool accept_unsealed = false;  // as of RecoverCluster
};
// The epoch is raised by 1,000 and the next head takes up what agents hold. FailedPrecondition: a head runs,
// the store is not empty, or the backup is of another cluster.
absl::StatusOr<std::string> RestoreCluster(const RestoreOptions& options);

// Without a backup: keeps the records that can still be read, if any; the next head takes up what agents
// hold. Needs the cluster's keys. `accept_unsealed`: also grants from before there were seals (messages.h),
// which any node could have made up.
absl::StatusOr<std::string> RecoverCluster(const std::string& cluster_dir, bool accept_unsealed);

}  // namespace gtrain::head
