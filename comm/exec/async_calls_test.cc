#include "comm/exec/async_calls.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "comm/exec/communicator.h"
#include "comm/fake/fake_world.h"
#include "gtest/gtest.h"

namespace gtrain {
namespace {

constexpr absl::Duration kLong = absl::Seconds(60);

TEST(AsyncCalls, RunsInOrderAndDirectCallsWaitTheirTurn) {
  AsyncCalls queue(kLong);
  std::vector<int> order;
  std::vector<AsyncCall> operations;
  for (int i = 0; i < 20; ++i) {
    auto operation = queue.Start([&order, i] {
      order.push_back(i);
      return i == 7 ? absl::AbortedError("seven") : absl::OkStatus();
    });
    ASSERT_TRUE(operation.ok());
    operations.push_back(*operation);
  }
  EXPECT_TRUE(queue
                  .Now([&order] {
                    order.push_back(20);
                    return absl::OkStatus();
                  })
                  .ok());
  ASSERT_EQ(order.size(), 21u);
  for (int i = 0; i <= 20; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
  for (int i = 0; i < 20; ++i) {
    auto status = operations[static_cast<size_t>(i)].Wait(kLong);
    ASSERT_TRUE(status.has_value());
    EXPECT_EQ(status->ok(), i != 7);
  }
}

TEST(AsyncCalls, IsBoundedAndCancelsWhatHasNotBegun) {
  auto queue = std::make_unique<AsyncCalls>(kLong);
  Notification go, begun;
  auto first = queue->Start([&] {
    begun.Notify();
    go.WaitFor(kLong);
    return absl::OkStatus();
  });
  ASSERT_TRUE(first.ok());
  ASSERT_TRUE(begun.WaitFor(kLong));
  EXPECT_FALSE(first->Wait(absl::Milliseconds(1)).has_value());
  std::optional<AsyncCall> last;
  for (size_t i = 0; i < AsyncCalls::kWaitingMax; ++i) {
    auto operation = queue->Start([] { return absl::OkStatus(); });
    ASSERT_TRUE(operation.ok());
    last = *operation;
  }
  EXPECT_EQ(queue->Start([] { return absl::OkStatus(); }).status().code(),
            absl::StatusCode::kResourceExhausted);
  bool said = false;
  EXPECT_TRUE(queue
                  ->StartForSure([&said] {
                    said = true;
                    return absl::OkStatus();
                  })
                  .ok())
      << "last words have room and are said";
  // The destructor cancels first and then waits for the running one: `last` ends while `first` still holds
  // on.
  std::thread destroyer([&] { queue.reset(); });
  auto status = last->Wait(kLong);
  go.Notify();
  destroyer.join();
  ASSERT_TRUE(status.has_value());
  EXPECT_EQ(status->code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(first->Wait(absl::ZeroDuration())->code(), absl::StatusCode::kOk);
  EXPECT_TRUE(said);
}

TEST(AsyncCalls, ExceptionsBecomeErrorsAndSignalsStayOutside) {
  AsyncCalls queue(kLong);
  auto thrown = queue.Start([]() -> absl::Status { throw std::runtime_error("no"); });
  ASSERT_TRUE(thrown.ok());
  EXPECT_EQ(thrown->Wait(kLong)->message(), "no");
  auto number = queue.Start([]() -> absl::Status { throw 3; });
  ASSERT_TRUE(number.ok());
  EXPECT_EQ(number->Wait(kLong)->code(), absl::StatusCode::kInternal);
  bool blocked = false;
  auto mask = queue.Start([&blocked] {
    sigset_t set;
    pthread_sigmask(SIG_SETMASK, nullptr, &set);
    blocked = sigismember(&set, SIGTERM) == 1;
    return absl::OkStatus();
  });
  ASSERT_TRUE(mask.ok());
  ASSERT_TRUE(mask->Wait(kLong).has_value());
  EXPECT_TRUE(blocked);
}

// ------------------------------------------------------------------ with communicators

constexpr int kRanks = 3;

// Runs `body` as every rank, in threads.
void WithRanks(const std::function<void(Communicator&)>& body) {
  comm::FakeWorld world(comm::FakeWorld::OneNode(kRanks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto bootstrap = world.Rank(rank);
      auto communicator = comm::MakeCommunicator(bootstrap.get(), {.user = {.timeout = kLong}});
      EXPECT_TRUE(communicator.ok()) << communicator.status();
      if (communicator.ok()) body(**communicator);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(AsyncCalls, CollectivesGoOnBesideTheProgram) {
  WithRanks([](Communicator& c) {
    AsyncCalls calls(kLong);
    std::vector<std::vector<int64_t>> data(20, std::vector<int64_t>(5000, c.rank() + 1));
    std::vector<AsyncCall> sums;
    for (std::vector<int64_t>& each : data) {
      auto call =
          calls.Start([&] { return c.AllReduce(each.data(), each.size(), DType::kInt64, ReduceOp::kSum); });
      ASSERT_TRUE(call.ok());
      sums.push_back(*call);
    }
    int64_t token = c.rank() == 0 ? 7 : 0;
    auto passed = calls.Start([&] {
      if (c.rank() == 0) return c.Send(&token, 1, DType::kInt64, 1);
      return c.rank() == 1 ? c.Receive(&token, 1, DType::kInt64, 0) : absl::OkStatus();
    });
    ASSERT_TRUE(passed.ok());
    EXPECT_TRUE(calls.Now([&] { return c.Barrier(); }).ok());
    for (size_t i = 0; i < data.size(); ++i) {
      EXPECT_EQ(*sums[i].Wait(absl::ZeroDuration()), absl::OkStatus())
          << "a direct call waits for all before it";
      EXPECT_EQ(data[i], std::vector<int64_t>(5000, kRanks * (kRanks + 1) / 2));
    }
    EXPECT_EQ(*passed->Wait(kLong), absl::OkStatus());
    EXPECT_EQ(token, c.rank() < 2 ? 7 : 0);
  });
}

TEST(AsyncCalls, AfterAnErrorEveryCallHasIt) {
  WithRanks([](Communicator& c) {
    AsyncCalls calls(kLong);
    float x = 0;
    auto bad = calls.Start(
        [&] { return c.rank() == 0 ? c.Barrier() : c.AllReduce(&x, 1, DType::kFloat32, ReduceOp::kSum); });
    auto next = calls.Start([&] { return c.Barrier(); });
    ASSERT_TRUE(bad.ok() && next.ok());
    const absl::Status status = *bad->Wait(kLong);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_EQ(*next->Wait(kLong), status);
  });
}

// 0: the call that was under way when the peer died, and the one behind it, are Unavailable.
int RankWithVictim(comm::FakeWorld& world, int rank,
                   const std::function<absl::Status(Communicator&, char*)>& call) {
  const auto bootstrap = world.Rank(rank);
  auto communicator = comm::MakeCommunicator(bootstrap.get(), {.user = {.timeout = kLong}});
  if (!communicator.ok()) return 2;
  std::vector<char> data(8 << 20);
  AsyncCalls calls(kLong);
  for (int step = 0;; ++step) {
    auto first = calls.Start([&] { return call(**communicator, data.data()); });
    auto second = calls.Start([&] { return call(**communicator, data.data()); });
    if (!first.ok() || !second.ok()) return 3;
    if (rank == kRanks - 1 && step == 5) raise(SIGKILL);
    const std::optional<absl::Status> one = first->Wait(kLong), two = second->Wait(kLong);
    if (!one || !two) return 4;
    if (one->ok() && two->ok()) continue;
    return absl::IsUnavailable(*two) && (one->ok() || absl::IsUnavailable(*one)) ? 0 : 5;
  }
}

TEST(AsyncCalls, L1KilledPeerEndsEveryKindOfCall) {
  constexpr size_t kCount = 1 << 18;
  const std::vector<std::function<absl::Status(Communicator&, char*)>> kinds{
      [](Communicator& c, char*) { return c.Barrier(); },
      [](Communicator& c, char* d) { return c.AllReduce(d, kCount, DType::kFloat32, ReduceOp::kSum); },
      [](Communicator& c, char* d) { return c.Broadcast(d, kCount, DType::kFloat32, kRanks - 1); },
      [](Communicator& c, char* d) { return c.AllGather(d, d + (4 << 20), kCount, DType::kFloat32); },
      [](Communicator& c, char* d) {
        return c.ReduceScatter(d, d + (4 << 20), kCount, DType::kFloat32, ReduceOp::kSum);
      },
      [](Communicator& c, char* d) { return c.Reduce(d, kCount, DType::kFloat32, ReduceOp::kSum, 0); },
      [](Communicator& c, char* d) { return c.AllToAll(d, d + (4 << 20), kCount, DType::kFloat32); },
      // The token goes round, and the victim is one who hands it on.
      [](Communicator& c, char* d) {
        const int next = (c.rank() + 1) % kRanks, previous = (c.rank() + kRanks - 1) % kRanks;
        if (c.rank() == 0) {
          const absl::Status sent = c.Send(d, kCount, DType::kFloat32, next);
          return sent.ok() ? c.Receive(d, kCount, DType::kFloat32, previous) : sent;
        }
        const absl::Status received = c.Receive(d, kCount, DType::kFloat32, previous);
        return received.ok() ? c.Send(d, kCount, DType::kFloat32, next) : received;
      }};
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    SCOPED_TRACE(kind);
    comm::FakeWorld world(comm::FakeWorld::OneNode(kRanks));
    std::vector<pid_t> pids;
    for (int rank = 0; rank < kRanks; ++rank) {
      const pid_t pid = fork();
      if (pid == 0) _exit(RankWithVictim(world, rank, kinds[kind]));
      pids.push_back(pid);
    }
    int status = 0;
    ASSERT_EQ(waitpid(pids[kRanks - 1], &status, 0), pids[kRanks - 1]);
    EXPECT_TRUE(WIFSIGNALED(status));
    world.Revoke("rank was killed");
    for (int rank = 0; rank < kRanks - 1; ++rank) {
      ASSERT_EQ(waitpid(pids[static_cast<size_t>(rank)], &status, 0), pids[static_cast<size_t>(rank)]);
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << rank << ": " << status;
    }
  }
}

}  // namespace
}  // namespace gtrain
