// For tests: whether this build has UCX.
#pragma once
#include <cstdlib>
#include <filesystem>

#include "absl/strings/str_cat.h"

namespace gtrain::comm {

// Finds out without loading UCX: children must not inherit its state.
inline bool UcxHere() {
  const char* build = getenv("GTRAIN_BUILD_DIR");
  return build == nullptr || std::filesystem::exists(absl::StrCat(build, "/lib/libgtrain_comm_ucx.so"));
}

}  // namespace gtrain::comm
