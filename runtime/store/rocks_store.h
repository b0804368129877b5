// MetaStore on RocksDB: one column family, every commit synced and sealed, damage refused instead of skipped
// (faults H1-H7).
//
//   <path>            the database
//   <path>.seal       what the newest acknowledged commit left: runtime/store/seal_file.h
//   <path>.ballast    room that is given back when the disk is nearly full: runtime/store/disk_space.h
//   <path>.errors     how often a write has failed, and the last failure
#pragma once
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "runtime/port/meta_store.h"
#include "runtime/store/disk_space.h"

namespace gtrain::store {

struct RocksOptions {
  bool create = true;        // make the database where there is none; its parent directory must exist
  bool accept_loss = false;  // take what is readable although the seal says that more was acknowledged
  SpaceLimits space;
};

// NotFound: there is no database, and `create` is off. FailedPrecondition: another process has it open, the
// message names it (fault H9). DataLoss: something is damaged, missing or older than its seal; the message
// says what (faults H5-H7). ResourceExhausted: the disk is full (H3). Blocks. The store is thread-compatible,
// Backup is thread-safe. The first failed Commit, or an error of RocksDB's own background work, makes every
// later Commit fail too: the only way on is a restart (fault H4).
absl::StatusOr<std::unique_ptr<port::MetaStore>> OpenRocksStore(const std::string& path,
                                                                const RocksOptions& options = {});

// The process that has the store open; 0: none, or it cannot be told. Not for a store this process has open.
int64_t StoreOwner(const std::string& path);

// How often a write to this store has failed (fault H4); from the second on its disk counts as bad.
int StoreErrors(const std::string& path);
void ForgetStoreErrors(const std::string& path);

}  // namespace gtrain::store
