#include "runtime/store/disk_space.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/logging.h"
#include "base/unique_fd.h"
#include "base/units.h"

namespace gtrain::store {
namespace {

uint64_t Share(uint64_t total, double share, uint64_t least, uint64_t most) {
  return std::clamp(static_cast<uint64_t>(static_cast<double>(total) * share), least, most);
}

}  // namespace

DiskSpace::DiskSpace(std::string directory, std::string ballast_path, SpaceLimits limits)
    : directory_(std::move(directory)), ballast_path_(std::move(ballast_path)), limits_(limits) {
  struct stat info;
  has_ballast_ = stat(ballast_path_.c_str(), &info) == 0;
}

absl::StatusOr<port::StoreSpace> DiskSpace::Check() {
  struct statvfs disk;
  const auto look = [&] { return statvfs(directory_.c_str(), &disk) == 0; };
  if (!look()) return ErrnoStatus(errno, directory_);
  const uint64_t total = disk.f_blocks * disk.f_frsize;
  uint64_t free = disk.f_bavail * disk.f_frsize;
  const uint64_t low = Share(total, limits_.low_share, limits_.low_min, limits_.low_max);
  if (free < Share(total, limits_.critical_share, limits_.critical_min, limits_.critical_max) &&
      has_ballast_) {
    has_ballast_ = false;
    if (unlink(ballast_path_.c_str()) == 0) {
      LogWarning("the disk of ", directory_, " is nearly full (", PrintBytes(free),
                 " free): gave the ballast file back");
    }
    if (look()) free = disk.f_bavail * disk.f_frsize;
  } else if (!has_ballast_ && free >= low + 2 * limits_.ballast) {
    MakeBallast();
  }
  port::StoreSpace space;
  space.free_bytes = free;
  space.total_bytes = total;
  space.level = free < limits_.reserve ? port::SpaceLevel::kFull
                : free < low           ? port::SpaceLevel::kLow
                                       : port::SpaceLevel::kPlenty;
  if (port::StoreSpace of_files = space; (of_files.level = LevelOfFiles(disk, &of_files.text)) > space.level)
    return of_files;
  if (space.level == port::SpaceLevel::kPlenty) return space;
  space.text = absl::StrCat(
      "the disk of ", directory_, " has ", PrintBytes(free), " free of ", PrintBytes(total),
      "; the head needs ", PrintBytes(space.level == port::SpaceLevel::kFull ? limits_.reserve : low),
      space.level == port::SpaceLevel::kFull ? " to write anything" : " to take new jobs",
      ": free some space there");
  return space;
}

// A disk with room for bytes may have none for another file, and RocksDB opens a new one every few MiB.
port::SpaceLevel DiskSpace::LevelOfFiles(const struct statvfs& disk, std::string* text) const {
  if (disk.f_files == 0) return port::SpaceLevel::kPlenty;  // the file system makes them as it needs them
  const uint64_t free = disk.f_favail;
  const uint64_t low = Share(disk.f_files, limits_.low_share, limits_.low_files_min, limits_.low_files_max);
  const bool full = free < limits_.reserve_files;
  if (!full && free >= low) return port::SpaceLevel::kPlenty;
  *text = absl::StrCat("the disk of ", directory_, " takes ", free, " more files of ", disk.f_files,
                       " (inodes, `df -i`); the head needs ", full ? limits_.reserve_files : low,
                       full ? " to write anything" : " to take new jobs", ": remove some files there");
  return full ? port::SpaceLevel::kFull : port::SpaceLevel::kLow;
}

void DiskSpace::MakeBallast() {
  if (ballast_failed_ || limits_.ballast == 0) return;
  UniqueFd fd(open(ballast_path_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  // fallocate itself, not posix_fallocate: where the file system cannot, writing it out is not worth it.
  if (fd.valid() && fallocate(fd.get(), 0, 0, static_cast<off_t>(limits_.ballast)) == 0) {
    has_ballast_ = true;
    return;
  }
  ballast_failed_ = true;
  unlink(ballast_path_.c_str());
}

}  // namespace gtrain::store
