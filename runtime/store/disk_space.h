// How much room the store's disk has, and what to do when it runs out (fault H3): below 10 % no new jobs,
// below 2 % the ballast file is given back, below a fixed reserve nothing is written any more. The same
// limits hold for the number of files, where the file system has one. RocksDB must never see ENOSPC: the
// version we use aborts the process then.
#pragma once
#include <sys/statvfs.h>

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "runtime/port/meta_store.h"

namespace gtrain::store {

struct SpaceLimits {
  // Shares of the disk, kept between bounds so that neither a huge nor a tiny disk is unreasonable.
  double low_share = 0.10, critical_share = 0.02;
  uint64_t low_min = 128 << 20, low_max = uint64_t{2} << 30;
  uint64_t critical_min = 64 << 20, critical_max = 512 << 20;
  uint64_t reserve = 32 << 20;  // of which RocksDB may still need some: log, memtable, manifest
  uint64_t ballast = 32 << 20;
  uint64_t low_files_min = 32, low_files_max = 1024;  // of a tenth of all
  uint64_t reserve_files = 16;                        // of which RocksDB opens several at once
};

// Thread-compatible; blocks on the file system.
class DiskSpace {
 public:
  // `directory` lies on the disk to watch; the ballast file is `ballast_path`, on the same disk.
  DiskSpace(std::string directory, std::string ballast_path, SpaceLimits limits);

  // Looks now; gives the ballast back or makes it again as the limits say.
  absl::StatusOr<port::StoreSpace> Check();

 private:
  port::SpaceLevel LevelOfFiles(const struct statvfs& disk, std::string* text) const;
  void MakeBallast();
  const std::string directory_, ballast_path_;
  const SpaceLimits limits_;
  bool has_ballast_ = false;
  bool ballast_failed_ = false;
};

}  // namespace gtrain::store
