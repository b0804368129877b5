#include "runtime/store/sealed_value.h"

#include <xxhash.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace gtrain::store {
namespace {

std::string ValueChecksum(char version, absl::string_view key, absl::string_view value) {
  XXH3_state_t* state = XXH3_createState();
  XXH3_128bits_reset(state);
  const uint64_t key_bytes = key.size();
  XXH3_128bits_update(state, &version, 1);
  XXH3_128bits_update(state, &key_bytes, sizeof(key_bytes));
  XXH3_128bits_update(state, key.data(), key.size());
  XXH3_128bits_update(state, value.data(), value.size());
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state));
  XXH3_freeState(state);
  return std::string(reinterpret_cast<const char*>(canonical.digest), sizeof(canonical.digest));
}

}  // namespace

std::string SealValue(absl::string_view key, absl::string_view value) {
  return absl::StrCat(absl::string_view(&kValueVersion, 1), ValueChecksum(kValueVersion, key, value), value);
}

absl::StatusOr<absl::string_view> OpenValue(absl::string_view key, absl::string_view sealed) {
  auto damaged = [&](absl::string_view what) {
    return absl::DataLossError(absl::StrCat("record \"", absl::CEscape(key), "\": ", what));
  };
  if (sealed.size() < kValueHeaderBytes) return damaged("shorter than its header");
  absl::string_view value = sealed.substr(kValueHeaderBytes);
  if (ValueChecksum(sealed[0], key, value) != sealed.substr(1, kValueHeaderBytes - 1)) {
    return damaged("its checksum is wrong");
  }
  if (sealed[0] != kValueVersion) {
    return damaged(absl::StrCat("written by a newer gtrain (version ", static_cast<int>(sealed[0]), ")"));
  }
  return value;
}

}  // namespace gtrain::store
