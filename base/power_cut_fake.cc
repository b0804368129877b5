// fsync and fdatasync defined in the program come before those of libc, for the shared libraries it loads
// too: that is how RocksDB's syncs are seen. Each file seen is kept open, so that an inode number means one
// file for the whole test and a file that was replaced or deleted can still be copied.
#include "base/power_cut_fake.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/file.h"
#include "base/status_macros.h"

namespace gtrain {
namespace {

std::atomic<PowerCut*> watching{nullptr};

int Sync(long number, int fd) {
  PowerCut* const cut = watching;
  if (cut == nullptr) return static_cast<int>(syscall(number, fd));
  if (const int error = cut->TakeFailure(fd); error != 0) {
    errno = error;
    return -1;
  }
  const int result = static_cast<int>(syscall(number, fd));
  if (result == 0) cut->Synced(fd);
  return result;
}

struct stat StatOf(int fd) {
  struct stat info = {};
  GT_CHECK(fstat(fd, &info) == 0);
  return info;
}

}  // namespace

extern "C" {
__attribute__((visibility("default"))) int fsync(int fd) { return Sync(SYS_fsync, fd); }
__attribute__((visibility("default"))) int fdatasync(int fd) { return Sync(SYS_fdatasync, fd); }
}

PowerCut::PowerCut(const std::string& folder) {
  const UniqueFd root(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  GT_CHECK(root.valid());
  const struct stat info = StatOf(root.get());
  root_ = {info.st_dev, info.st_ino};
  {
    MutexLock lock(&mutex_);
    Adopt(folder);
  }
  PowerCut* none = nullptr;
  GT_CHECK(watching.compare_exchange_strong(none, this));
}

PowerCut::~PowerCut() { watching = nullptr; }

// The folder's names now; files not seen before are opened, folders not seen before begin without names.
PowerCut::Names PowerCut::List(int folder_fd) {
  Names names;
  DIR* const dir = fdopendir(openat(folder_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  GT_CHECK(dir != nullptr);
  while (const dirent* entry = readdir(dir)) {
    const std::string name = entry->d_name;
    if (name == "." || name == "..") continue;
    UniqueFd fd(openat(dirfd(dir), entry->d_name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (!fd.valid()) continue;  // deleted meanwhile, or a link or socket: none of ours
    const struct stat info = StatOf(fd.get());
    const Id id{info.st_dev, info.st_ino};
    names[name] = id;
    if (S_ISDIR(info.st_mode)) {
      folders_.try_emplace(id);
    } else if (!files_.contains(id)) {
      files_[id].fd = std::move(fd);
    }
  }
  closedir(dir);
  return names;
}

void PowerCut::Adopt(const std::string& path) {
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  GT_CHECK(fd.valid());
  const struct stat info = StatOf(fd.get());
  const Names names = List(fd.get());
  folders_[{info.st_dev, info.st_ino}] = names;
  for (const auto& [name, id] : names) {
    if (folders_.contains(id)) {
      Adopt(absl::StrCat(path, "/", name));
    } else {
      File& file = files_.at(id);
      file.synced = static_cast<uint64_t>(StatOf(file.fd.get()).st_size);
    }
  }
}

void PowerCut::Synced(int fd) {
  const struct stat info = StatOf(fd);
  const Id id{info.st_dev, info.st_ino};
  MutexLock lock(&mutex_);
  if (S_ISDIR(info.st_mode)) {
    if (folders_.contains(id)) folders_[id] = List(fd);
    return;
  }
  File& file = files_[id];
  if (!file.fd.valid()) {
    file.fd.reset(open(absl::StrCat("/proc/self/fd/", fd).c_str(), O_RDONLY | O_CLOEXEC));
    GT_CHECK(file.fd.valid());
  }
  if (!file.lost) file.synced = static_cast<uint64_t>(info.st_size);
}

void PowerCut::FailNextSync(int error) {
  MutexLock lock(&mutex_);
  next_error_ = error;
}

int PowerCut::TakeFailure(int fd) {
  const struct stat info = StatOf(fd);
  MutexLock lock(&mutex_);
  if (next_error_ == 0 || S_ISDIR(info.st_mode)) return 0;
  files_[{info.st_dev, info.st_ino}].lost = true;
  return std::exchange(next_error_, 0);
}

absl::Status PowerCut::Copy(const Id& folder, const std::string& to) {
  GT_RETURN_IF_ERROR(MakeDirs(to));
  for (const auto& [name, id] : folders_.at(folder)) {
    const std::string path = absl::StrCat(to, "/", name);
    if (folders_.contains(id)) {
      GT_RETURN_IF_ERROR(Copy(id, path));
      continue;
    }
    const File& file = files_.at(id);
    std::string bytes(file.synced, '\0');
    size_t have = 0;
    while (have < bytes.size()) {
      const ssize_t n =
          pread(file.fd.get(), bytes.data() + have, bytes.size() - have, static_cast<off_t>(have));
      if (n <= 0)
        return absl::InternalError(absl::StrCat(name, " became shorter than it was when it was synced"));
      have += static_cast<size_t>(n);
    }
    const UniqueFd out(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (!out.valid()) return ErrnoStatus(errno, path);
    if (write(out.get(), bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) {
      return ErrnoStatus(errno, path);
    }
  }
  return absl::OkStatus();
}

absl::Status PowerCut::Leave(const std::string& copy) {
  MutexLock lock(&mutex_);
  return Copy(root_, copy);
}

}  // namespace gtrain
