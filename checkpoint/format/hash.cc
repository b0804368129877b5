#include "checkpoint/format/hash.h"

#include <xxhash.h>
// Instructions of this very processor where the library brings them: half the time of SSE2.
#if __has_include(<xxh_x86dispatch.h>)
#include <xxh_x86dispatch.h>
#endif

#include <algorithm>
#include <iterator>

#include "absl/strings/escaping.h"
#include "base/check.h"

namespace gtrain::ckpt {

void Xxh3::Free::operator()(XXH3_state_s* state) const { XXH3_freeState(state); }

Xxh3::Xxh3() : state_(XXH3_createState()) {
  GT_CHECK(state_ != nullptr);
  XXH3_128bits_reset(state_.get());
}

void Xxh3::Add(absl::string_view data) { XXH3_128bits_update(state_.get(), data.data(), data.size()); }

HashBytes Xxh3::Bytes() const {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state_.get()));
  HashBytes out;
  static_assert(sizeof(canonical.digest) == sizeof(out));
  std::copy(std::begin(canonical.digest), std::end(canonical.digest), out.begin());
  return out;
}

std::string Xxh3::Hex() const { return HashHex(Bytes()); }

HashBytes Xxh3Bytes(absl::string_view data) {
  Xxh3 hash;
  hash.Add(data);
  return hash.Bytes();
}

std::string HashHex(const HashBytes& hash) {
  return absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(hash.data()), hash.size()));
}

std::string Xxh3Hex(absl::Span<const absl::string_view> parts) {
  Xxh3 hash;
  for (absl::string_view part : parts) hash.Add(part);
  return hash.Hex();
}

bool IsHashHex(absl::string_view text) {
  if (text.size() != 32) return false;
  for (char c : text) {
    if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'))) return false;
  }
  return true;
}

}  // namespace gtrain::ckpt
