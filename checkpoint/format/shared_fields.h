// The fields that several of the JSON texts of a checkpoint have: each pair of functions writes and reads
// one. Readers return DataLoss for anything that a writer here would not produce. Implementation header:
// included by .cc files of this folder only.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/strict_json.h"

namespace gtrain::ckpt {

using Json = nlohmann::ordered_json;

inline constexpr uint64_t kSmallVersion = 1;  // of abort markers, claims and orders
inline constexpr size_t kReasonBytesMax = 4096;

// Words for people, when written and when read: others' files must not reach a terminal as they are (fault
// B7).
std::string BoundedWords(absl::string_view text);

// An object with its format and version.
Json Head(const char* format, uint64_t version = kSmallVersion);
// The version, from `oldest` to `newest`. FailedPrecondition for a newer one.
absl::StatusOr<int> ReadHead(const ParsedJson& object, absl::string_view format,
                             uint64_t oldest = kSmallVersion, uint64_t newest = kSmallVersion);

void AddId(const SaveId& id, Json* out);
absl::StatusOr<SaveId> ReadId(const ParsedJson& object);
void AddIdentity(const Identity& owner, Json* out);
absl::StatusOr<Identity> ReadIdentity(const ParsedJson& object);
Json KeptToJson(const std::vector<KeptBlob>& kept);
absl::StatusOr<std::vector<KeptBlob>> ReadKept(const ParsedJson& object);
absl::StatusOr<std::vector<uint64_t>> ReadSizes(const ParsedJson& object, const char* name);

}  // namespace gtrain::ckpt
