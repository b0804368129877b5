// Whether this is still the process that made an object, without a system call.
#pragma once
#include <sys/types.h>

namespace gtrain {

// Remembers the process it was made in. Thread-safe. Not copied: one an object.
class ForkGuard {
 public:
  ForkGuard();
  ~ForkGuard();
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;

  // True in a child forked (or cloned with memory of its own) after this was made.
  bool Forked() const { return page_ != nullptr ? *page_ == 0 : Asked(); }

 private:
  bool Asked() const;
  const pid_t pid_;
  volatile char* page_ = nullptr;  // the kernel hands it to children wiped; nullptr: it cannot
};

}  // namespace gtrain
