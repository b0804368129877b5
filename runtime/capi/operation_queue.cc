#include "runtime/capi/operation_queue.h"

#include <signal.h>

#include <utility>

namespace gtrain::capi {
namespace {

// The program's signal handlers run on the program's threads: ours takes no signal.
std::thread StartWithoutSignals(std::function<void()> body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread(std::move(body));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

}  // namespace

void Operation::Finish(absl::Status status) {
  MutexLock lock(&mu_);
  status_ = std::move(status);
}

std::optional<absl::Status> Operation::Wait(absl::Duration timeout) {
  MutexLock lock(&mu_);
  auto done = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return status_.has_value(); };
  mu_.AwaitFor(timeout, done);
  return status_;
}

OperationQueue::~OperationQueue() {
  std::deque<Item> cancelled;
  {
    MutexLock lock(&mu_);
    closing_ = true;
    cancelled.swap(items_);
  }
  for (Item& item : cancelled) item.operation->Finish(absl::CancelledError("the communicator was freed"));
  if (thread_.joinable()) thread_.join();
}

absl::StatusOr<std::shared_ptr<Operation>> OperationQueue::Submit(Work work) {
  auto operation = std::make_shared<Operation>();
  {
    MutexLock lock(&mu_);
    if (items_.size() >= kOperationsMax) {
      return absl::ResourceExhaustedError("256 operations are waiting: wait for some of them first");
    }
    items_.push_back({std::move(work), operation});
  }
  if (!thread_.joinable()) thread_ = StartWithoutSignals([this] { Loop(); });
  return operation;
}

absl::Status OperationQueue::RunNow(const Work& work) {
  {
    MutexLock lock(&mu_);
    // Each piece of work ends by its own deadline; the sum of them is the longest that this can take.
    const absl::Duration longest = work_timeout_ * static_cast<double>(items_.size() + 2);
    const auto idle = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !busy_ && items_.empty(); };
    if (!mu_.AwaitFor(longest, idle)) {
      return absl::DeadlineExceededError("the operations queued before this one did not end");
    }
  }
  return work();
}

void OperationQueue::Loop() {
  const auto work_or_closing = [this]()
                                   ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return closing_ || !items_.empty(); };
  for (;;) {
    Item item;
    {
      MutexLock lock(&mu_);
      busy_ = false;
      mu_.Await(work_or_closing);
      if (closing_) return;
      item = std::move(items_.front());
      items_.pop_front();
      busy_ = true;
    }
    absl::Status status;
    try {
      status = item.work();
    } catch (const std::exception& e) {
      status = absl::InternalError(e.what());
    }
    item.operation->Finish(std::move(status));
  }
}

}  // namespace gtrain::capi
