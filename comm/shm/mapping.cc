#include "comm/shm/mapping.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "base/file.h"

namespace gtrain::comm {

Mapping::~Mapping() {
  if (data_ != nullptr && (only_of_ == 0 || only_of_ == getpid())) munmap(data_, bytes_);
}

void Mapping::KeepFromChildren() {
  if (data_ != nullptr && madvise(data_, bytes_, MADV_DONTFORK) == 0) only_of_ = getpid();
}

absl::StatusOr<Mapping> Mapping::OfFile(int fd, size_t bytes) {
  struct stat st;
  if (fstat(fd, &st) != 0) return ErrnoStatus(errno, "shared-memory arena");
  // Touching a page past the end of the file would be SIGBUS.
  if (static_cast<size_t>(st.st_size) < bytes) {
    return absl::InternalError(
        absl::StrCat("shared-memory arena has ", st.st_size, " bytes, asked for ", bytes));
  }
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED)
    return ErrnoStatus(errno, absl::StrCat("mapping ", bytes, " bytes of shared memory"));
  return Mapping(static_cast<char*>(data), bytes);
}

absl::StatusOr<Mapping> Mapping::Private(size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return ErrnoStatus(errno, absl::StrCat("allocating ", bytes, " bytes"));
  return Mapping(static_cast<char*>(data), bytes);
}

}  // namespace gtrain::comm
