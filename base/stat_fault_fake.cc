// An fstatat that is defined in the program comes before that of libc (compare base/power_cut_fake.cc).
#include "base/stat_fault_fake.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "base/check.h"
#include "base/mutex.h"

namespace gtrain {
namespace {

struct Now {
  Mutex mu;
  const StatFault* fault ABSL_GUARDED_BY(mu) = nullptr;
};
Now& TheFault() {
  static Now* const now = new Now;
  return *now;
}

}  // namespace

extern "C" {
__attribute__((visibility("default"))) int fstatat(int folder, const char* name, struct stat* info,
                                                   int flags) noexcept {
  int error = 0;
  {
    Now& now = TheFault();
    MutexLock lock(&now.mu);
    if (now.fault != nullptr) error = now.fault->ErrorFor(name);
  }
  if (error == 0) return static_cast<int>(syscall(SYS_newfstatat, folder, name, info, flags));
  errno = error;
  return -1;
}
}

StatFault::StatFault(std::string suffix, int error) : suffix_(std::move(suffix)), error_(error) {
  MutexLock lock(&TheFault().mu);
  GT_CHECK(TheFault().fault == nullptr);
  TheFault().fault = this;
}

StatFault::~StatFault() {
  MutexLock lock(&TheFault().mu);
  TheFault().fault = nullptr;
}

int StatFault::ErrorFor(const char* name) const { return absl::EndsWith(name, suffix_) ? error_ : 0; }

}  // namespace gtrain
