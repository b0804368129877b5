#include "absl/strings/str_split.h"
#include "checkpoint/port/blob_store.h"

namespace gtrain::port {

bool IsBlobKey(absl::string_view key) {
  constexpr size_t kKeyBytesMax = 512;
  if (key.empty() || key.size() > kKeyBytesMax) return false;
  for (absl::string_view part : absl::StrSplit(key, '/')) {
    if (part.empty() || part[0] == '.') return false;
    for (char c : part) {
      const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
      if (!plain && c != '.' && c != '_' && c != '-') return false;
    }
  }
  return true;
}

}  // namespace gtrain::port
