#include "base/json_depth.h"

namespace gtrain {

// In text that is no JSON the parser stops at the first fault, and up to there both see the same brackets.
absl::string_view ShallowJson(absl::string_view text) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kShallowDepthMax) return "";
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return text;
}

}  // namespace gtrain
