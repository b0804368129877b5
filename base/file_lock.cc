// Open file description locks: unlike those of flock() they can be asked for without being taken, and unlike
// those of fcntl(F_SETLK) they are not lost when the process closes another descriptor of the file.
#include "base/file_lock.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/status_macros.h"

namespace gtrain {
namespace {

constexpr int kPollMs = 20;

struct flock WholeFile() {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  return lock;
}

// False: another one holds it.
absl::StatusOr<bool> TryLock(int fd, const std::string& path) {
  struct flock lock = WholeFile();
  if (fcntl(fd, F_OFD_SETLK, &lock) == 0) return true;
  if (errno == EAGAIN || errno == EACCES) return false;
  return ErrnoStatus(errno, absl::StrCat("lock ", path));
}

}  // namespace

absl::StatusOr<UniqueFd> LockFile(const std::string& path, absl::Duration patience) {
  const RealClock clock;
  const Instant deadline = clock.Now() + patience;
  while (true) {
    UniqueFd fd(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!fd.valid()) return ErrnoStatus(errno, absl::StrCat("open ", path));
    GT_ASSIGN_OR_RETURN(const bool locked, TryLock(fd.get(), path));
    if (locked && LeadsTo(path, fd.get())) return fd;
    if (clock.Now() >= deadline) return absl::UnavailableError(absl::StrCat(path, " is locked"));
    poll(nullptr, 0, kPollMs);
  }
}

absl::StatusOr<UniqueFd> WriteLockedFile(const std::string& path, const std::string& data) {
  const std::string temporary = absl::StrCat(path, ".new.", getpid());
  GT_RETURN_IF_ERROR(WriteFileDurable(temporary, data, 0600));
  GT_ASSIGN_OR_RETURN(UniqueFd fd, LockFile(temporary));
  if (rename(temporary.c_str(), path.c_str()) != 0) {
    return ErrnoStatus(errno, absl::StrCat("cannot rename to ", path));
  }
  return fd;
}

bool IsLocked(const std::string& path) {
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW));
  if (!fd.valid()) return false;
  struct flock lock = WholeFile();
  return fcntl(fd.get(), F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

bool LeadsTo(const std::string& path, int fd) {
  struct stat there {};
  struct stat open_file {};
  if (stat(path.c_str(), &there) != 0) return errno != ENOENT && errno != ENOTDIR;
  if (fstat(fd, &open_file) != 0) return true;
  return there.st_dev == open_file.st_dev && there.st_ino == open_file.st_ino;
}

}  // namespace gtrain
