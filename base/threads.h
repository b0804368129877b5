// Threads of a library: the signal handlers of the program run on the program's threads, ours take no signal.
#pragma once
#include <signal.h>

#include <functional>
#include <thread>
#include <utility>

namespace gtrain {

inline std::thread StartWithoutSignals(std::function<void()> body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread(std::move(body));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

}  // namespace gtrain
