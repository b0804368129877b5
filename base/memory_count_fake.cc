#include "base/memory_count_fake.h"

#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace gtrain {
namespace {

std::atomic<int64_t> allocated{0};
std::atomic<int64_t> peak{0};

void* Counted(void* memory) {
  if (memory == nullptr) std::abort();  // a test does not go on without memory
  const auto bytes = static_cast<int64_t>(malloc_usable_size(memory));
  const int64_t now = allocated.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  int64_t before = peak.load(std::memory_order_relaxed);
  while (before < now && !peak.compare_exchange_weak(before, now, std::memory_order_relaxed)) {
  }
  return memory;
}

// Allocates any size, where aligned_alloc takes only multiples of the alignment.
void* Aligned(size_t bytes, std::align_val_t align) {
  void* memory = nullptr;
  return posix_memalign(&memory, static_cast<size_t>(align), bytes) == 0 ? memory : nullptr;
}

void Release(void* memory) {
  if (memory == nullptr) return;
  allocated.fetch_sub(static_cast<int64_t>(malloc_usable_size(memory)), std::memory_order_relaxed);
  std::free(memory);
}

}  // namespace

int64_t AllocatedBytes() { return allocated.load(std::memory_order_relaxed); }
int64_t PeakAllocatedBytes() { return peak.load(std::memory_order_relaxed); }
void ResetPeakAllocatedBytes() { peak.store(AllocatedBytes(), std::memory_order_relaxed); }

}  // namespace gtrain

void* operator new(size_t bytes) { return gtrain::Counted(std::malloc(bytes)); }
void* operator new[](size_t bytes) { return gtrain::Counted(std::malloc(bytes)); }
void* operator new(size_t bytes, std::align_val_t align) {
  return gtrain::Counted(gtrain::Aligned(bytes, align));
}
void* operator new[](size_t bytes, std::align_val_t align) {
  return gtrain::Counted(gtrain::Aligned(bytes, align));
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return gtrain::Counted(std::malloc(bytes));
}
void* operator new[](size_t bytes, const std::nothrow_t&) noexcept {
  return gtrain::Counted(std::malloc(bytes));
}
void operator delete(void* memory, const std::nothrow_t&) noexcept { gtrain::Release(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { gtrain::Release(memory); }
void operator delete(void* memory) noexcept { gtrain::Release(memory); }
void operator delete[](void* memory) noexcept { gtrain::Release(memory); }
void operator delete(void* memory, size_t) noexcept { gtrain::Release(memory); }
void operator delete[](void* memory, size_t) noexcept { gtrain::Release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { gtrain::Release(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { gtrain::Release(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { gtrain::Release(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { gtrain::Release(memory); }
