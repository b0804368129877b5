// MetaStore on RocksDB: one column family, every commit synced, damage refused instead of skipped (faults
// H1-H7).
#pragma once
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "runtime/port/meta_store.h"

namespace gtrain::store {

// Opens or makes the database in directory `path` (its parent must exist).
// FailedPrecondition: another process has it open (fault H9). DataLoss: something in the log or in a table is
// damaged; the message says what to do (faults H5, H7). Blocks.
// The store is thread-compatible. The first failed Commit, or an error of RocksDB's own background work,
// makes every later Commit fail too: the only way on is a restart (fault H4).
absl::StatusOr<std::unique_ptr<port::MetaStore>> OpenRocksStore(const std::string& path);

}  // namespace gtrain::store
