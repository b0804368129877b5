#include "base/task_thread.h"

#include <thread>

#include "base/mutex.h"

namespace gtrain {

struct TaskThread::State {
  explicit State(size_t max) : queue_max(max) {}
  const size_t queue_max;
  Mutex mutex;
  std::deque<std::function<void()>> tasks ABSL_GUARDED_BY(mutex);
  bool finishing ABSL_GUARDED_BY(mutex) = false;
  bool ended ABSL_GUARDED_BY(mutex) = false;
  std::thread thread;
};

TaskThread::TaskThread(size_t queue_max) : state_(std::make_shared<State>(queue_max)) {
  state_->thread = std::thread([state = state_] { Run(state); });
}

TaskThread::~TaskThread() { (void)Finish(absl::Seconds(5)); }

bool TaskThread::Post(std::function<void()> task) {
  MutexLock lock(&state_->mutex);
  if (state_->finishing || state_->tasks.size() >= state_->queue_max) return false;
  state_->tasks.push_back(std::move(task));
  return true;
}

void TaskThread::PostFirst(std::function<void()> task) {
  MutexLock lock(&state_->mutex);
  if (!state_->finishing) state_->tasks.push_front(std::move(task));
}

bool TaskThread::Finish(absl::Duration limit) {
  if (!state_->thread.joinable()) return true;
  {
    MutexLock lock(&state_->mutex);
    state_->finishing = true;
    const auto ended = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mutex) { return state_->ended; };
    if (!state_->mutex.AwaitFor(limit, ended)) {
      state_->tasks.clear();
      state_->thread.detach();
      return false;
    }
  }
  state_->thread.join();
  return true;
}

void TaskThread::Run(const std::shared_ptr<State>& state) {
  const auto ready = [&state]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state->mutex) {
    return state->finishing || !state->tasks.empty();
  };
  while (true) {
    std::function<void()> task;
    {
      MutexLock lock(&state->mutex);
      state->mutex.Await(ready);
      if (state->tasks.empty()) {
        state->ended = true;
        return;
      }
      task = std::move(state->tasks.front());
      state->tasks.pop_front();
    }
    task();
  }
}

}  // namespace gtrain
