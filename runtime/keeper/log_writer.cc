// Files with something to write stand in a line; the thread takes the first one's oldest text, writes it
// without the lock, and puts the file at the end of the line while it has more. A short write is taken back.
// When the disk refuses, all the file's waiting text is given back at once, so that what is missing is one
// stretch. Old bytes of a large file are punched out in place: offsets stay true, disk use stays bounded.
#include "runtime/keeper/log_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "base/folder.h"

namespace gtrain::keeper {

namespace {

constexpr uint64_t kPunchStep = 16u << 20;
constexpr size_t kFileWaitingMax = 64u << 20;   // bytes of one file that wait for the disk
constexpr size_t kAllWaitingMax = 128u << 20;   // and of all files
constexpr size_t kJoinedBytesMax = 256u << 10;  // small texts are joined up to this
constexpr size_t kSpareMax = 4;                 // blocks of so many bytes that are kept for what comes

struct Text {
  std::string bytes;
  uint64_t stream_bytes = 0;
  uint64_t dropped = 0;
};

}  // namespace

class LogFile {
 public:
  LogFile(std::string path, uint64_t bytes_max) : path_(std::move(path)), bytes_max_(bytes_max) {}

  // The file on disk: before the first Append the opener's, then the thread's alone.
  bool OpenFile(int flags) {
    const auto [folder, name] = OpenFolderOf(path_);
    if (!folder.valid()) return false;
    fd_.reset(openat(folder.get(), name.c_str(),
                     O_WRONLY | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | flags, 0644));
    if (!fd_.valid()) return false;
    struct stat info;
    const bool usable = fstat(fd_.get(), &info) == 0;
    if (usable && S_ISREG(info.st_mode)) {
      size_ = static_cast<uint64_t>(info.st_size);
      return true;
    }
    if (usable) errno = EINVAL;
    fd_.reset();
    return false;
  }

  // All or nothing: a short write is taken back.
  bool Write(const std::string& bytes) {
    if (!fd_.valid() && !OpenFile(O_CREAT)) {
      error_ = errno;
      return false;
    }
    size_t done = 0;
    while (done < bytes.size()) {
      const ssize_t n = write(fd_.get(), bytes.data() + done, bytes.size() - done);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) break;
      done += static_cast<size_t>(n);
    }
    if (done < bytes.size()) {
      error_ = errno;
      if (done > 0 && ftruncate(fd_.get(), static_cast<off_t>(size_)) != 0) size_ += done;
      return false;
    }
    size_ += bytes.size();
    Limit();
    return true;
  }

  // The errno of the last Write that failed. Its marker has room where the short write was, or in the last
  // block of the file; where it has none, only watchers of the output hear of it (fault P8).
  int error() const { return error_; }
  uint64_t WriteMarker() {
    if (!fd_.valid()) return 0;
    const std::string text =
        std::string("\n[gtrain: what follows could not be written: ") + strerror(error_) + "]\n";
    const ssize_t n = write(fd_.get(), text.data(), text.size());
    const bool whole = n == static_cast<ssize_t>(text.size());
    if (n > 0 && (whole || ftruncate(fd_.get(), static_cast<off_t>(size_)) != 0))
      size_ += static_cast<uint64_t>(n);
    return whole ? text.size() : 0;
  }

  uint64_t size() const { return size_; }
  bool full() const { return full_; }

 private:
  friend class LogWriter;

  void Limit() {
    if (size_ < bytes_max_ + punched_ + std::min(kPunchStep, bytes_max_)) return;
    const uint64_t hole = (size_ - bytes_max_) & ~uint64_t{4095};
    if (fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(hole)) == 0) {
      punched_ = hole;
      return;
    }
    const std::string text = "\n[gtrain: log limit reached; later output is dropped]\n";
    if (write(fd_.get(), text.data(), text.size()) > 0) size_ += text.size();
    full_ = true;
  }

  const std::string path_;
  const uint64_t bytes_max_;
  UniqueFd fd_;
  uint64_t size_ = 0;
  uint64_t punched_ = 0;
  bool full_ = false;
  int error_ = 0;

  // Under the queue's lock.
  bool refuses_ =
      false;  // the disk took nothing when it was asked last: one marker stands for all that follows
  std::deque<Text> waiting_;
  size_t waiting_bytes_ = 0;  // with the text that is being written
  bool in_line_ = false;      // or being written
  LogWriter::Refused refused_;
  uint64_t dropped_ = 0;
};

struct LogWriter::Queue {
  mutable Mutex lock;
  std::deque<std::shared_ptr<LogFile>> line ABSL_GUARDED_BY(lock);
  size_t waiting_bytes ABSL_GUARDED_BY(lock) = 0;
  bool started ABSL_GUARDED_BY(lock) = false;
  bool over ABSL_GUARDED_BY(lock) = false;
  std::vector<std::string> spare ABSL_GUARDED_BY(lock);
  UniqueFd idle;  // the thread's copy

  // Memory of a loud stream is used again: to give it back and take it anew costs both threads more than the
  // bytes. Few texts are large, so others get no more than they need.
  std::string NewBlock(size_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(lock) {
    std::string block;
    if (bytes < kJoinedBytesMax / 16) return block;
    if (!spare.empty()) {
      block = std::move(spare.back());
      spare.pop_back();
    }
    block.reserve(kJoinedBytesMax);
    return block;
  }
  void TakeBack(std::string block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(lock) {
    if (block.capacity() < kJoinedBytesMax || spare.size() >= kSpareMax) return;
    block.clear();
    spare.push_back(std::move(block));
  }
};

LogWriter::LogWriter() : idle_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)), queue_(std::make_shared<Queue>()) {
  queue_->idle.reset(fcntl(idle_.get(), F_DUPFD_CLOEXEC, 0));
}

LogWriter::~LogWriter() {
  MutexLock held(&queue_->lock);
  queue_->over = true;
}

std::shared_ptr<LogFile> LogWriter::Open(const std::string& path, uint64_t bytes_max, uint64_t* size) {
  auto file = std::make_shared<LogFile>(path, bytes_max);
  if (!file->OpenFile(0)) {
    if (errno != ENOENT) return nullptr;
    const FilePlace place = OpenFolderOf(path);
    if (!place.folder.valid() || faccessat(place.folder.get(), ".", W_OK | X_OK, 0) != 0) return nullptr;
  }
  *size = file->size();
  return file;
}

bool LogWriter::Append(const std::shared_ptr<LogFile>& file, const char* text, size_t bytes,
                       uint64_t stream_bytes, uint64_t dropped, bool always) {
  MutexLock held(&queue_->lock);
  const bool refused = file->refused_.stream_bytes > 0;
  const bool room =
      file->waiting_bytes_ + bytes <= kFileWaitingMax && queue_->waiting_bytes + bytes <= kAllWaitingMax;
  if (!always && (refused || !room)) return false;
  if (!file->waiting_.empty() && file->waiting_.back().bytes.size() + bytes <= kJoinedBytesMax) {
    Text& last = file->waiting_.back();
    last.bytes.append(text, bytes);
    last.stream_bytes += stream_bytes;
    last.dropped += dropped;
  } else {
    file->waiting_.push_back({queue_->NewBlock(bytes), stream_bytes, dropped});
    file->waiting_.back().bytes.assign(text, bytes);
  }
  file->waiting_bytes_ += bytes;
  queue_->waiting_bytes += bytes;
  ++handed_;
  if (!std::exchange(file->in_line_, true)) queue_->line.push_back(file);
  if (!std::exchange(queue_->started, true)) std::thread(Run, queue_).detach();
  return true;
}

LogWriter::Refused LogWriter::TakeRefused(LogFile& file) {
  MutexLock held(&queue_->lock);
  return std::exchange(file.refused_, {});
}

uint64_t LogWriter::Dropped(const LogFile& file) const {
  MutexLock held(&queue_->lock);
  return file.dropped_;
}

bool LogWriter::Written(const LogFile& file) const {
  MutexLock held(&queue_->lock);
  return !file.in_line_ && !file.refuses_;
}

bool LogWriter::Idle() const {
  uint64_t count = 0;
  (void)!read(idle_.get(), &count, sizeof(count));
  MutexLock held(&queue_->lock);
  return queue_->waiting_bytes == 0;
}

void LogWriter::Run(std::shared_ptr<Queue> queue) {
  queue->lock.Lock();
  while (true) {
    queue->lock.Await(
        [&]() ABSL_SHARED_LOCKS_REQUIRED(queue->lock) { return !queue->line.empty() || queue->over; });
    if (queue->line.empty()) break;
    const std::shared_ptr<LogFile> file = std::move(queue->line.front());
    queue->line.pop_front();
    const bool refused_before = file->refuses_;
    Text text = std::move(file->waiting_.front());
    file->waiting_.pop_front();
    queue->lock.Unlock();
    const bool full = file->full();
    const bool written = full || file->Write(text.bytes);
    const uint64_t marker_bytes = written || refused_before ? 0 : file->WriteMarker();
    queue->lock.Lock();
    file->refuses_ = !written;
    size_t done = text.bytes.size();
    if (written) {
      file->dropped_ += full ? text.stream_bytes : text.dropped;
    } else {
      file->waiting_.push_front(text);
      done = file->waiting_bytes_;
      file->refused_.error = file->error();
      file->refused_.marker_bytes += marker_bytes;
      for (const Text& refused : std::exchange(file->waiting_, {})) {
        file->refused_.text_bytes += refused.bytes.size();
        file->refused_.stream_bytes += refused.stream_bytes;
      }
    }
    queue->TakeBack(std::move(text.bytes));
    file->waiting_bytes_ -= done;
    queue->waiting_bytes -= done;
    file->in_line_ = !file->waiting_.empty();
    if (file->in_line_) queue->line.push_back(file);
    const uint64_t one = 1;
    if (queue->waiting_bytes == 0) (void)!write(queue->idle.get(), &one, sizeof(one));
  }
  queue->lock.Unlock();
}

}  // namespace gtrain::keeper
