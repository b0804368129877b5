// Paths as text. PURE: nothing is looked up, so a symbolic link is a name like any other.
#pragma once
#include <string>

#include "absl/strings/string_view.h"

namespace gtrain {

// Joins and removes ".", ".." and doubled or trailing slashes; `path` wins when absolute. Always absolute.
std::string JoinPath(absl::string_view dir, absl::string_view path);

}  // namespace gtrain
