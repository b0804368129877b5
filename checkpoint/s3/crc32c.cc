#include "checkpoint/s3/crc32c.h"

#include <algorithm>
#include <cstdint>

#include "absl/strings/escaping.h"
#include "base/check.h"

#ifdef GTRAIN_HAVE_ISAL
#include <isa-l/crc.h>
#endif

namespace gtrain::ckpt {

#ifdef GTRAIN_HAVE_ISAL

bool HaveCrc32c() { return true; }

std::string Crc32cBase64(absl::Span<const absl::string_view> parts) {
  constexpr size_t kAtOnce = 1 << 30;  // it counts in int
  uint32_t crc = ~uint32_t{0};
  for (absl::string_view part : parts) {
    while (!part.empty()) {
      const absl::string_view piece = part.substr(0, kAtOnce);
      auto* const bytes = reinterpret_cast<unsigned char*>(const_cast<char*>(piece.data()));  // only read
      crc = crc32_iscsi(bytes, static_cast<int>(piece.size()), crc);
      part.remove_prefix(piece.size());
    }
  }
  crc = ~crc;
  const char big_endian[] = {static_cast<char>(crc >> 24), static_cast<char>(crc >> 16),
                             static_cast<char>(crc >> 8), static_cast<char>(crc)};
  return absl::Base64Escape(absl::string_view(big_endian, sizeof(big_endian)));
}

#else

bool HaveCrc32c() { return false; }

std::string Crc32cBase64(absl::Span<const absl::string_view>) {
  GT_CHECK(false);
  return "";
}

#endif

}  // namespace gtrain::ckpt
