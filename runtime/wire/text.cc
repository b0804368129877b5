// The characters that text and ids may contain on the wire and in records.
#include "absl/strings/ascii.h"
#include "base/utf8.h"
#include "runtime/wire/fields.h"

namespace gtrain::wire {
namespace {

// Length of the valid character at the start of `text` (never empty), 0 if there is none: what is no UTF-8,
// and control characters of ASCII but the end of a line and the tab, are not valid.
size_t CharacterLength(absl::string_view text) {
  size_t length = 0;
  const std::optional<char32_t> c = DecodeUtf8(text, length);
  const bool control = c && ((*c < 0x20 && *c != U'\n' && *c != U'\t') || *c == 0x7f);
  return c && !control ? length : 0;
}

}  // namespace

bool ValidId(absl::string_view id) {
  if (id.empty() || id.size() > 128 || !absl::ascii_isalnum(static_cast<unsigned char>(id[0]))) return false;
  for (unsigned char c : id) {
    if (!absl::ascii_isalnum(c) &&
        absl::string_view("._:+-").find(static_cast<char>(c)) == absl::string_view::npos) {
      return false;
    }
  }
  return true;
}

bool ValidText(absl::string_view text) {
  while (!text.empty()) {
    size_t length = CharacterLength(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

std::string CleanText(absl::string_view text, size_t limit) {
  std::string clean;
  while (!text.empty()) {
    size_t length = CharacterLength(text);
    if (clean.size() + (length == 0 ? 1 : length) > limit) break;
    if (length == 0) {
      clean += '?';
      length = 1;
    } else {
      clean.append(text.data(), length);
    }
    text.remove_prefix(length);
  }
  return clean;
}

}  // namespace gtrain::wire
