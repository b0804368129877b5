// A name is parsed by reading its numbers and deriving the name again: only the one spelling that we would
// write is accepted, so "step-1", "step-000000000001/../x" or a number with a sign never pass.
#include "checkpoint/format/names.h"

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"

namespace gtrain::ckpt {
namespace {

bool TakeDigits(absl::string_view* text, uint64_t* out) {
  size_t n = 0;
  while (n < text->size() && n < 13 && (*text)[n] >= '0' && (*text)[n] <= '9') ++n;
  if (n == 0 || !absl::SimpleAtoi(text->substr(0, n), out)) return false;
  text->remove_prefix(n);
  return true;
}

bool InRange(uint64_t value) { return value >= 1 && value <= kCounterMax; }

}  // namespace

bool IsValid(const SaveId& id) {
  return id.step >= 0 && id.step <= kStepMax && InRange(id.epoch) && id.timeline <= kCounterMax &&
         id.generation <= kCounterMax && InRange(id.attempt);
}

std::string AttemptName(const SaveId& id) {
  return absl::StrFormat("step-%012d.e%04d.t%04d.g%04d.a%02d", id.step, id.epoch, id.timeline, id.generation,
                         id.attempt);
}

std::optional<SaveId> ParseAttemptName(absl::string_view name) {
  SaveId id;
  uint64_t step = 0;
  absl::string_view rest = name;
  if (!absl::ConsumePrefix(&rest, kAttemptPrefix) || !TakeDigits(&rest, &step)) return std::nullopt;
  const std::pair<const char*, uint64_t*> parts[] = {
      {".e", &id.epoch}, {".t", &id.timeline}, {".g", &id.generation}, {".a", &id.attempt}};
  for (const auto& [prefix, value] : parts) {
    if (!absl::ConsumePrefix(&rest, prefix) || !TakeDigits(&rest, value)) return std::nullopt;
  }
  id.step = static_cast<int64_t>(step);
  if (!rest.empty() || !IsValid(id) || AttemptName(id) != name) return std::nullopt;
  return id;
}

std::string ManifestKey(const SaveId& id) { return absl::StrCat(kManifestPrefix, AttemptName(id), ".json"); }

std::optional<SaveId> ParseManifestKey(absl::string_view key) {
  if (!absl::ConsumePrefix(&key, kManifestPrefix) || !absl::ConsumeSuffix(&key, ".json")) return std::nullopt;
  return ParseAttemptName(key);
}

std::string PinKey(const SaveId& id) { return absl::StrCat(kPinPrefix, AttemptName(id)); }

std::optional<SaveId> ParsePinKey(absl::string_view key) {
  if (!absl::ConsumePrefix(&key, kPinPrefix)) return std::nullopt;
  return ParseAttemptName(key);
}

std::string ShardName(int rank, int world_size) {
  return absl::StrFormat("rank-%05d-of-%05d.safetensors", rank, world_size);
}

std::string IndexName(int rank, int world_size) {
  return absl::StrFormat("rank-%05d-of-%05d.index.json", rank, world_size);
}

std::string OrderName(int world_size) {
  return absl::StrFormat("rank-%05d-of-%05d.order.json", 0, world_size);
}

std::string PartName(int part, int part_count) {
  return absl::StrFormat("part-%05d-of-%05d.json", part, part_count);
}

std::optional<std::pair<int, int>> ParseRankName(absl::string_view file) {
  absl::string_view rest = file;
  uint64_t rank = 0, world_size = 0;
  if (!absl::ConsumePrefix(&rest, "rank-") || !TakeDigits(&rest, &rank) ||
      !absl::ConsumePrefix(&rest, "-of-") || !TakeDigits(&rest, &world_size) || world_size > kWorldSizeMax ||
      rank >= world_size) {
    return std::nullopt;
  }
  const std::pair<int, int> found(static_cast<int>(rank), static_cast<int>(world_size));
  const bool ours =
      file == ShardName(found.first, found.second) || file == IndexName(found.first, found.second);
  return ours ? std::optional(found) : std::nullopt;
}

std::string AttemptKey(const SaveId& id, absl::string_view file) {
  return absl::StrCat(AttemptName(id), "/", file);
}

std::string OwnerKey(uint64_t epoch) { return absl::StrFormat("%sepoch-%08d.json", kOwnerPrefix, epoch); }

std::string LeasePrefix(uint64_t epoch) { return absl::StrFormat("%sepoch-%08d.", kLeasePrefix, epoch); }

std::string LeaseKey(const LeaseName& name) {
  return absl::StrFormat("%s%08d.json", LeasePrefix(name.epoch), name.renewal);
}

std::optional<LeaseName> ParseLeaseKey(absl::string_view key) {
  absl::string_view rest = key;
  LeaseName name;
  if (!absl::ConsumePrefix(&rest, kLeasePrefix) || !absl::ConsumePrefix(&rest, "epoch-") ||
      !TakeDigits(&rest, &name.epoch) || !absl::ConsumePrefix(&rest, ".") ||
      !TakeDigits(&rest, &name.renewal) || !InRange(name.epoch) || !InRange(name.renewal) ||
      LeaseKey(name) != key) {
    return std::nullopt;
  }
  return name;
}

std::string ProbeKey(int64_t unix_seconds, uint64_t nonce) {
  return absl::StrFormat("%s%010d-%016x", kProbePrefix, unix_seconds, nonce);
}

std::optional<int64_t> ParseProbeKey(absl::string_view key) {
  absl::string_view rest = key;
  uint64_t seconds = 0, nonce = 0;
  if (!absl::ConsumePrefix(&rest, kProbePrefix) || !TakeDigits(&rest, &seconds) ||
      !absl::ConsumePrefix(&rest, "-") || !absl::SimpleHexAtoi(rest, &nonce) ||
      ProbeKey(static_cast<int64_t>(seconds), nonce) != key) {
    return std::nullopt;
  }
  return static_cast<int64_t>(seconds);
}

std::optional<uint64_t> ParseOwnerKey(absl::string_view key) {
  absl::string_view rest = key;
  uint64_t epoch = 0;
  if (!absl::ConsumePrefix(&rest, kOwnerPrefix) || !absl::ConsumePrefix(&rest, "epoch-") ||
      !TakeDigits(&rest, &epoch) || !InRange(epoch) || OwnerKey(epoch) != key) {
    return std::nullopt;
  }
  return epoch;
}

}  // namespace gtrain::ckpt
