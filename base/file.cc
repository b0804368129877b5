#include "base/file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"

namespace gtrain {

absl::Status ErrnoStatus(int error, absl::string_view what) {
  const std::string message = absl::StrCat(what, ": ", strerror(error));
  switch (error) {
    case ENOENT:
      return absl::NotFoundError(message);
    case EACCES:
    case EPERM:
      return absl::PermissionDeniedError(message);
    case EEXIST:
      return absl::AlreadyExistsError(message);
    case ENOSPC:
    case EMFILE:
    case ENFILE:
      return absl::ResourceExhaustedError(message);
    case EAGAIN:
    case ECONNREFUSED:
    case EPIPE:
      return absl::UnavailableError(message);
    default:
      return absl::InternalError(message);
  }
}

absl::StatusOr<std::string> ReadFile(const std::string& path, size_t bytes_max) {
  UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd.valid()) return ErrnoStatus(errno, absl::StrCat("cannot open ", path));
  struct stat st;
  if (fstat(fd.get(), &st) != 0) return ErrnoStatus(errno, absl::StrCat("cannot stat ", path));
  if (!S_ISREG(st.st_mode)) {
    const char* kind = S_ISDIR(st.st_mode)    ? "a directory"
                       : S_ISFIFO(st.st_mode) ? "a FIFO"
                                              : "not a regular file";
    return absl::InvalidArgumentError(absl::StrCat(path, " is ", kind));
  }
  std::string data;
  char buffer[65536];
  while (true) {
    const ssize_t n = read(fd.get(), buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, absl::StrCat("cannot read ", path));
    if (n == 0) return data;
    if (data.size() + static_cast<size_t>(n) > bytes_max) {
      return absl::ResourceExhaustedError(
          absl::StrCat(path, " is larger than the limit of ", bytes_max, " bytes"));
    }
    data.append(buffer, static_cast<size_t>(n));
  }
}

absl::Status WriteFileDurable(const std::string& path, absl::string_view data, int mode) {
  const std::string temporary = absl::StrCat(path, ".tmp.", getpid());
  unlink(temporary.c_str());  // of a process before us that was killed, or a link that leads elsewhere
  {
    UniqueFd fd(open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, mode));
    if (!fd.valid()) return ErrnoStatus(errno, absl::StrCat("cannot create ", temporary));
    for (size_t done = 0; done < data.size();) {
      const ssize_t n = write(fd.get(), data.data() + done, data.size() - done);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) {
        const int error = errno;
        unlink(temporary.c_str());
        return ErrnoStatus(error, absl::StrCat("cannot write ", temporary));
      }
      done += static_cast<size_t>(n);
    }
    if (fsync(fd.get()) != 0) return ErrnoStatus(errno, absl::StrCat("cannot fsync ", temporary));
  }
  if (rename(temporary.c_str(), path.c_str()) != 0)
    return ErrnoStatus(errno, absl::StrCat("cannot rename to ", path));
  const size_t slash = path.rfind('/');
  const std::string directory = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  return SyncFolder(directory);
}

absl::Status SyncFolder(const std::string& path) {
  const UniqueFd folder(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder.valid() || fsync(folder.get()) != 0)
    return ErrnoStatus(errno, absl::StrCat("cannot fsync ", path));
  return absl::OkStatus();
}

absl::Status MakeDirs(const std::string& path, int mode) {
  for (size_t at = 0; at != std::string::npos;) {
    at = path.find('/', at + 1);
    const std::string part = path.substr(0, at);
    if (mkdir(part.c_str(), static_cast<mode_t>(mode)) != 0 && errno != EEXIST) {
      return ErrnoStatus(errno, absl::StrCat("cannot create directory ", part));
    }
  }
  return absl::OkStatus();
}

}  // namespace gtrain
