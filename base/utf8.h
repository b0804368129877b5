// Text of others as code points. Pure.
#pragma once
#include <cstddef>
#include <optional>

#include "absl/strings/string_view.h"

namespace gtrain {

// Decodes one UTF-8 code point at `pos` and advances it; nullopt when invalid.
std::optional<char32_t> DecodeUtf8(absl::string_view text, size_t& pos);

// True for UTF-8 that people can be shown as a part of a line: no control characters, line ends or characters
// that turn the direction of text.
bool IsPlainLine(absl::string_view text);

}  // namespace gtrain
