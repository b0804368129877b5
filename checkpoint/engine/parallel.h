// A bounded number of calls to the storage at a time, where each takes long and none depends on another.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"

namespace gtrain::ckpt {

inline constexpr size_t kCallsAtOnce = 16;

// Calls work(i) once for each i < count, on the calling thread and up to kCallsAtOnce - 1 others, in any
// order. Returns when all calls have. `work` must be thread-safe.
inline void ForEachAtOnce(size_t count, absl::FunctionRef<void(size_t)> work) {
  std::atomic<size_t> next{0};
  const auto run = [&] {
    for (size_t i = next++; i < count; i = next++) work(i);
  };
  std::vector<std::thread> helpers;
  for (size_t i = 1; i < std::min(kCallsAtOnce, count); ++i) {
    try {
      helpers.emplace_back(run);
    } catch (const std::system_error&) {
      break;  // no more threads can be had: the ones there are do all of it
    }
  }
  run();
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace gtrain::ckpt
