// For tests: what a power cut would leave of a folder, without cutting anything.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "base/mutex.h"
#include "base/unique_fd.h"

namespace gtrain {

// A program that links this has fsync and fdatasync of its own: they do what they always do and take note of
// it. The disk assumed is the strictest that POSIX allows: of a file there remains what it held at its newest
// sync, of a folder the names it had at its newest sync. Files are taken to be written once, front to back.
//
// One at a time. Thread-safe against syncs, which may come from any thread.
class PowerCut {
 public:
  // Watches `folder`; what it holds now is taken to be on disk.
  explicit PowerCut(const std::string& folder);
  ~PowerCut();
  PowerCut(const PowerCut&) = delete;

  // Copies to `copy`, which is made, what the disk would hold if the power went now.
  absl::Status Leave(const std::string& copy);

  // Makes the next fsync or fdatasync of a file fail with `error`. The data that it should have kept are lost
  // for good, as the kernel drops them: a later sync of that file succeeds and keeps nothing more (fault H4).
  void FailNextSync(int error);

  void Synced(int fd);
  int TakeFailure(int fd);  // 0: none

 private:
  using Id = std::pair<dev_t, ino_t>;
  struct File {
    UniqueFd fd;  // keeps the inode's number from being used again
    uint64_t synced = 0;
    bool lost = false;
  };
  using Names = std::map<std::string, Id>;

  Names List(int folder_fd) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Adopt(const std::string& path) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Copy(const Id& folder, const std::string& to) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Mutex mutex_;
  Id root_;
  std::map<Id, Names> folders_ ABSL_GUARDED_BY(mutex_);
  std::map<Id, File> files_ ABSL_GUARDED_BY(mutex_);
  int next_error_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace gtrain
