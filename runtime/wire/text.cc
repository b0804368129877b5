// What text and ids may contain on the wire and in records.
#include "absl/strings/ascii.h"
#include "runtime/wire/fields.h"

namespace gtrain::wire {
namespace {

// Length of the valid character at the start of `text` (never empty), 0 if there is none:
// overlong forms, surrogates, values above U+10FFFF and control characters are not valid.
size_t CharacterLength(absl::string_view text) {
  auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  unsigned char lead = byte(0);
  if (lead < 0x80) return (lead >= 0x20 && lead != 0x7f) || lead == '\n' || lead == '\t' ? 1 : 0;
  size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  if ((lead == 0xe0 && byte(1) < 0xa0) || (lead == 0xed && byte(1) > 0x9f) ||
      (lead == 0xf0 && byte(1) < 0x90) || (lead == 0xf4 && byte(1) > 0x8f)) {
    return 0;
  }
  return length;
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
