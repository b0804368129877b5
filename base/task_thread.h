// One thread that runs tasks in order: where the blocking work of a loop happens. Thread-safe.
#pragma once
#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "absl/time/time.h"

namespace gtrain {

class TaskThread {
 public:
  explicit TaskThread(size_t queue_max);
  ~TaskThread();  // Finish(5 s)

  // False: the queue is full or finishing; the task is not kept.
  bool Post(std::function<void()> task);
  // Queues a task before all that wait, and however many wait. The caller makes sure that such tasks are few.
  // Not after Finish.
  void PostFirst(std::function<void()> task);
  // Runs what is queued, then ends the thread. False: it is still stuck in a task after `limit`; it is left
  // behind, and its tasks must not touch anything of the caller.
  bool Finish(absl::Duration limit);

 private:
  struct State;
  static void Run(const std::shared_ptr<State>& state);
  const std::shared_ptr<State> state_;
};

}  // namespace gtrain
