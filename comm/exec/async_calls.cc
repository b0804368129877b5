#include "comm/exec/async_calls.h"

#include <deque>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "base/threads.h"

namespace gtrain {
struct AsyncCall::State {
  void Finish(absl::Status with) {
    MutexLock lock(&mutex);
    status = std::move(with);
  }

  Mutex mutex;
  std::optional<absl::Status> status ABSL_GUARDED_BY(mutex);
};

std::optional<absl::Status> AsyncCall::Wait(absl::Duration timeout) const {
  State& state = *state_;
  MutexLock lock(&state.mutex);
  const auto done = [&state]()
                        ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mutex) { return state.status.has_value(); };
  state.mutex.AwaitFor(timeout, done);
  return state.status;
}

class AsyncCalls::Queue {
 public:
  explicit Queue(absl::Duration longest) : longest_(longest) {}

  ~Queue() {
    std::deque<Item> cancelled, kept;
    {
      MutexLock lock(&mutex_);
      closing_ = true;
      for (Item& item : items_) (item.for_sure ? kept : cancelled).push_back(std::move(item));
      items_.swap(kept);
    }
    for (Item& item : cancelled) item.state->Finish(absl::CancelledError("the communicator was freed"));
    if (thread_.joinable()) thread_.join();
  }

  absl::Status Add(Body body, std::shared_ptr<AsyncCall::State> state, bool for_sure) {
    {
      MutexLock lock(&mutex_);
      if (items_.size() >= kWaitingMax && !for_sure) {
        return absl::ResourceExhaustedError("256 operations are waiting: wait for some of them first");
      }
      items_.push_back({std::move(body), std::move(state), for_sure});
    }
    if (!thread_.joinable()) thread_ = StartWithoutSignals([this] { Loop(); });
    return absl::OkStatus();
  }

  void SetLongest(absl::Duration longest) {
    MutexLock lock(&mutex_);
    longest_ = longest;
  }

  absl::Status AwaitIdle() {
    MutexLock lock(&mutex_);
    // Each call ends by its own deadline; the sum of them is the longest that this can take.
    const absl::Duration longest = longest_ * static_cast<double>(items_.size() + 2);
    const auto idle = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !busy_ && items_.empty(); };
    if (mutex_.AwaitFor(longest, idle)) return absl::OkStatus();
    return absl::DeadlineExceededError("the operations queued before this one did not end");
  }

 private:
  struct Item {
    Body body;
    std::shared_ptr<AsyncCall::State> state;
    bool for_sure = false;
  };

  void Loop() {
    const auto work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return closing_ || !items_.empty(); };
    for (;;) {
      Item item;
      {
        MutexLock lock(&mutex_);
        busy_ = false;
        mutex_.Await(work);
        if (closing_ && items_.empty()) return;
        item = std::move(items_.front());
        items_.pop_front();
        busy_ = true;
      }
      absl::Status status;
      try {
        status = item.body();
      } catch (const std::exception& e) {
        status = absl::InternalError(e.what());
      } catch (...) {
        status = absl::InternalError("the call threw something that is no std::exception");
      }
      item.state->Finish(std::move(status));
    }
  }

  Mutex mutex_;
  absl::Duration longest_ ABSL_GUARDED_BY(mutex_);
  std::deque<Item> items_ ABSL_GUARDED_BY(mutex_);
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

AsyncCalls::AsyncCalls(absl::Duration longest) : queue_(std::make_unique<Queue>(longest)) {}
AsyncCalls::~AsyncCalls() = default;

void AsyncCalls::SetLongest(absl::Duration longest) { queue_->SetLongest(longest); }

absl::StatusOr<AsyncCall> AsyncCalls::Start(Body body) {
  auto state = std::make_shared<AsyncCall::State>();
  if (absl::Status added = queue_->Add(std::move(body), state, false); !added.ok()) return added;
  return AsyncCall(std::move(state));
}

absl::StatusOr<AsyncCall> AsyncCalls::StartForSure(Body body) {
  auto state = std::make_shared<AsyncCall::State>();
  if (absl::Status added = queue_->Add(std::move(body), state, true); !added.ok()) return added;
  return AsyncCall(std::move(state));
}

absl::Status AsyncCalls::Now(const Body& body) {
  if (absl::Status idle = queue_->AwaitIdle(); !idle.ok()) return idle;
  return body();
}

}  // namespace gtrain
