#include "checkpoint/store/file_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/file.h"
#include "base/status_macros.h"

namespace gtrain::ckpt {
namespace {

constexpr uint64_t kDirectBytesMin = 1 << 20;  // below, the cache is as good
constexpr size_t kHeldBytesMax = 1 << 20;
constexpr size_t kWriteBytesMax = 8 << 20;  // one write(2)

}  // namespace

void FileWriter::Free::operator()(char* memory) const { std::free(memory); }

FileWriter::FileWriter(int fd, std::string path, uint64_t bytes_to_come) : fd_(fd), path_(std::move(path)) {
  if (bytes_to_come < kDirectBytesMin || !SetDirect(true)) return;
  direct_ = true;
  held_.reset(static_cast<char*>(std::aligned_alloc(kBlock, kHeldBytesMax)));
  GT_CHECK(held_ != nullptr);
}

bool FileWriter::SetDirect(bool on) {
  const int flags = fcntl(fd_, F_GETFL);
  return flags >= 0 && fcntl(fd_, F_SETFL, on ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
}

absl::Status FileWriter::Write(absl::string_view data) {
  while (!data.empty()) {
    const ssize_t n =
        pwrite(fd_, data.data(), std::min(data.size(), kWriteBytesMax), static_cast<off_t>(written_));
    if (n < 0 && errno == EINTR) continue;
    // Blocks of another size, or a file system that refuses only now: through the cache, then.
    if (n < 0 && errno == EINVAL && direct_ && SetDirect(false)) {
      direct_ = false;
      continue;
    }
    if (n < 0) return ErrnoStatus(errno, absl::StrCat("write ", path_));
    written_ += static_cast<uint64_t>(n);
    data.remove_prefix(static_cast<size_t>(n));
    if (direct_ && n % static_cast<ssize_t>(kBlock) != 0) {  // a short write: what follows lies askew
      if (!SetDirect(false)) return ErrnoStatus(errno, absl::StrCat("write ", path_));
      direct_ = false;
    }
  }
  return absl::OkStatus();
}

absl::Status FileWriter::Flush() { return Write({held_.get(), std::exchange(held_bytes_, 0)}); }

absl::Status FileWriter::Append(absl::string_view data) {
  while (!data.empty()) {
    if (!direct_) {
      GT_RETURN_IF_ERROR(Flush());
      return Write(data);
    }
    const bool lies_well = (reinterpret_cast<uintptr_t>(data.data()) - held_bytes_) % kBlock == 0;
    const size_t open = held_bytes_ % kBlock;
    if (lies_well && open == 0 && data.size() >= kBlock) {
      GT_RETURN_IF_ERROR(Flush());
      const size_t whole = data.size() / kBlock * kBlock;
      GT_RETURN_IF_ERROR(Write(data.substr(0, whole)));
      data.remove_prefix(whole);
      continue;
    }
    // Takes bytes up to the end of this block; if the data lies askew, as many as there is room for.
    const size_t room = (lies_well ? kBlock - open : kHeldBytesMax - held_bytes_);
    const size_t n = std::min(data.size(), room);
    std::memcpy(held_.get() + held_bytes_, data.data(), n);
    held_bytes_ += n;
    data.remove_prefix(n);
    if (held_bytes_ == kHeldBytesMax) GT_RETURN_IF_ERROR(Flush());
  }
  return absl::OkStatus();
}

absl::Status FileWriter::Finish() {
  const size_t whole = held_bytes_ / kBlock * kBlock;
  GT_RETURN_IF_ERROR(Write({held_.get(), whole}));
  if (whole == held_bytes_) return absl::OkStatus();
  if (direct_ && !SetDirect(false)) return ErrnoStatus(errno, absl::StrCat("write ", path_));
  direct_ = false;
  return Write({held_.get() + whole, held_bytes_ - whole});
}

}  // namespace gtrain::ckpt
