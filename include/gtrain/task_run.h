// Runs a task from a thread that waits for it.
#pragma once
#include <gtrain/status.h>
#include <gtrain/task.h>

#include <chrono>
#include <condition_variable>
#include <coroutine>
#include <mutex>
#include <utility>

namespace gtrain::internal {

// Happens once.
class Event {
 public:
  void Set() {
    const std::lock_guard lock(mutex_);
    happened_ = true;
    changed_.notify_all();
  }
  void Wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return happened_; });
  }
  // False: it has not.
  bool WaitFor(std::chrono::nanoseconds time) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, time, [this] { return happened_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool happened_ = false;
};

// Runs a task from a thread that waits for it.
template <typename T>
Result<Stored<T>> RunToEnd(Task<T> task) {
  class Ended final : public Waiter {
   public:
    std::coroutine_handle<> Done() override {
      event_.Set();
      return std::noop_coroutine();
    }
    void Await() { event_.Wait(); }  // each call in the task has its deadline

   private:
    Event event_;
  } ended;
  task.handle().promise().waiter = &ended;
  {
    const NoWaiting no_waiting;
    task.handle().resume();
  }
  ended.Await();
  return task.handle().promise().Take();
}

}  // namespace gtrain::internal
