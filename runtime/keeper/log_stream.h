// One output stream of a rank: a pipe or terminal drained into a bounded log file. Owner thread only.
//
// The rank must never wait for its log (fault P8), so the pipe is always drained and the file is written by
// another thread; what the disk or the write budget cannot take is dropped, counted and marked in the file.
// The last 64 KiB are kept in memory whatever happens.
#pragma once
#include <stdint.h>

#include <memory>
#include <string>

#include "base/unique_fd.h"
#include "runtime/keeper/log_writer.h"
#include "runtime/keeper/poll_set.h"
#include "runtime/keeper/posix.h"

namespace gtrain::keeper {

inline constexpr size_t kTailBytes = 64 << 10;

struct LogLimits {
  uint64_t file_bytes_max = 256u << 20;   // disk used by one file; older bytes become a hole
  uint64_t burst_bytes = 64u << 20;       // written at any speed
  uint64_t bytes_per_second = 16u << 20;  // sustained
};

class LogStream {
 public:
  // Makes the pipe, or the pseudo-terminal. The file is made with the
  // first byte (most streams never get one); one that is there already is appended to. False: errno says why.
  // `writer` outlives this.
  bool Open(const std::string& path, const LogLimits& limits, Terminal terminal, int64_t now_ms,
            LogWriter* writer);
  // What is read from now on is written to another file. False: errno says why, and nothing changes.
  bool GoOnIn(const std::string& path, int64_t now_ms);
  UniqueFd TakeWriteEnd() { return std::move(write_end_); }
  // Where what is typed at the terminal is written. Closed by its owner.
  UniqueFd OpenKeyboard() const;

  // Puts the pipe into `set`, which outlives it, from now until the end of the pipe.
  bool Watch(PollSet<LogStream>* set);
  bool alive() const { return pipe_.valid(); }
  // The rank can write on for a while without being read.
  bool roomy() const { return roomy_; }

  // Reads what is there, at most `bytes_max`; closes at end of file. Returns the bytes read.
  size_t Pump(int64_t now_ms, size_t bytes_max = 1 << 20);
  // Hands over held-back bytes and closes the pipe, whichever process still holds the other end (fault P7).
  void Close(int64_t now_ms);

  const std::string& Tail() const { return tail_; }  // up to 2 x kTailBytes; the last kTailBytes count
  std::string LastBytes(size_t bytes) const;
  uint64_t total() const { return total_; }              // bytes the rank wrote so far
  uint64_t file_offset() const { return file_offset_; }  // once all that was handed over is written
  uint64_t dropped() const { return file_ ? writer_->Dropped(*file_) + (refused_ != 0 ? holding_ : 0) : 0; }
  int refused() const {
    return refused_;
  }  // the errno with which the disk refuses the log now; 0: it takes it

  // Nothing waits for time to pass: LookAfter has nothing to do while nothing is written or handed over.
  bool settled() const { return holding_ == 0 && refused_ == 0; }

  // Asks what became of what was handed over, and tries again what the disk refused: at every tick, for a
  // rank may be silent from then on.
  void LookAfter(int64_t now_ms);

 private:
  void Take(const char* data, size_t bytes, int64_t now_ms);
  void Refill(int64_t now_ms);
  void TakeRefused(int64_t now_ms);
  void Resume(bool always);  // ends a stretch of dropping: marker, then its last bytes
  bool Write(const char* text, size_t bytes, uint64_t stream_bytes, uint64_t dropped, bool always);

  UniqueFd pipe_, write_end_;
  PollSet<LogStream>* set_ = nullptr;
  LogWriter* writer_ = nullptr;
  std::shared_ptr<LogFile> file_;
  LogLimits limits_;
  std::string tail_;
  uint64_t total_ = 0;
  uint64_t file_offset_ = 0;
  uint64_t holding_ = 0;  // dropped in the current stretch; its end is still in tail_
  uint64_t budget_ = 0;
  int64_t refilled_ms_ = 0;
  int64_t retry_ms_ = 0;  // no write before this, after a disk error
  int refused_ = 0;
  bool roomy_ = false;
};

}  // namespace gtrain::keeper
