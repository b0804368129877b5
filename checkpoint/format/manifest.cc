// Field names are written and read in this file only, each pair of functions side by side. Reading builds the
// value and then asks whether its numbers derive the key it was found under; names of files are never taken
// from the text but compared with the derived ones.
#include "checkpoint/format/manifest.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "checkpoint/format/hash.h"
#include "checkpoint/format/strict_json.h"

namespace gtrain::ckpt {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kManifestFormat[] = "gtrain-checkpoint";
constexpr char kAbortFormat[] = "gtrain-checkpoint-aborted";
constexpr char kIndexFormat[] = "gtrain-shard-index";
constexpr char kOwnerFormat[] = "gtrain-checkpoint-owner";
constexpr uint64_t kVersion = 1;
constexpr size_t kReasonBytesMax = 4096;

Json Head(const char* format) { return Json{{"format", format}, {"version", kVersion}}; }

absl::Status ReadHead(const Json& object, absl::string_view format) {
  GT_ASSIGN_OR_RETURN(const std::string found, GetString(object, "format", 64));
  if (found != format)
    return absl::DataLossError(absl::StrCat("format is \"", found, "\", not \"", format, "\""));
  GT_ASSIGN_OR_RETURN(const uint64_t version, GetUint(object, "version", UINT32_MAX));
  if (version != kVersion) {
    return absl::DataLossError(absl::StrCat("version ", version, ", this gtrain reads version ", kVersion));
  }
  return absl::OkStatus();
}

void AddId(const SaveId& id, Json* out) {
  (*out)["epoch"] = id.epoch;
  (*out)["timeline"] = id.timeline;
  (*out)["generation"] = id.generation;
  (*out)["step"] = id.step;
  (*out)["attempt"] = id.attempt;
}

absl::StatusOr<SaveId> ReadId(const Json& object) {
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

absl::StatusOr<Identity> ReadIdentity(const Json& object) {
  Identity owner;
  GT_ASSIGN_OR_RETURN(owner.cluster, GetString(object, "cluster", kIdentityBytesMax));
  GT_ASSIGN_OR_RETURN(owner.job, GetString(object, "job", kIdentityBytesMax));
  GT_ASSIGN_OR_RETURN(owner.job_hash, GetString(object, "job_hash", kIdentityBytesMax));
  return owner;
}

Json FileToJson(const ShardFile& file) {
  Json slices = Json::array();
  for (const Slice& s : file.slices) {
    slices.push_back(
        {{"tensor", s.tensor}, {"begin", s.begin}, {"bytes", s.bytes}, {"file_begin", s.file_begin}});
  }
  return {{"name", file.name},          {"bytes", file.bytes},   {"xxh3_128", file.xxh3},
          {"chunk_bytes", kChunkBytes}, {"chunks", file.chunks}, {"finite", file.finite},
          {"slices", std::move(slices)}};
}

absl::StatusOr<Slice> ReadSlice(const Json& object) {
  GT_RETURN_IF_ERROR(CheckFields(object, {"tensor", "begin", "bytes", "file_begin"}));
  Slice s;
  GT_ASSIGN_OR_RETURN(s.tensor, GetString(object, "tensor", kTensorNameBytesMax));
  GT_ASSIGN_OR_RETURN(s.begin, GetUint(object, "begin", UINT64_MAX / 4));
  GT_ASSIGN_OR_RETURN(s.bytes, GetUint(object, "bytes", kFileBytesMax));
  GT_ASSIGN_OR_RETURN(s.file_begin, GetUint(object, "file_begin", kFileBytesMax));
  return s;
}

absl::StatusOr<ShardFile> ReadFileEntry(const Json& object) {
  GT_RETURN_IF_ERROR(
      CheckFields(object, {"name", "bytes", "xxh3_128", "chunk_bytes", "chunks", "finite", "slices"}));
  ShardFile file;
  GT_ASSIGN_OR_RETURN(file.name, GetString(object, "name", 64));
  GT_ASSIGN_OR_RETURN(file.bytes, GetUint(object, "bytes", kFileBytesMax));
  GT_ASSIGN_OR_RETURN(file.xxh3, GetString(object, "xxh3_128", 32));
  GT_ASSIGN_OR_RETURN(const uint64_t chunk_bytes, GetUint(object, "chunk_bytes", kFileBytesMax));
  if (chunk_bytes != kChunkBytes) return absl::DataLossError("chunk_bytes is not what version 1 uses");
  GT_ASSIGN_OR_RETURN(const Json* chunks, GetArray(object, "chunks", kManifestBytesMax / 32));
  for (const Json& chunk : *chunks) {
    if (!chunk.is_string()) return absl::DataLossError("a chunk's hash is not a string");
    file.chunks.push_back(chunk.get<std::string>());
  }
  GT_ASSIGN_OR_RETURN(file.finite, GetBool(object, "finite"));
  GT_ASSIGN_OR_RETURN(const Json* slices, GetArray(object, "slices", kTensorsMax));
  for (const Json& item : *slices) {
    GT_ASSIGN_OR_RETURN(Slice slice, ReadSlice(item));
    file.slices.push_back(std::move(slice));
  }
  return file;
}

Json TensorToJson(const GlobalTensor& t) {
  return {{"name", t.name},
          {"layout", t.layout == Layout::kReplicated ? "replicated" : "per-rank"},
          {"dtype", std::string(DTypeName(t.dtype))},
          {"shape", t.shape}};
}

absl::StatusOr<GlobalTensor> ReadTensor(const Json& object) {
  GT_RETURN_IF_ERROR(CheckFields(object, {"name", "layout", "dtype", "shape"}));
  GlobalTensor t;
  GT_ASSIGN_OR_RETURN(t.name, GetString(object, "name", kTensorNameBytesMax));
  GT_ASSIGN_OR_RETURN(const std::string layout, GetString(object, "layout", 16));
  if (layout != "replicated" && layout != "per-rank") return absl::DataLossError("unknown layout");
  t.layout = layout == "replicated" ? Layout::kReplicated : Layout::kPerRank;
  GT_ASSIGN_OR_RETURN(const std::string dtype, GetString(object, "dtype", 16));
  const std::optional<DType> parsed = ParseDType(dtype);
  if (!parsed) return absl::DataLossError("unknown dtype");
  t.dtype = *parsed;
  GT_ASSIGN_OR_RETURN(const Json* shape, GetArray(object, "shape", kDimsMax));
  for (const Json& dim : *shape) {
    if (!dim.is_number_unsigned() || dim.get<uint64_t>() > INT64_MAX)
      return absl::DataLossError("impossible shape");
    t.shape.push_back(dim.get<int64_t>());
  }
  return t;
}

absl::StatusOr<Manifest> ReadManifest(const Json& object) {
  GT_RETURN_IF_ERROR(
      CheckFields(object, {"format", "version", "cluster", "job", "job_hash", "epoch", "timeline",
                           "generation", "step", "attempt", "world_size", "finite", "tensors", "files"}));
  GT_RETURN_IF_ERROR(ReadHead(object, kManifestFormat));
  Manifest m;
  GT_ASSIGN_OR_RETURN(m.id, ReadId(object));
  GT_ASSIGN_OR_RETURN(m.owner, ReadIdentity(object));
  GT_ASSIGN_OR_RETURN(const uint64_t world, GetUint(object, "world_size", kWorldSizeMax));
  m.world_size = static_cast<int>(world);
  GT_ASSIGN_OR_RETURN(const Json* tensors, GetArray(object, "tensors", kTensorsMax));
  for (const Json& item : *tensors) {
    GT_ASSIGN_OR_RETURN(GlobalTensor t, ReadTensor(item));
    m.tensors.push_back(std::move(t));
  }
  GT_ASSIGN_OR_RETURN(const Json* files, GetArray(object, "files", kShardsMax));
  for (const Json& item : *files) {
    GT_ASSIGN_OR_RETURN(ShardFile file, ReadFileEntry(item));
    m.files.push_back(std::move(file));
  }
  GT_ASSIGN_OR_RETURN(const bool finite, GetBool(object, "finite"));
  if (finite != m.finite()) return absl::DataLossError("\"finite\" does not match its files");
  GT_RETURN_IF_ERROR(Validate(m));
  return m;
}

absl::StatusOr<AbortMarker> ReadAbortMarker(const Json& object) {
  GT_RETURN_IF_ERROR(CheckFields(
      object, {"format", "version", "epoch", "timeline", "generation", "step", "attempt", "reason"}));
  GT_RETURN_IF_ERROR(ReadHead(object, kAbortFormat));
  AbortMarker marker;
  GT_ASSIGN_OR_RETURN(marker.id, ReadId(object));
  GT_ASSIGN_OR_RETURN(marker.reason, GetString(object, "reason", kReasonBytesMax));
  return marker;
}

// Byte ranges of one tensor collected over all files.
using Ranges = std::vector<std::pair<uint64_t, uint64_t>>;

absl::Status CheckCovered(const GlobalTensor& tensor, Ranges ranges) {
  std::sort(ranges.begin(), ranges.end());
  uint64_t expected = 0;
  for (const auto& [begin, end] : ranges) {
    if (begin != expected) {
      return absl::DataLossError(absl::StrCat("tensor \"", tensor.name, "\": bytes ",
                                              std::min(begin, expected), " to ", std::max(begin, expected),
                                              begin > expected ? " are in no shard" : " are in two shards"));
    }
    expected = end;
  }
  const std::optional<uint64_t> count = ElementCount(tensor.shape, tensor.dtype);
  if (!count) return absl::DataLossError(absl::StrCat("tensor \"", tensor.name, "\": impossible shape"));
  if (expected != *count * DTypeSize(tensor.dtype)) {
    return absl::DataLossError(absl::StrCat("tensor \"", tensor.name, "\": the shards hold ", expected,
                                            " of its ", *count * DTypeSize(tensor.dtype), " bytes"));
  }
  return absl::OkStatus();
}

absl::Status CheckKey(absl::string_view found, absl::string_view derived) {
  if (found == derived) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("its numbers derive the name ", derived, ", it was found as ", found));
}

std::string Bounded(absl::string_view text) {
  std::string out(text.substr(0, kReasonBytesMax - 8));
  for (char& c : out) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  return out;
}

}  // namespace

bool Manifest::finite() const {
  return std::all_of(files.begin(), files.end(), [](const ShardFile& f) { return f.finite; });
}

absl::Status ValidateFile(const ShardFile& file, int rank, int world_size) {
  if (file.name != ShardName(rank, world_size)) {
    return absl::DataLossError(
        absl::StrCat("file ", rank, " has another name than ", ShardName(rank, world_size)));
  }
  const auto fail = [&](absl::string_view what) {
    return absl::DataLossError(absl::StrCat(file.name, ": ", what));
  };
  if (file.bytes > kFileBytesMax) return fail("impossible length");
  if (!IsHashHex(file.xxh3)) return fail("xxh3_128 is not a hash");
  if (file.chunks.size() != (file.bytes + kChunkBytes - 1) / kChunkBytes)
    return fail("chunks do not match its length");
  for (const std::string& chunk : file.chunks) {
    if (!IsHashHex(chunk)) return fail("a chunk's hash is not a hash");
  }
  uint64_t at = 0;
  for (const Slice& s : file.slices) {
    if (s.file_begin > file.bytes || s.bytes > file.bytes - s.file_begin)
      return fail("a slice ends past its end");
    if (s.file_begin < at) return fail("slices overlap or are out of order");
    at = s.file_begin + s.bytes;
  }
  return absl::OkStatus();
}

absl::Status Validate(const Manifest& m) {
  if (!IsValid(m.id)) return absl::DataLossError("its numbers are out of range");
  if (m.world_size < 1 || m.world_size > kWorldSizeMax ||
      m.files.size() != static_cast<size_t>(m.world_size)) {
    return absl::DataLossError(absl::StrCat("world size ", m.world_size, " but ", m.files.size(), " files"));
  }
  absl::flat_hash_map<std::string, const GlobalTensor*> by_name;
  for (const GlobalTensor& t : m.tensors) {
    if (!IsTensorName(t.name)) return absl::DataLossError("a tensor with an impossible name");
    if (!by_name.emplace(t.name, &t).second)
      return absl::DataLossError(absl::StrCat("tensor \"", t.name, "\" twice"));
    if (t.layout == Layout::kPerRank && (t.dtype != DType::kUint8 || !t.shape.empty())) {
      return absl::DataLossError(absl::StrCat("per-rank \"", t.name, "\" has a type or a shape"));
    }
  }
  absl::flat_hash_map<std::string, Ranges> replicated;
  for (int rank = 0; rank < m.world_size; ++rank) {
    const ShardFile& file = m.files[rank];
    GT_RETURN_IF_ERROR(ValidateFile(file, rank, m.world_size));
    std::map<absl::string_view, int> blobs;
    for (const Slice& s : file.slices) {
      const auto it = by_name.find(s.tensor);
      if (it == by_name.end())
        return absl::DataLossError(absl::StrCat(file.name, ": a slice of an unknown tensor"));
      if (it->second->layout == Layout::kReplicated) {
        if (s.bytes > 0) replicated[s.tensor].emplace_back(s.begin, s.begin + s.bytes);
      } else if (s.begin != 0 || ++blobs[it->first] > 1) {
        return absl::DataLossError(absl::StrCat(file.name, ": per-rank \"", s.tensor, "\" in pieces"));
      }
    }
  }
  for (const GlobalTensor& t : m.tensors) {
    if (t.layout == Layout::kReplicated) GT_RETURN_IF_ERROR(CheckCovered(t, std::move(replicated[t.name])));
  }
  return absl::OkStatus();
}

std::string Print(const Manifest& m) {
  GT_CHECK(Validate(m).ok());
  Json out = Head(kManifestFormat);
  AddIdentity(m.owner, &out);
  AddId(m.id, &out);
  out["world_size"] = m.world_size;
  out["finite"] = m.finite();
  out["tensors"] = Json::array();
  for (const GlobalTensor& t : m.tensors) out["tensors"].push_back(TensorToJson(t));
  out["files"] = Json::array();
  for (const ShardFile& file : m.files) out["files"].push_back(FileToJson(file));
  return PrintSealed(out);
}

std::string Print(const AbortMarker& marker) {
  GT_CHECK(IsValid(marker.id));
  Json out = Head(kAbortFormat);
  AddId(marker.id, &out);
  out["reason"] = Bounded(marker.reason);
  return PrintSealed(out);
}

std::string Print(const ShardIndex& index) {
  GT_CHECK(IsValid(index.id));
  GT_CHECK(!index.error.empty() || ValidateFile(index.file, index.rank, index.world_size).ok());
  Json out = Head(kIndexFormat);
  AddId(index.id, &out);
  out["rank"] = index.rank;
  out["world_size"] = index.world_size;
  if (index.error.empty()) {
    out["file"] = FileToJson(index.file);
  } else {
    out["error"] = Bounded(index.error);
  }
  return PrintSealed(out);
}

std::string Print(const OwnerClaim& claim) {
  Json out = Head(kOwnerFormat);
  out["epoch"] = claim.epoch;
  AddIdentity(claim.owner, &out);
  return PrintSealed(out);
}

absl::StatusOr<std::variant<Manifest, AbortMarker>> ParseManifest(absl::string_view key,
                                                                  absl::string_view text) {
  GT_ASSIGN_OR_RETURN(const Json object, ParseSealed(text, kManifestBytesMax));
  GT_ASSIGN_OR_RETURN(const std::string format, GetString(object, "format", 64));
  if (format == kAbortFormat) {
    GT_ASSIGN_OR_RETURN(AbortMarker marker, ReadAbortMarker(object));
    GT_RETURN_IF_ERROR(CheckKey(key, ManifestKey(marker.id)));
    return marker;
  }
  GT_ASSIGN_OR_RETURN(Manifest manifest, ReadManifest(object));
  GT_RETURN_IF_ERROR(CheckKey(key, ManifestKey(manifest.id)));
  return manifest;
}

absl::StatusOr<ShardIndex> ParseShardIndex(absl::string_view key, absl::string_view text) {
  GT_ASSIGN_OR_RETURN(const Json object, ParseSealed(text, kManifestBytesMax));
  GT_RETURN_IF_ERROR(ReadHead(object, kIndexFormat));
  GT_RETURN_IF_ERROR(CheckFields(object, {"format", "version", "epoch", "timeline", "generation", "step",
                                          "attempt", "rank", "world_size", "file", "error"}));
  ShardIndex index;
  GT_ASSIGN_OR_RETURN(index.id, ReadId(object));
  GT_ASSIGN_OR_RETURN(const uint64_t world, GetUint(object, "world_size", kWorldSizeMax));
  GT_ASSIGN_OR_RETURN(const uint64_t rank, GetUint(object, "rank", kWorldSizeMax));
  if (rank >= world) return absl::DataLossError("rank outside the world");
  index.world_size = static_cast<int>(world);
  index.rank = static_cast<int>(rank);
  GT_RETURN_IF_ERROR(CheckKey(key, AttemptKey(index.id, IndexName(index.rank, index.world_size))));
  if (object.contains("error") == object.contains("file"))
    return absl::DataLossError("neither a file nor an error");
  if (object.contains("error")) {
    GT_ASSIGN_OR_RETURN(index.error, GetString(object, "error", kReasonBytesMax));
    if (index.error.empty()) index.error = "unknown error";
    return index;
  }
  GT_ASSIGN_OR_RETURN(index.file, ReadFileEntry(object["file"]));
  GT_RETURN_IF_ERROR(ValidateFile(index.file, index.rank, index.world_size));
  return index;
}

absl::StatusOr<OwnerClaim> ParseOwnerClaim(absl::string_view key, absl::string_view text) {
  GT_ASSIGN_OR_RETURN(const Json object, ParseSealed(text, kSmallFileBytesMax));
  GT_RETURN_IF_ERROR(ReadHead(object, kOwnerFormat));
  GT_RETURN_IF_ERROR(CheckFields(object, {"format", "version", "epoch", "cluster", "job", "job_hash"}));
  OwnerClaim claim;
  GT_ASSIGN_OR_RETURN(claim.epoch, GetUint(object, "epoch", kCounterMax));
  GT_ASSIGN_OR_RETURN(claim.owner, ReadIdentity(object));
  GT_RETURN_IF_ERROR(CheckKey(key, OwnerKey(claim.epoch)));
  return claim;
}

}  // namespace gtrain::ckpt
