#include "runtime/capi/operation_queue.h"

#include <signal.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "base/mutex.h"
#include "gtest/gtest.h"

namespace gtrain::capi {
namespace {

constexpr absl::Duration kLong = absl::Seconds(60);

TEST(OperationQueue, RunsInOrderAndDirectCallsWaitTheirTurn) {
  OperationQueue queue(kLong);
  std::vector<int> order;
  std::vector<std::shared_ptr<Operation>> operations;
  for (int i = 0; i < 20; ++i) {
    auto operation = queue.Submit([&order, i] {
      order.push_back(i);
      return i == 7 ? absl::AbortedError("seven") : absl::OkStatus();
    });
    ASSERT_TRUE(operation.ok());
    operations.push_back(*operation);
  }
  EXPECT_TRUE(queue
                  .RunNow([&order] {
                    order.push_back(20);
                    return absl::OkStatus();
                  })
                  .ok());
  ASSERT_EQ(order.size(), 21u);
  for (int i = 0; i <= 20; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
  for (int i = 0; i < 20; ++i) {
    auto status = operations[static_cast<size_t>(i)]->Wait(kLong);
    ASSERT_TRUE(status.has_value());
    EXPECT_EQ(status->ok(), i != 7);
  }
}

TEST(OperationQueue, IsBoundedAndCancelsWhatHasNotBegun) {
  auto queue = std::make_unique<OperationQueue>(kLong);
  Notification go, begun;
  auto first = queue->Submit([&] {
    begun.Notify();
    go.WaitFor(kLong);
    return absl::OkStatus();
  });
  ASSERT_TRUE(first.ok());
  ASSERT_TRUE(begun.WaitFor(kLong));
  EXPECT_FALSE((*first)->Wait(absl::Milliseconds(1)).has_value());
  std::shared_ptr<Operation> last;
  for (size_t i = 0; i < OperationQueue::kOperationsMax; ++i) {
    auto operation = queue->Submit([] { return absl::OkStatus(); });
    ASSERT_TRUE(operation.ok());
    last = *operation;
  }
  EXPECT_EQ(queue->Submit([] { return absl::OkStatus(); }).status().code(),
            absl::StatusCode::kResourceExhausted);
  // The destructor cancels first and then waits for the running one: `last` ends while `first` still holds
  // on.
  std::thread destroyer([&] { queue.reset(); });
  auto status = last->Wait(kLong);
  go.Notify();
  destroyer.join();
  ASSERT_TRUE(status.has_value());
  EXPECT_EQ(status->code(), absl::StatusCode::kCancelled);
  EXPECT_EQ((*first)->Wait(absl::ZeroDuration())->code(), absl::StatusCode::kOk);
}

TEST(OperationQueue, ExceptionsBecomeErrorsAndSignalsStayOutside) {
  OperationQueue queue(kLong);
  auto thrown = queue.Submit([]() -> absl::Status { throw std::runtime_error("no"); });
  ASSERT_TRUE(thrown.ok());
  EXPECT_EQ((*thrown)->Wait(kLong)->message(), "no");
  bool blocked = false;
  auto mask = queue.Submit([&blocked] {
    sigset_t set;
    pthread_sigmask(SIG_SETMASK, nullptr, &set);
    blocked = sigismember(&set, SIGTERM) == 1;
    return absl::OkStatus();
  });
  ASSERT_TRUE(mask.ok());
  ASSERT_TRUE((*mask)->Wait(kLong).has_value());
  EXPECT_TRUE(blocked);
}

}  // namespace
}  // namespace gtrain::capi
