// XXH3-128, the checksum of checkpoints: 32 lower-case hex digits in canonical (big-endian) order.
#pragma once
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace gtrain::ckpt {

// Hash of the concatenation of `parts`.
std::string Xxh3Hex(absl::Span<const absl::string_view> parts);
inline std::string Xxh3Hex(absl::string_view data) {
  return Xxh3Hex(absl::Span<const absl::string_view>(&data, 1));
}
bool IsHashHex(absl::string_view text);

}  // namespace gtrain::ckpt
