// Calls that go on beside the program: collectives of a communicator in a thread of its own, each with a
// handle to wait for.
#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace gtrain {

// Handle of one call. Copies are the same call. Thread-safe; outlives the AsyncCalls it is from.
class AsyncCall {
 public:
  // Returns the result of the call, or nullopt when it is still running after `timeout`. With a timeout of 0
  // it only asks.
  std::optional<absl::Status> Wait(absl::Duration timeout) const;

 private:
  friend class AsyncCalls;
  struct State;
  explicit AsyncCall(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

// Makes calls one after the other in the order of Start:
//   AsyncCalls calls(options.timeout);
//   auto sum = calls.Start([&] { return comm->AllReduce(data, n, DType::kFloat32, ReduceOp::kSum); });
//   ...
//   absl::Status status = *sum->Wait(absl::InfiniteDuration());  // data may be used again
// One AsyncCalls a communicator; while calls are under way the communicator is used through it alone. All
// ranks start the same collectives in the same order. Buffers must stay untouched until Wait says that the
// call is over, or the AsyncCalls is destroyed. After an error of the communicator every later call has that
// error. Start and Now are called by one thread at a time.
// A thread, from the first Start on, and a few hundred bytes a call that waits; independent of the number of
// ranks.
class AsyncCalls {
 public:
  using Body = std::function<absl::Status()>;
  static constexpr size_t kWaitingMax = 256;

  // `longest`: no single call takes longer by its own deadline (the timeout of the communicator).
  explicit AsyncCalls(absl::Duration longest);
  // Calls that have not begun are cancelled (Cancelled) but for those of StartForSure; these and the one
  // under way are waited for.
  ~AsyncCalls();
  AsyncCalls(const AsyncCalls&) = delete;
  AsyncCalls& operator=(const AsyncCalls&) = delete;

  void SetLongest(absl::Duration longest);

  // Queues a call and never waits for one. ResourceExhausted when kWaitingMax have not begun. An exception
  // that `body` throws becomes Internal.
  absl::StatusOr<AsyncCall> Start(Body body);
  // Queues a call that is made even if this is destroyed before its turn: last words to other ranks.
  absl::StatusOr<AsyncCall> StartForSure(Body body);
  // Makes a call on the calling thread, after everything started before. DeadlineExceeded when that does not
  // end.
  absl::Status Now(const Body& body);

 private:
  class Queue;
  std::unique_ptr<Queue> queue_;
};

}  // namespace gtrain
