#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "comm/reducer/reducer.h"

namespace gtrain {

absl::StatusOr<std::optional<CompressionPolicy>> CompressionOfJob() {
  const char* const text = std::getenv("GTRAIN_COMPRESSION");
  if (text == nullptr) return std::nullopt;
  absl::StatusOr<CompressionPolicy> policy = ParseCompression(text);
  if (policy.ok()) return *std::move(policy);
  return absl::Status(policy.status().code(),
                      absl::StrCat("$GTRAIN_COMPRESSION: ", policy.status().message()));
}

}  // namespace gtrain
