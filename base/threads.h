// Threads of a library: the signal handlers of the program run on the program's threads, ours take no signal.
#pragma once
#include <signal.h>

#include <functional>
#include <thread>
#include <utility>

namespace gtrain {

// Throws std::system_error where the process may start no thread; the program's own signals are as before
// then, too.
inline std::thread StartWithoutSignals(std::function<void()> body) {
  struct Blocked {
    Blocked() {
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    ~Blocked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
    sigset_t before;
  } const blocked;
  return std::thread(std::move(body));
}

}  // namespace gtrain
