// For tests: a file system that cannot say what one of its names is.
#pragma once
#include <string>

namespace gtrain {

// A program that links this has an fstatat of its own. While a StatFault lives, it fails with `error` for
// every name that ends with `suffix`, as a disk or a server does (EIO, ESTALE); all else is as always. Other
// calls (stat, open) notice nothing. One at a time. Thread-safe against fstatat on any thread.
class StatFault {
 public:
  StatFault(std::string suffix, int error);
  ~StatFault();
  StatFault(const StatFault&) = delete;
  StatFault& operator=(const StatFault&) = delete;

  int ErrorFor(const char* name) const;  // 0: none

 private:
  const std::string suffix_;
  const int error_;
};

}  // namespace gtrain
