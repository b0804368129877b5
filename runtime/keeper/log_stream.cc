// A token bucket decides what is handed to the file's writer. While the bucket is empty (or the writer's
// queue is full, or the disk refuses) bytes only pass through the in-memory tail and are counted; when
// writing may go on, a marker with the count and the last bytes of the stretch follow, so the file always
// ends with the newest words.
#include "runtime/keeper/log_stream.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "runtime/keeper/posix.h"

namespace gtrain::keeper {

namespace {
constexpr uint64_t kResumeBytes = 4u << 20;
constexpr int64_t kDiskRetryMs = 1000;
constexpr size_t kReadBytes = 256u << 10;
constexpr size_t kTakeBytes = 64u << 10;  // handed to the writer or dropped as one
constexpr int kPipeBytes = 1 << 20;
}  // namespace

bool LogStream::Open(const std::string& path, const LogLimits& limits, Terminal terminal, int64_t now_ms,
                     LogWriter* writer) {
  writer_ = writer;
  file_ = writer->Open(path, limits.file_bytes_max, &file_offset_);
  if (file_ == nullptr) return false;
  const bool made = terminal == Terminal::kNone ? MakePipe(&pipe_, &write_end_)
                                                : MakeTerminal(&pipe_, &write_end_, terminal);
  if (!made) return false;
  if (!SetNonBlocking(pipe_.get())) return false;
  // A courtesy to fast writers; the limit of the user may refuse it.
  roomy_ = fcntl(pipe_.get(), F_SETPIPE_SZ, kPipeBytes) >= kPipeBytes;
  limits_ = limits;
  budget_ = limits.burst_bytes;
  refilled_ms_ = now_ms;
  return true;
}

bool LogStream::GoOnIn(const std::string& path, int64_t now_ms) {
  Pump(now_ms, 16 << 20);
  uint64_t size = 0;
  std::shared_ptr<LogFile> file = writer_->Open(path, limits_.file_bytes_max, &size);
  if (file == nullptr) return false;
  TakeRefused(now_ms);
  if (holding_ > 0) Resume(true);
  file_ = std::move(file);
  file_offset_ = size;
  holding_ = 0;
  refused_ = 0;
  return true;
}

UniqueFd LogStream::OpenKeyboard() const { return UniqueFd(fcntl(pipe_.get(), F_DUPFD_CLOEXEC, 0)); }

bool LogStream::Watch(PollSet<LogStream>* set) {
  set_ = set;
  return set->Add(pipe_.get(), this);
}

size_t LogStream::Pump(int64_t now_ms, size_t bytes_max) {
  char buffer[kReadBytes];
  size_t done = 0;
  while (pipe_.valid() && done < bytes_max) {
    size_t filled = 0;
    ssize_t n = 0;
    do {
      n = read(pipe_.get(), buffer + filled, sizeof(buffer) - filled);
      if (n > 0) filled += static_cast<size_t>(n);
    } while ((n > 0 && filled < sizeof(buffer)) || (n < 0 && errno == EINTR));
    const bool ended = n == 0 || (n < 0 && errno != EAGAIN);  // of a terminal it is the error EIO
    Take(buffer, filled, now_ms);
    done += filled;
    if (ended) Close(now_ms);
    if (n <= 0) break;
  }
  return done;
}

void LogStream::Close(int64_t now_ms) {
  if (!pipe_.valid()) return;
  if (set_ != nullptr) set_->Remove(pipe_.get());
  pipe_.reset();
  TakeRefused(now_ms);
  if (holding_ > 0) Resume(true);
}

std::string LogStream::LastBytes(size_t bytes) const {
  return tail_.size() <= bytes ? tail_ : tail_.substr(tail_.size() - bytes);
}

void LogStream::Take(const char* data, size_t bytes, int64_t now_ms) {
  if (bytes == 0) return;
  total_ += bytes;
  LookAfter(now_ms);
  for (size_t at = 0; at < bytes; at += kTakeBytes) {
    const size_t part = std::min(kTakeBytes, bytes - at);
    const bool taken = holding_ == 0 && budget_ >= part && Write(data + at, part, part, 0, false);
    if (!taken) holding_ += part;
  }
  if (bytes >= kTailBytes) {
    tail_.assign(data + bytes - kTailBytes, kTailBytes);
  } else {
    tail_.append(data, bytes);
    if (tail_.size() > 2 * kTailBytes) tail_.erase(0, tail_.size() - kTailBytes);
  }
}

void LogStream::LookAfter(int64_t now_ms) {
  if (file_ == nullptr || total_ == 0) return;  // most streams are never written to
  Refill(now_ms);
  TakeRefused(now_ms);
  if (holding_ > 0 && budget_ >= std::min(kResumeBytes, limits_.burst_bytes) && now_ms >= retry_ms_)
    Resume(false);
}

void LogStream::Refill(int64_t now_ms) {
  const uint64_t elapsed = static_cast<uint64_t>(std::max<int64_t>(0, now_ms - refilled_ms_));
  if (elapsed == 0) return;
  refilled_ms_ = now_ms;
  budget_ = std::min(limits_.burst_bytes, budget_ + elapsed * limits_.bytes_per_second / 1000);
}

// The text that the disk refused is one stretch up to now: the writer takes nothing between its refusal and
// this.
void LogStream::TakeRefused(int64_t now_ms) {
  const LogWriter::Refused refused = writer_->TakeRefused(*file_);
  if (refused.stream_bytes == 0) {
    if (writer_->Written(*file_)) refused_ = 0;
    return;
  }
  file_offset_ -= std::min(file_offset_, refused.text_bytes);
  file_offset_ += refused.marker_bytes;
  holding_ += refused.stream_bytes;
  retry_ms_ = now_ms + kDiskRetryMs;
  refused_ = refused.error;
}

void LogStream::Resume(bool always) {
  const std::string last = LastBytes(static_cast<size_t>(std::min<uint64_t>(holding_, kTailBytes)));
  const uint64_t lost = holding_ - last.size();
  std::string text;
  if (lost > 0) text = "\n[gtrain: " + std::to_string(lost) + " bytes dropped]\n";
  text += last;
  if (Write(text.data(), text.size(), holding_, lost, always)) holding_ = 0;
}

bool LogStream::Write(const char* text, size_t bytes, uint64_t stream_bytes, uint64_t dropped, bool always) {
  if (!writer_->Append(file_, text, bytes, stream_bytes, dropped, always)) return false;
  budget_ -= std::min<uint64_t>(budget_, bytes);
  file_offset_ += bytes;
  return true;
}

}  // namespace gtrain::keeper
