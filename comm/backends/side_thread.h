// One piece of work at a time beside the thread that gives it: the network of a pipeline whose other stages
// are copies and sums. A thread from the first Start on.
#pragma once
#include <functional>
#include <memory>
#include <thread>

#include "absl/status/status.h"
#include "base/fork_guard.h"

namespace gtrain::comm {

// Start and Join by one thread, in turns.
class SideThread {
 public:
  SideThread();
  // Not between Start and Join.
  ~SideThread();
  SideThread(const SideThread&) = delete;
  SideThread& operator=(const SideThread&) = delete;

  // `work` begins now; what it refers to outlives Join. False, and nothing begins: the process may start no
  // thread.
  bool Start(std::function<absl::Status()> work);
  // Waits for the end of `work`, which `work` itself takes care of, and returns its result. An exception of
  // it, mostly that there is no memory, is ResourceExhausted.
  absl::Status Join();

 private:
  // The state of the thread: in a forked child nobody may touch it any more, not even to destroy it.
  struct Shared;
  static void Loop(Shared* shared);

  const ForkGuard fork_guard_;
  std::unique_ptr<Shared> shared_;
  std::thread thread_;
};

}  // namespace gtrain::comm
