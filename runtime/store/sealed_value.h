// The header in front of every stored value: one version byte and the XXH3-128 of key and value, so that a
// damaged value, or one found under another key, is never believed. docs/formats/records.md.
#pragma once
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace gtrain::store {

inline constexpr char kValueVersion = 1;
inline constexpr size_t kValueHeaderBytes = 17;

std::string SealValue(absl::string_view key, absl::string_view value);
// The part of `sealed` that is the value. DataLoss names the key and what is wrong: checksum, or a version
// newer than this program.
absl::StatusOr<absl::string_view> OpenValue(absl::string_view key, absl::string_view sealed);

}  // namespace gtrain::store
