// Copies of a store: complete, checksummed, each verified after it was made. Free functions that block.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace rocksdb {
class DB;
}

namespace gtrain::store {

inline constexpr int kBackupsKept = 10;  // in one directory; files that did not change are shared

// Adds a backup to directory `dir`, made if missing. Reads it back and checks every checksum before it
// returns; then drops all but the newest kBackupsKept.
absl::Status MakeBackup(rocksdb::DB& db, const std::string& dir);

struct BackupInfo {
  uint32_t id = 0;
  absl::Time time;
  uint64_t bytes = 0;
};
// Oldest first. NotFound: no backup is in `dir`.
absl::StatusOr<std::vector<BackupInfo>> ListBackups(const std::string& dir);

// Writes backup `id` (0: the newest) into directory `path`, which must not exist. DataLoss: the backup is
// damaged; nothing is left behind.
absl::Status RestoreBackup(const std::string& dir, uint32_t id, const std::string& path);

}  // namespace gtrain::store
