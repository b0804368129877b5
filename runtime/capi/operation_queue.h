// Runs the queued collectives of one C communicator in order, on one thread that starts with the
// first of them.
#pragma once
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/mutex.h"

namespace gtrain::capi {

// One queued operation. Thread-safe. Outlives the queue where somebody still holds it.
class Operation {
 public:
  void Finish(absl::Status status);
  // The operation's status, or nullopt when it still goes on after `timeout`.
  std::optional<absl::Status> Wait(absl::Duration timeout);

 private:
  Mutex mu_;
  std::optional<absl::Status> status_ ABSL_GUARDED_BY(mu_);
};

// Submit and RunNow are called by one thread at a time (the communicator's rule).
class OperationQueue {
 public:
  using Work = std::function<absl::Status()>;
  static constexpr size_t kOperationsMax = 256;

  // `work_timeout`: no single piece of work takes longer than this by its own deadline.
  explicit OperationQueue(absl::Duration work_timeout) : work_timeout_(work_timeout) {}
  // Cancels what has not begun and waits for what has.
  ~OperationQueue();

  // ResourceExhausted when kOperationsMax are waiting.
  absl::StatusOr<std::shared_ptr<Operation>> Submit(Work work);
  // Runs `work` on the calling thread after everything queued before it.
  absl::Status RunNow(const Work& work);

 private:
  struct Item {
    Work work;
    std::shared_ptr<Operation> operation;
  };

  void Loop();

  const absl::Duration work_timeout_;
  Mutex mu_;
  std::deque<Item> items_ ABSL_GUARDED_BY(mu_);
  bool busy_ ABSL_GUARDED_BY(mu_) = false;
  bool closing_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace gtrain::capi
