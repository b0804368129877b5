// Writes log files behind the keeper's loop, in one thread started with the first byte: a disk that stalls
// holds that thread and nothing else (fault P8). The text that waits for the disk is bounded; text that does
// not fit is refused, and text that the disk refuses is given back as a count, so that the stream can say
// what was dropped.
#pragma once
#include <stdint.h>

#include <deque>
#include <memory>
#include <string>

#include "base/mutex.h"
#include "base/unique_fd.h"

namespace gtrain::keeper {

// Made by LogWriter::Open. Its owner may drop it at any time: what was taken is written first.
class LogFile;

class LogWriter {
 public:
  LogWriter();
  LogWriter(const LogWriter&) = delete;
  LogWriter& operator=(const LogWriter&) = delete;
  ~LogWriter();  // does not wait for the disk: see Idle()

  // An existing file is appended to, another one made with its first byte. More than `bytes_max` of it on
  // disk become a hole at its start. nullptr: errno says why. *size: what is in it.
  std::shared_ptr<LogFile> Open(const std::string& path, uint64_t bytes_max, uint64_t* size);

  // `text` stands for `stream_bytes` of the stream, of which `dropped` are not in it. With `always` the bound
  // does not count: for the last words of a stream. False: the queue is full or the disk refused something
  // not yet asked for with TakeRefused; nothing was taken.
  bool Append(const std::shared_ptr<LogFile>& file, const char* text, size_t bytes, uint64_t stream_bytes,
              uint64_t dropped, bool always = false);

  // The bytes that the disk refused since the last call, all of them taken later than everything that was
  // written.
  struct Refused {
    uint64_t text_bytes = 0;
    uint64_t stream_bytes = 0;
    uint64_t marker_bytes = 0;  // written in their place: that they are missing
    int error = 0;
  };
  Refused TakeRefused(LogFile& file);
  uint64_t Dropped(const LogFile& file) const;  // stream bytes that will never be in it
  bool Written(const LogFile& file) const;      // nothing of it waits, and the disk took the last of it

  uint64_t handed() const { return handed_; }  // texts that Append has taken so far
  bool Idle() const;                           // everything taken was written or refused
  int idle_fd() const { return idle_.get(); }  // readable after it became idle; cleared by Idle()

 private:
  struct Queue;
  static void Run(std::shared_ptr<Queue> queue);

  UniqueFd idle_;
  uint64_t handed_ = 0;
  std::shared_ptr<Queue> queue_;  // the thread's too: it may outlive us in a system call
};

}  // namespace gtrain::keeper
