// For tests: counts the resources of communicators that this process holds.
#pragma once
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/match.h"

namespace gtrain::comm {

// Where ranks are threads, each has a mapping of its own.
inline size_t MappedArenas() {
  std::ifstream maps("/proc/self/maps");
  size_t mapped = 0;
  for (std::string line; std::getline(maps, line);) mapped += absl::StrContains(line, "/arena-") ? 1 : 0;
  return mapped;
}

inline size_t OpenDescriptors() {
  size_t open = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    open += entry.path().empty() ? 0 : 1;
  return open;
}

}  // namespace gtrain::comm
