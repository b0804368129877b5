// A token bucket decides what reaches the file. While the bucket is empty (or the disk refuses) bytes only
// pass through the in-memory tail and are counted; when writing may go on, a marker with the count and the
// last bytes of the stretch follow, so the file always ends with the newest words. Old bytes of a large file
// are punched out in place: offsets stay true, disk use stays bounded.
#include "runtime/keeper/log_stream.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "runtime/keeper/posix.h"

namespace gtrain::keeper {

namespace {
constexpr uint64_t kResumeBytes = 4u << 20;
constexpr uint64_t kPunchStep = 16u << 20;
constexpr int64_t kDiskRetryMs = 1000;
}  // namespace

bool LogStream::Open(const std::string& path, const LogLimits& limits, int64_t now_ms) {
  file_.reset(open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0644));
  if (!file_.valid()) return false;
  struct stat info;
  if (fstat(file_.get(), &info) != 0) return false;
  if (!S_ISREG(info.st_mode)) {
    errno = EINVAL;
    return false;
  }
  file_offset_ = static_cast<uint64_t>(info.st_size);
  if (!MakePipe(&pipe_, &write_end_) || !SetNonBlocking(pipe_.get())) return false;
  fcntl(pipe_.get(), F_SETPIPE_SZ,
        1 << 20);  // a courtesy to fast writers; the limit of the user may refuse it
  limits_ = limits;
  budget_ = limits.burst_bytes;
  refilled_ms_ = now_ms;
  return true;
}

size_t LogStream::Pump(int64_t now_ms, size_t bytes_max) {
  char buffer[64 << 10];
  size_t done = 0;
  while (pipe_.valid() && done < bytes_max) {
    ssize_t n = read(pipe_.get(), buffer, sizeof(buffer));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) break;
    if (n <= 0) {
      Close(now_ms);
      break;
    }
    done += static_cast<size_t>(n);
    Take(buffer, static_cast<size_t>(n), now_ms);
  }
  return done;
}

void LogStream::Close(int64_t now_ms) {
  if (!pipe_.valid()) return;
  pipe_.reset();
  if (holding_ > 0) Resume(now_ms);
  file_.reset();
}

std::string LogStream::LastBytes(size_t bytes) const {
  return tail_.size() <= bytes ? tail_ : tail_.substr(tail_.size() - bytes);
}

void LogStream::Take(const char* data, size_t bytes, int64_t now_ms) {
  total_ += bytes;
  Refill(now_ms);
  if (holding_ > 0 && budget_ >= std::min(kResumeBytes, limits_.burst_bytes) && now_ms >= retry_ms_)
    Resume(now_ms);
  tail_.append(data, bytes);
  if (tail_.size() > 2 * kTailBytes) tail_.erase(0, tail_.size() - kTailBytes);
  if (holding_ > 0 || budget_ < bytes || file_full_) {
    holding_ += bytes;
    return;
  }
  budget_ -= bytes;
  if (!Write(data, bytes)) {
    holding_ += bytes;
    retry_ms_ = now_ms + kDiskRetryMs;
  }
}

void LogStream::Refill(int64_t now_ms) {
  const uint64_t elapsed = static_cast<uint64_t>(std::max<int64_t>(0, now_ms - refilled_ms_));
  if (elapsed == 0) return;
  refilled_ms_ = now_ms;
  budget_ = std::min(limits_.burst_bytes, budget_ + elapsed * limits_.bytes_per_second / 1000);
}

void LogStream::Resume(int64_t now_ms) {
  if (file_full_) return;
  const std::string last = LastBytes(static_cast<size_t>(std::min<uint64_t>(holding_, kTailBytes)));
  const uint64_t lost = holding_ - last.size();
  std::string text;
  if (lost > 0) text = "\n[gtrain: " + std::to_string(lost) + " bytes dropped]\n";
  text += last;
  if (!Write(text.data(), text.size())) {
    retry_ms_ = now_ms + kDiskRetryMs;
    return;
  }
  budget_ -= std::min<uint64_t>(budget_, text.size());
  dropped_ += lost;
  holding_ = 0;
}

// All or nothing as far as the caller is concerned: a short write is taken back.
bool LogStream::Write(const char* data, size_t bytes) {
  size_t done = 0;
  while (done < bytes) {
    ssize_t n = write(file_.get(), data + done, bytes - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    done += static_cast<size_t>(n);
  }
  if (done < bytes) {
    if (done > 0 && ftruncate(file_.get(), static_cast<off_t>(file_offset_)) != 0) file_offset_ += done;
    return false;
  }
  file_offset_ += bytes;
  LimitFile();
  return true;
}

void LogStream::LimitFile() {
  if (file_offset_ < limits_.file_bytes_max + punched_ + std::min(kPunchStep, limits_.file_bytes_max)) return;
  const uint64_t hole = (file_offset_ - limits_.file_bytes_max) & ~uint64_t{4095};
  if (fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(hole)) == 0) {
    punched_ = hole;
    return;
  }
  const char kFull[] = "\n[gtrain: log limit reached; later output is dropped]\n";
  if (write(file_.get(), kFull, sizeof(kFull) - 1) > 0) file_offset_ += sizeof(kFull) - 1;
  file_full_ = true;
}

}  // namespace gtrain::keeper
