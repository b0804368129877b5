#include "comm/backends/side_thread.h"

#include <exception>
#include <system_error>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "base/threads.h"

namespace gtrain::comm {

struct SideThread::Shared {
  enum class State { kIdle, kGiven, kDone, kEnding };
  Mutex mutex;
  State state ABSL_GUARDED_BY(mutex) = State::kIdle;
  std::function<absl::Status()> work ABSL_GUARDED_BY(mutex);
  absl::Status result ABSL_GUARDED_BY(mutex);
};

SideThread::SideThread() : shared_(std::make_unique<Shared>()) {}

SideThread::~SideThread() {
  if (!thread_.joinable()) return;
  if (fork_guard_.Forked()) {
    (void)new std::thread(std::move(thread_));
    (void)shared_.release();
    return;
  }
  {
    const MutexLock lock(&shared_->mutex);
    shared_->state = Shared::State::kEnding;
  }
  thread_.join();
}

bool SideThread::Start(std::function<absl::Status()> work) {
  if (!thread_.joinable()) {
    try {
      thread_ = StartWithoutSignals([shared = shared_.get()] { Loop(shared); });
    } catch (const std::system_error&) {
      return false;
    }
  }
  const MutexLock lock(&shared_->mutex);
  shared_->work = std::move(work);
  shared_->state = Shared::State::kGiven;
  return true;
}

absl::Status SideThread::Join() {
  Shared& shared = *shared_;
  const MutexLock lock(&shared.mutex);
  const auto done = [&shared]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(shared.mutex) {
    return shared.state == Shared::State::kDone;
  };
  shared.mutex.Await(done);
  shared.state = Shared::State::kIdle;
  return std::move(shared.result);
}

void SideThread::Loop(Shared* shared) {
  const auto wanted = [shared]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(shared->mutex) {
    return shared->state == Shared::State::kGiven || shared->state == Shared::State::kEnding;
  };
  for (;;) {
    std::function<absl::Status()> work;
    {
      const MutexLock lock(&shared->mutex);
      shared->mutex.Await(wanted);
      if (shared->state == Shared::State::kEnding) return;
      work = std::move(shared->work);
    }
    absl::Status result;
    try {
      result = work();
    } catch (const std::exception& e) {
      result = absl::ResourceExhaustedError(e.what());
    }
    const MutexLock lock(&shared->mutex);
    shared->result = std::move(result);
    shared->state = Shared::State::kDone;
  }
}

}  // namespace gtrain::comm
