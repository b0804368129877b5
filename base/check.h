// GT_CHECK: programmer errors. On in every build, prints the place and the
// condition, then aborts. Operating errors are absl::Status instead.
#pragma once
#include <cstdio>
#include <cstdlib>

namespace gtrain::base {
[[noreturn]] inline void CheckFailed(const char* file, int line, const char* condition) {
  std::fprintf(stderr, "%s:%d: GT_CHECK failed: %s\n", file, line, condition);
  std::fflush(stderr);
  std::abort();
}
}  // namespace gtrain::base

#define GT_CHECK(condition)                                        \
  do {                                                             \
    if (!(condition)) [[unlikely]]                                 \
      ::gtrain::base::CheckFailed(__FILE__, __LINE__, #condition); \
  } while (false)
