#include "base/path.h"

#include <algorithm>
#include <vector>

#include "absl/strings/ascii.h"
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

absl::string_view UriScheme(absl::string_view text) {
  const size_t colon = text.find(":/");
  if (colon == absl::string_view::npos || colon == 0 || !absl::ascii_islower(text[0])) return "";
  const absl::string_view scheme = text.substr(0, colon);
  const bool all = std::all_of(scheme.begin(), scheme.end(), [](unsigned char c) {
    return absl::ascii_islower(c) || absl::ascii_isdigit(c) || c == '+' || c == '.' || c == '-';
  });
  return all ? scheme : "";
}

}  // namespace gtrain
