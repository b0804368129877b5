#include "runtime/wire/packed.h"

#include <zstd.h>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "runtime/wire/codec.h"

namespace gtrain::wire {
namespace {

constexpr int kLevel = 1;  // a third longer than level 3, in half the time

}  // namespace

std::string Pack(absl::string_view bytes) {
  std::string packed(ZSTD_compressBound(bytes.size()), '\0');
  const size_t size = ZSTD_compress(packed.data(), packed.size(), bytes.data(), bytes.size(), kLevel);
  GT_CHECK(!ZSTD_isError(size));  // it fails for want of room alone, and there is room
  packed.resize(size);
  return packed;
}

absl::StatusOr<std::string> Unpack(absl::string_view packed) {
  const uint64_t size = ZSTD_getFrameContentSize(packed.data(), packed.size());
  if (size == ZSTD_CONTENTSIZE_ERROR || size == ZSTD_CONTENTSIZE_UNKNOWN)
    return absl::DataLossError("it is not packed");
  if (size > kMessageBytesMax)
    return absl::DataLossError(absl::StrCat("it would have ", size, " bytes unpacked"));
  std::string bytes(size, '\0');
  const size_t got = ZSTD_decompress(bytes.data(), bytes.size(), packed.data(), packed.size());
  if (ZSTD_isError(got) || got != size)
    return absl::DataLossError(absl::StrCat(
        "it does not unpack: ", ZSTD_isError(got) ? ZSTD_getErrorName(got) : "it is shorter than it says"));
  return bytes;
}

}  // namespace gtrain::wire
