// LogTails: the mirrored last words of every rank, bounded in total. PURE.
#pragma once
#include <cstdint>
#include <list>
#include <map>
#include <string>
#include <tuple>

#include "runtime/core/messages.h"

namespace gtrain::core {

// Loop-owned, not thread-safe. When the total is full the tail not renewed for longest goes first.
class LogTails {
 public:
  LogTails(size_t each_bytes_max, size_t total_bytes_max)
      : each_bytes_max_(each_bytes_max), total_bytes_max_(total_bytes_max) {}

  void Put(LogTail tail);
  const LogTail* Find(const JobId& job, Generation generation, int rank, bool is_stderr) const;
  size_t bytes() const { return bytes_; }

 private:
  using Key = std::tuple<JobId, Generation, int, bool>;
  const size_t each_bytes_max_;
  const size_t total_bytes_max_;
  size_t bytes_ = 0;
  std::list<std::pair<Key, LogTail>> by_age_;  // oldest first
  std::map<Key, std::list<std::pair<Key, LogTail>>::iterator> index_;
};

}  // namespace gtrain::core
