// Paths as text. PURE: nothing is looked up, so a symbolic link is a name like any other.
#pragma once
#include <string>

#include "absl/strings/string_view.h"

namespace gtrain {

// Joins and removes ".", ".." and doubled or trailing slashes; `path` wins when absolute. Always absolute.
std::string JoinPath(absl::string_view dir, absl::string_view path);

// "s3" of "s3://bucket" and of "s3:/bucket", where a slash was forgotten: nobody names a directory so. Empty:
// `text` begins like a path.
absl::string_view UriScheme(absl::string_view text);

}  // namespace gtrain
