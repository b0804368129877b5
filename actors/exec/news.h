// Sentences about actors for people (`gtrain why`), on their way to the head: some at once, then one in ten
// seconds, and of all others how many there were. A job of many actors that crash all the time says no more
// than that.
#pragma once
#include <cstdint>
#include <deque>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/rate_limit.h"

namespace gtrain::actors {

// Thread-safe; nothing blocks.
class News {
 public:
  explicit News(const Clock& clock) : clock_(clock), rate_(kAtOnce, 0.1, clock.Now()) {}
  void Add(std::string text);
  // The next one that may be told now.
  std::optional<std::string> Take();

  static constexpr size_t kAtOnce = 10;

 private:
  const Clock& clock_;
  Mutex mutex_;
  RateLimit rate_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::string> waiting_ ABSL_GUARDED_BY(mutex_);
  uint64_t left_out_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace gtrain::actors
