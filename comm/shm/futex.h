// Sleeping on a word that several processes share. FutexWait returns at once where the word is not `seen`,
// and also for no reason.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <ctime>

#include "absl/time/time.h"

namespace gtrain::comm {

inline void FutexWait(std::atomic<uint32_t>* word, uint32_t seen, absl::Duration timeout) {
  const timespec ts = absl::ToTimespec(timeout);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, seen, &ts, nullptr, 0);
}

// Waits until either word changes; kernels before 5.16 know only the first. Returns as FutexWait does.
inline void FutexWaitEither(std::atomic<uint32_t>* word, uint32_t seen, std::atomic<uint32_t>* other,
                            uint32_t seen_other, absl::Duration timeout) {
#ifdef SYS_futex_waitv
  futex_waitv both[2] = {};
  both[0].uaddr = reinterpret_cast<uintptr_t>(word);
  both[0].val = seen;
  both[1].uaddr = reinterpret_cast<uintptr_t>(other);
  both[1].val = seen_other;
  both[0].flags = both[1].flags = FUTEX_32;
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  const timespec until = absl::ToTimespec(absl::DurationFromTimespec(now) + timeout);
  if (syscall(SYS_futex_waitv, both, 2, 0, &until, CLOCK_MONOTONIC) >= 0 || errno != ENOSYS) return;
#else
  (void)other;
  (void)seen_other;
#endif
  FutexWait(word, seen, timeout);
}

inline void FutexWakeAll(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Between two looks at a word that another core writes.
inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace gtrain::comm
