// The one lock of the project. Over the standard library's and not abseil's because Debian's abseil is built
// without ThreadSanitizer: under its locks every guarded variable looks like a race.
#pragma once
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"

namespace gtrain {

// A mutex with waiting for a condition on the data it guards. Nobody signals: a thread that unlocks while
// others wait wakes them, and they check again. Meant for a handful of waiters. Deadlines are on the
// monotonic clock.
class ABSL_LOCKABLE Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mutex_.lock(); }
  // False: somebody has it, who must not be this thread.
  bool TryLock() ABSL_EXCLUSIVE_TRYLOCK_FUNCTION(true) { return mutex_.try_lock(); }
  void Unlock() ABSL_UNLOCK_FUNCTION() {
    WakeOthers();
    mutex_.unlock();
  }

  // Both wait until condition() holds. It is called with the lock held, by the waiting thread only. Held on
  // return.
  template <typename Condition>
  void Await(const Condition& condition) ABSL_EXCLUSIVE_LOCKS_REQUIRED(this) {
    Wait(condition, [this](Held& held) { return changed_.wait(held), true; });
  }
  // False: the condition still did not hold after `timeout`.
  template <typename Condition>
  bool AwaitFor(absl::Duration timeout, const Condition& condition) ABSL_EXCLUSIVE_LOCKS_REQUIRED(this) {
    timeout = std::clamp(timeout, absl::ZeroDuration(), absl::Hours(24 * 365));  // forever, without overflow
    const auto deadline = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(timeout);
    return Wait(condition, [&](Held& held) {
      return changed_.wait_until(held, deadline) == std::cv_status::no_timeout;
    });
  }

 private:
  using Held = std::unique_lock<std::mutex>;

  void WakeOthers() {
    if (waiting_ > 0) changed_.notify_all();
  }

  // `wait` false: the time is over.
  template <typename Condition, typename WaitOnce>
  bool Wait(const Condition& condition, const WaitOnce& wait) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (condition()) return true;
    WakeOthers();  // the caller may have changed what they wait for, and waiting unlocks
    Held held(mutex_, std::adopt_lock);
    ++waiting_;
    bool in_time = true;
    bool holds = false;
    while (in_time && !holds) {
      in_time = wait(held);
      holds = condition();
    }
    --waiting_;
    held.release();
    return holds;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  int waiting_ = 0;
};

class ABSL_SCOPED_LOCKABLE MutexLock {
 public:
  explicit MutexLock(Mutex* mutex) ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex) : mutex_(mutex) { mutex_->Lock(); }
  ~MutexLock() ABSL_UNLOCK_FUNCTION() { mutex_->Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex* const mutex_;
};

// Something happens once and stays so.
class Notification {
 public:
  void Notify() {
    MutexLock lock(&mutex_);
    notified_ = true;
  }
  // False: it did not happen within `timeout`.
  bool WaitFor(absl::Duration timeout) {
    MutexLock lock(&mutex_);
    return mutex_.AwaitFor(timeout, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return notified_; });
  }

 private:
  Mutex mutex_;
  bool notified_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace gtrain
