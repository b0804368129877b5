#include "checkpoint/format/hash.h"

#include <xxhash.h>

#include <memory>

#include "absl/strings/escaping.h"
#include "base/check.h"

namespace gtrain::ckpt {

std::string Xxh3Hex(absl::Span<const absl::string_view> parts) {
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(), &XXH3_freeState);
  GT_CHECK(state != nullptr);
  XXH3_128bits_reset(state.get());
  for (absl::string_view part : parts) XXH3_128bits_update(state.get(), part.data(), part.size());
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state.get()));
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(canonical.digest), sizeof(canonical.digest)));
}

bool IsHashHex(absl::string_view text) {
  if (text.size() != 32) return false;
  for (char c : text) {
    if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'))) return false;
  }
  return true;
}

}  // namespace gtrain::ckpt
