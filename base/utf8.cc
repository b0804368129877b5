#include "base/utf8.h"

namespace gtrain {

std::optional<char32_t> DecodeUtf8(absl::string_view text, size_t& pos) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(pos);
  if (lead < 0x80) return text[pos++];
  const int extra = lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : 1;
  if (lead < 0xC2 || lead > 0xF4 || pos + static_cast<size_t>(extra) >= text.size()) return std::nullopt;
  char32_t c = lead & (0x3F >> extra);
  for (int i = 1; i <= extra; ++i) {
    const unsigned char next = byte(pos + static_cast<size_t>(i));
    if ((next & 0xC0) != 0x80) return std::nullopt;
    c = (c << 6) | (next & 0x3F);
  }
  constexpr char32_t kSmallest[] = {0, 0x80, 0x800, 0x10000};
  if (c < kSmallest[extra] || c > 0x10FFFF || (c >= 0xD800 && c <= 0xDFFF)) return std::nullopt;
  pos += static_cast<size_t>(extra) + 1;
  return c;
}

bool IsPlainLine(absl::string_view text) {
  for (size_t pos = 0; pos < text.size();) {
    const std::optional<char32_t> c = DecodeUtf8(text, pos);
    if (!c || *c < 0x20 || (*c >= 0x7F && *c < 0xA0)) return false;
    if (*c == 0x2028 || *c == 0x2029 || *c == 0xFEFF) return false;
    if ((*c >= 0x202A && *c <= 0x202E) || (*c >= 0x2066 && *c <= 0x2069)) return false;
  }
  return true;
}

}  // namespace gtrain
