#include "checkpoint/port/blob_store.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"

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

absl::Status TakeFrom(BlobStore::Source source, uint64_t from, uint64_t to,
                      absl::FunctionRef<absl::Status(absl::string_view)> take) {
  while (from < to) {
    GT_ASSIGN_OR_RETURN(absl::string_view piece, source(from));
    if (piece.empty()) {
      return absl::InternalError(absl::StrCat("what is to be put ends at ", from, " of ", to, " bytes"));
    }
    piece = piece.substr(0, to - from);
    GT_RETURN_IF_ERROR(take(piece));
    from += piece.size();
  }
  return absl::OkStatus();
}

absl::Status BlobStore::PutStream(absl::string_view key, uint64_t bytes, Source source) {
  if (bytes > BytesMax()) {
    return absl::InvalidArgumentError(
        absl::StrCat(Describe(), "/", key, ": ", bytes, " bytes are more than a blob can have there"));
  }
  std::string whole;
  GT_RETURN_IF_ERROR(TakeFrom(source, 0, bytes, [&](absl::string_view piece) {
    whole.append(piece.data(), piece.size());
    return absl::OkStatus();
  }));
  return PutIfAbsent(key, whole);
}

}  // namespace gtrain::port
