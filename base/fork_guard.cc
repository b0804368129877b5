#include "base/fork_guard.h"

#include <sys/mman.h>
#include <unistd.h>

namespace gtrain {
namespace {
constexpr size_t kPage = 4096;
}  // namespace

ForkGuard::ForkGuard() : pid_(getpid()) {
  void* page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return;
  if (madvise(page, kPage, MADV_WIPEONFORK) != 0) {
    munmap(page, kPage);
    return;
  }
  page_ = static_cast<volatile char*>(page);
  *page_ = 1;
}

ForkGuard::~ForkGuard() {
  if (page_ != nullptr) munmap(const_cast<char*>(page_), kPage);
}

bool ForkGuard::Asked() const { return getpid() != pid_; }

}  // namespace gtrain
