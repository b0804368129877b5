// Memory of a program, as it is handed to gtrain.
#pragma once
#include <cstddef>
#include <cstdint>

namespace gtrain {

enum class MemoryKind : uint8_t { kHost, kCuda, kHip };

// The caller's memory: gtrain neither owns nor frees it. The bytes are said so that a size that does not fit
// is an error and not a read past the end.
struct Memory {
  void* data = nullptr;
  size_t bytes = 0;
  MemoryKind kind = MemoryKind::kHost;  // today the only one; others are Unimplemented
  // The event on the device that must have happened before `data` is read: a cudaEvent_t, a hipEvent_t; null
  // with kHost.
  void* event = nullptr;
};

}  // namespace gtrain
