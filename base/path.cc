#include "base/path.h"

#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace gtrain {

std::string JoinPath(absl::string_view dir, absl::string_view path) {
  const std::string joined = absl::StartsWith(path, "/") ? std::string(path) : absl::StrCat(dir, "/", path);
  std::vector<absl::string_view> parts;
  for (absl::string_view part : absl::StrSplit(joined, '/', absl::SkipEmpty())) {
    if (part == ".") continue;
    if (part == "..") {
      if (!parts.empty()) parts.pop_back();
    } else {
      parts.push_back(part);
    }
  }
  return absl::StrCat("/", absl::StrJoin(parts, "/"));
}

}  // namespace gtrain
