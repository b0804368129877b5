#include "checkpoint/format/shared_fields.h"

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace gtrain::ckpt {

std::string BoundedWords(absl::string_view text) {
  std::string out(text.substr(0, kReasonBytesMax - 8));
  for (char& c : out) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  return out;
}

Json Head(const char* format, uint64_t version) { return Json{{"format", format}, {"version", version}}; }

absl::StatusOr<int> ReadHead(const ParsedJson& object, absl::string_view format, uint64_t oldest,
                             uint64_t newest) {
  GT_ASSIGN_OR_RETURN(const std::string found, GetString(object, "format", 64));
  if (found != format)
    return absl::DataLossError(absl::StrCat("format is \"", found, "\", not \"", format, "\""));
  GT_ASSIGN_OR_RETURN(const uint64_t version, GetUint(object, "version", UINT32_MAX));
  if (version > newest) {
    return absl::FailedPreconditionError(
        absl::StrCat("written by a newer gtrain (version ", version, "); this one reads ", oldest,
                     oldest < newest ? absl::StrCat(" to ", newest) : "", ": use the newer one"));
  }
  if (version < oldest) return absl::DataLossError(absl::StrCat("impossible version ", version));
  return static_cast<int>(version);
}

void AddId(const SaveId& id, Json* out) {
  (*out)["epoch"] = id.epoch;
  (*out)["timeline"] = id.timeline;
  (*out)["generation"] = id.generation;
  (*out)["step"] = id.step;
  (*out)["attempt"] = id.attempt;
}

absl::StatusOr<SaveId> ReadId(const ParsedJson& object) {
  SaveId id;
  GT_ASSIGN_OR_RETURN(id.epoch, GetUint(object, "epoch", kCounterMax));
  GT_ASSIGN_OR_RETURN(id.timeline, GetUint(object, "timeline", kCounterMax));
  GT_ASSIGN_OR_RETURN(id.generation, GetUint(object, "generation", kCounterMax));
  GT_ASSIGN_OR_RETURN(const uint64_t step, GetUint(object, "step", kStepMax));
  id.step = static_cast<int64_t>(step);
  GT_ASSIGN_OR_RETURN(id.attempt, GetUint(object, "attempt", kCounterMax));
  if (!IsValid(id)) return absl::DataLossError("its numbers are out of range");
  return id;
}

void AddIdentity(const Identity& owner, Json* out) {
  (*out)["cluster"] = owner.cluster;
  (*out)["job"] = owner.job;
  (*out)["job_hash"] = owner.job_hash;
}

absl::StatusOr<Identity> ReadIdentity(const ParsedJson& object) {
  Identity owner;
  GT_ASSIGN_OR_RETURN(owner.cluster, GetString(object, "cluster", kIdentityBytesMax));
  GT_ASSIGN_OR_RETURN(owner.job, GetString(object, "job", kIdentityBytesMax));
  GT_ASSIGN_OR_RETURN(owner.job_hash, GetString(object, "job_hash", kIdentityBytesMax));
  return owner;
}

Json KeptToJson(const std::vector<KeptBlob>& kept) {
  Json out = Json::array();
  for (const KeptBlob& k : kept) out.push_back(Json::array({k.blob, k.rank, k.bytes}));
  return out;
}

absl::StatusOr<std::vector<uint64_t>> ReadSizes(const ParsedJson& object, const char* name) {
  GT_ASSIGN_OR_RETURN(const ParsedJson* sizes, GetArray(object, name, kTensorsMax));
  std::vector<uint64_t> out;
  for (const ParsedJson& size : *sizes) {
    if (!size.is_number_unsigned() || size.get<uint64_t>() > kFileBytesMax)
      return absl::DataLossError(absl::StrCat("impossible bytes in ", name));
    out.push_back(size.get<uint64_t>());
  }
  return out;
}

absl::StatusOr<std::vector<KeptBlob>> ReadKept(const ParsedJson& object) {
  std::vector<KeptBlob> out;
  if (!object.contains("kept")) return out;
  GT_ASSIGN_OR_RETURN(const ParsedJson* items, GetArray(object, "kept", kTensorsMax));
  for (const ParsedJson& item : *items) {
    const auto number = [&](size_t i, uint64_t value_max) {
      return item[i].is_number_unsigned() && item[i].get<uint64_t>() <= value_max;
    };
    if (!item.is_array() || item.size() != 3 || !number(0, kTensorsMax) || !number(1, kWorldSizeMax) ||
        !number(2, kFileBytesMax)) {
      return absl::DataLossError("kept: not an entry, a rank and bytes");
    }
    out.push_back({item[0].get<uint64_t>(), item[1].get<int>(), item[2].get<uint64_t>()});
    if (out.size() > 1 && !(out[out.size() - 2] < out.back()))
      return absl::DataLossError("kept: not in order");
  }
  return out;
}

}  // namespace gtrain::ckpt
