// JSON as checkpoints use it: one object, no duplicate keys, bounded depth and size, then typed fields each
// of which is asked for by name. Implementation header: included by .cc files of this folder only.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace gtrain::ckpt {

// The type of parsed JSON is not ordered: no reader needs the order of fields, and an ordered object looks
// through all its names to add one, so that foreign text of n names would cost n * n.
using ParsedJson = nlohmann::json;

inline constexpr int kJsonDepthMax = 8;

// DataLoss: not JSON, not an object, a key twice, too deep, over `bytes_max`. Never throws.
absl::StatusOr<ParsedJson> ParseStrictJson(absl::string_view text, size_t bytes_max);

// Fields of one object; DataLoss that names the field when it is missing or of another type.
absl::StatusOr<uint64_t> GetUint(const ParsedJson& object, const char* name, uint64_t value_max);
absl::StatusOr<std::string> GetString(const ParsedJson& object, const char* name, size_t bytes_max);
absl::StatusOr<bool> GetBool(const ParsedJson& object, const char* name);
absl::StatusOr<const ParsedJson*> GetArray(const ParsedJson& object, const char* name, size_t count_max);
// Unknown fields are an error: a field we do not understand may change what the others mean.
absl::Status CheckFields(const ParsedJson& object, std::initializer_list<absl::string_view> known);

// Text of `object` with a last field "checksum" that covers every byte before it.
std::string PrintSealed(const nlohmann::ordered_json& object);
// The object without its checksum; DataLoss when the seal is missing or broken.
absl::StatusOr<ParsedJson> ParseSealed(absl::string_view text, size_t bytes_max);

}  // namespace gtrain::ckpt
