// Each pair of functions that write and read a value stand side by side. Reading builds the value and then
// asks whether its numbers derive the key it was found under; names of files are never taken from the text
// but compared with the derived ones.

#include "checkpoint/format/manifest.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "checkpoint/format/shared_fields.h"
#include "checkpoint/format/strict_json.h"
#include "checkpoint/format/tensor_fields.h"
#include "checkpoint/format/validate.h"

namespace gtrain::ckpt {
namespace {

constexpr char kManifestFormat[] = "gtrain-checkpoint";
constexpr char kAbortFormat[] = "gtrain-checkpoint-aborted";
constexpr char kPartFormat[] = "gtrain-checkpoint-part";
constexpr char kIndexFormat[] = "gtrain-shard-index";
constexpr char kOwnerFormat[] = "gtrain-checkpoint-owner";
constexpr uint64_t kOldestIndexVersion = 2;  // of a writer that an upgrade has not replaced yet

Json FileToJson(const ShardFile& file, int version) {
  Json out = {{"name", file.name}, {"bytes", file.bytes}};
  if (version < 3) out["xxh3_128"] = file.xxh3;
  out["chunk_bytes"] = kChunkBytes;
  out["chunks"] = file.chunks;
  out["finite"] = file.finite;
  if (version > 1) {
    out["data_begin"] = file.data_begin;
    out["per_rank"] = file.per_rank;
    if (!file.kept.empty()) out["kept"] = KeptToJson(file.kept);
    return out;
  }
  Json slices = Json::array();
  for (const Slice& s : file.slices) {
    slices.push_back(
        {{"tensor", s.tensor}, {"begin", s.begin}, {"bytes", s.bytes}, {"file_begin", s.file_begin}});
  }
  out["slices"] = std::move(slices);
  return out;
}

absl::StatusOr<Slice> ReadSlice(const ParsedJson& object) {
  GT_RETURN_IF_ERROR(CheckFields(object, {"tensor", "begin", "bytes", "file_begin"}));
  Slice s;
  GT_ASSIGN_OR_RETURN(s.tensor, GetString(object, "tensor", kTensorNameBytesMax));
  GT_ASSIGN_OR_RETURN(s.begin, GetUint(object, "begin", UINT64_MAX / 4));
  GT_ASSIGN_OR_RETURN(s.bytes, GetUint(object, "bytes", kFileBytesMax));
  GT_ASSIGN_OR_RETURN(s.file_begin, GetUint(object, "file_begin", kFileBytesMax));
  return s;
}

// Where its data lies, as each version says it.
absl::Status ReadPlaces(const ParsedJson& object, int version, ShardFile* file) {
  if (version > 1) {
    GT_ASSIGN_OR_RETURN(file->data_begin, GetUint(object, "data_begin", kFileBytesMax));
    GT_ASSIGN_OR_RETURN(file->per_rank, ReadSizes(object, "per_rank"));
    GT_ASSIGN_OR_RETURN(file->kept, ReadKept(object));  // versions without it refuse the field
    return absl::OkStatus();
  }
  GT_ASSIGN_OR_RETURN(const ParsedJson* slices, GetArray(object, "slices", kTensorsMax));
  for (const ParsedJson& item : *slices) {
    GT_ASSIGN_OR_RETURN(Slice slice, ReadSlice(item));
    file->slices.push_back(std::move(slice));
  }
  return absl::OkStatus();
}

absl::StatusOr<ShardFile> ReadFileEntry(const ParsedJson& object, int version) {
  if (version > 2) {
    GT_RETURN_IF_ERROR(CheckFields(
        object, {"name", "bytes", "chunk_bytes", "chunks", "finite", "data_begin", "per_rank", "kept"}));
  } else if (version == 2) {
    GT_RETURN_IF_ERROR(CheckFields(
        object, {"name", "bytes", "xxh3_128", "chunk_bytes", "chunks", "finite", "data_begin", "per_rank"}));
  } else {
    GT_RETURN_IF_ERROR(
        CheckFields(object, {"name", "bytes", "xxh3_128", "chunk_bytes", "chunks", "finite", "slices"}));
  }
  ShardFile file;
  GT_ASSIGN_OR_RETURN(file.name, GetString(object, "name", 64));
  GT_ASSIGN_OR_RETURN(file.bytes, GetUint(object, "bytes", kFileBytesMax));
  if (version < 3) {
    GT_ASSIGN_OR_RETURN(file.xxh3, GetString(object, "xxh3_128", 32));
  }
  GT_ASSIGN_OR_RETURN(const uint64_t chunk_bytes, GetUint(object, "chunk_bytes", kFileBytesMax));
  if (chunk_bytes != kChunkBytes) return absl::DataLossError("chunk_bytes is not what this format uses");
  GT_ASSIGN_OR_RETURN(const ParsedJson* chunks, GetArray(object, "chunks", kManifestBytesMax / 32));
  for (const ParsedJson& chunk : *chunks) {
    if (!chunk.is_string()) return absl::DataLossError("a chunk's hash is not a string");
    file.chunks.push_back(chunk.get<std::string>());
  }
  GT_ASSIGN_OR_RETURN(file.finite, GetBool(object, "finite"));
  GT_RETURN_IF_ERROR(ReadPlaces(object, version, &file));
  return file;
}

Json PartToJson(const PartRef& part) {
  Json out = {{"bytes", part.bytes},
              {"xxh3_128", part.xxh3},
              {"finite", part.finite},
              {"file_bytes", part.file_bytes},
              {"chunks", part.chunks}};
  if (part.kept > 0) out["kept"] = part.kept;
  return out;
}

absl::StatusOr<PartRef> ReadPartRef(const ParsedJson& object) {
  GT_RETURN_IF_ERROR(CheckFields(object, {"bytes", "xxh3_128", "finite", "file_bytes", "chunks", "kept"}));
  PartRef part;
  GT_ASSIGN_OR_RETURN(part.bytes, GetUint(object, "bytes", kPartBytesMax));
  GT_ASSIGN_OR_RETURN(part.xxh3, GetString(object, "xxh3_128", 32));
  GT_ASSIGN_OR_RETURN(part.finite, GetBool(object, "finite"));
  GT_ASSIGN_OR_RETURN(part.file_bytes, GetUint(object, "file_bytes", kPartRanks * kFileBytesMax));
  GT_ASSIGN_OR_RETURN(part.chunks, GetUint(object, "chunks", kPartRanks * kFileBytesMax));
  if (object.contains("kept")) {
    GT_ASSIGN_OR_RETURN(part.kept, GetUint(object, "kept", kPartBytesMax));
    if (part.kept == 0) return absl::DataLossError("kept is none");
  }
  return part;
}

// The files or, since version 3, the parts instead.
absl::Status ReadFiles(const ParsedJson& object, Manifest* m) {
  if (object.contains("files") == object.contains("parts"))
    return absl::DataLossError("neither files nor parts");
  if (object.contains("files")) {
    GT_ASSIGN_OR_RETURN(const ParsedJson* files, GetArray(object, "files", kShardsMax));
    for (const ParsedJson& item : *files) {
      GT_ASSIGN_OR_RETURN(ShardFile file, ReadFileEntry(item, m->version));
      m->files.push_back(std::move(file));
    }
    return absl::OkStatus();
  }
  GT_ASSIGN_OR_RETURN(const ParsedJson* parts, GetArray(object, "parts", kShardsMax));
  for (const ParsedJson& item : *parts) {
    GT_ASSIGN_OR_RETURN(PartRef part, ReadPartRef(item));
    m->parts.push_back(std::move(part));
  }
  m->files.resize(static_cast<size_t>(m->world_size));
  return absl::OkStatus();
}

absl::StatusOr<Manifest> ReadManifest(const ParsedJson& object) {
  Manifest m;
  GT_ASSIGN_OR_RETURN(m.version, ReadHead(object, kManifestFormat, 1, kManifestVersion));
  GT_RETURN_IF_ERROR(CheckFields(
      object, {"format", "version", "cluster", "job", "job_hash", "epoch", "timeline", "generation", "step",
               "attempt", "world_size", "finite", "tensors", "boxes", "files", "parts"}));
  GT_ASSIGN_OR_RETURN(m.id, ReadId(object));
  GT_ASSIGN_OR_RETURN(m.owner, ReadIdentity(object));
  GT_ASSIGN_OR_RETURN(const uint64_t world, GetUint(object, "world_size", kWorldSizeMax));
  m.world_size = static_cast<int>(world);
  GT_ASSIGN_OR_RETURN(m.tensors, ReadTensors(object, m.version));
  GT_RETURN_IF_ERROR(ReadFiles(object, &m));
  GT_ASSIGN_OR_RETURN(const bool finite, GetBool(object, "finite"));
  if (finite != m.finite()) return absl::DataLossError("\"finite\" does not match its files");
  GT_RETURN_IF_ERROR(Validate(m));
  return m;
}

absl::StatusOr<AbortMarker> ReadAbortMarker(const ParsedJson& object) {
  GT_RETURN_IF_ERROR(ReadHead(object, kAbortFormat).status());
  GT_RETURN_IF_ERROR(CheckFields(
      object, {"format", "version", "epoch", "timeline", "generation", "step", "attempt", "reason"}));
  AbortMarker marker;
  GT_ASSIGN_OR_RETURN(marker.id, ReadId(object));
  GT_ASSIGN_OR_RETURN(const std::string reason, GetString(object, "reason", kReasonBytesMax));
  marker.reason = BoundedWords(reason);
  return marker;
}

bool IsVerifiedName(absl::string_view verified) {
  return verified.empty() || ParseAttemptName(verified).has_value();
}

absl::StatusOr<std::string> ReadVerified(const ParsedJson& object) {
  GT_ASSIGN_OR_RETURN(std::string verified, GetString(object, "verified", 128));
  if (!IsVerifiedName(verified)) return absl::DataLossError("verified is no attempt");
  return verified;
}

absl::Status CheckKey(absl::string_view found, absl::string_view derived) {
  if (found == derived) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("its numbers derive the name ", derived, ", it was found as ", found));
}

}  // namespace

bool Manifest::finite() const {
  const auto is_finite = [](const auto& f) { return f.finite; };
  if (!parts.empty()) return std::all_of(parts.begin(), parts.end(), is_finite);
  return std::all_of(files.begin(), files.end(), is_finite);
}

uint64_t Manifest::file_bytes() const {
  uint64_t bytes = 0;
  for (const PartRef& part : parts) bytes += part.file_bytes;
  if (parts.empty()) {
    for (const ShardFile& file : files) bytes += file.bytes;
  }
  return bytes;
}

uint64_t Manifest::chunk_count() const {
  uint64_t chunks = 0;
  for (const PartRef& part : parts) chunks += part.chunks;
  if (parts.empty()) {
    for (const ShardFile& file : files) chunks += file.chunks.size();
  }
  return chunks;
}

uint64_t Manifest::ChunksBefore(int rank) const {
  const int part = parts.empty() ? 0 : PartOf(rank);
  uint64_t chunks = 0;
  for (int i = 0; i < part; ++i) chunks += parts[static_cast<size_t>(i)].chunks;
  for (int r = part * kPartRanks; r < rank; ++r) chunks += files[static_cast<size_t>(r)].chunks.size();
  return chunks;
}

std::string Print(const Manifest& m) {
  GT_CHECK(Validate(m).ok());
  Json out = Head(kManifestFormat, static_cast<uint64_t>(m.version));
  AddIdentity(m.owner, &out);
  AddId(m.id, &out);
  out["world_size"] = m.world_size;
  out["finite"] = m.finite();
  AddTensors(m.tensors, &out);
  const char* const list = m.parts.empty() ? "files" : "parts";
  out[list] = Json::array();
  for (const PartRef& part : m.parts) out[list].push_back(PartToJson(part));
  if (m.parts.empty()) {
    for (const ShardFile& file : m.files) out[list].push_back(FileToJson(file, m.version));
  }
  return PrintSealed(out);
}

std::string Print(const AbortMarker& marker) {
  GT_CHECK(IsValid(marker.id));
  Json out = Head(kAbortFormat);
  AddId(marker.id, &out);
  out["reason"] = BoundedWords(marker.reason);
  return PrintSealed(out);
}

std::string Print(const ManifestPart& part) {
  GT_CHECK(IsValid(part.id) && IsVerifiedName(part.verified));
  GT_CHECK(!part.error.empty() || CheckPartFiles(part).ok());
  Json out = Head(kPartFormat, kManifestVersion);
  AddId(part.id, &out);
  out["world_size"] = part.world_size;
  out["part"] = part.part;
  if (!part.error.empty()) {
    out["error"] = BoundedWords(part.error);
    return PrintSealed(out);
  }
  out["verified"] = part.verified;
  out["files"] = Json::array();
  for (const ShardFile& file : part.files) out["files"].push_back(FileToJson(file, kManifestVersion));
  return PrintSealed(out);
}

std::string Print(const ShardIndex& index) {
  GT_CHECK(IsValid(index.id) && IsVerifiedName(index.verified));
  GT_CHECK(!index.error.empty() || ValidateFile(index.file, index.rank, index.world_size).ok());
  Json out = Head(kIndexFormat, kManifestVersion);
  AddId(index.id, &out);
  out["rank"] = index.rank;
  out["world_size"] = index.world_size;
  if (index.error.empty()) {
    out["file"] = FileToJson(index.file, kManifestVersion);
    out["verified"] = index.verified;
  } else {
    out["error"] = BoundedWords(index.error);
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
  GT_ASSIGN_OR_RETURN(const ParsedJson object, ParseSealed(text, kManifestBytesMax));
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

absl::StatusOr<ManifestPart> ParseManifestPart(absl::string_view key, absl::string_view text) {
  GT_ASSIGN_OR_RETURN(const ParsedJson object, ParseSealed(text, kPartBytesMax));
  GT_ASSIGN_OR_RETURN(const int version, ReadHead(object, kPartFormat, kPartsVersion, kManifestVersion));
  GT_RETURN_IF_ERROR(CheckFields(object, {"format", "version", "epoch", "timeline", "generation", "step",
                                          "attempt", "world_size", "part", "error", "verified", "files"}));
  ManifestPart part;
  GT_ASSIGN_OR_RETURN(part.id, ReadId(object));
  GT_ASSIGN_OR_RETURN(const uint64_t world, GetUint(object, "world_size", kWorldSizeMax));
  GT_ASSIGN_OR_RETURN(const uint64_t number, GetUint(object, "part", kWorldSizeMax));
  part.world_size = static_cast<int>(world);
  part.part = static_cast<int>(number);
  if (part.part >= PartCount(part.world_size)) return absl::DataLossError("part outside the world");
  GT_RETURN_IF_ERROR(CheckKey(key, AttemptKey(part.id, PartName(part.part, PartCount(part.world_size)))));
  if (object.contains("error") == object.contains("files"))
    return absl::DataLossError("neither files nor an error");
  if (object.contains("error")) {
    if (object.contains("verified")) return absl::DataLossError("an error that verified something");
    GT_ASSIGN_OR_RETURN(const std::string error, GetString(object, "error", kReasonBytesMax));
    part.error = error.empty() ? "unknown error" : BoundedWords(error);
    return part;
  }
  GT_ASSIGN_OR_RETURN(part.verified, ReadVerified(object));
  GT_ASSIGN_OR_RETURN(const ParsedJson* files, GetArray(object, "files", kPartRanks));
  for (const ParsedJson& item : *files) {
    GT_ASSIGN_OR_RETURN(ShardFile file, ReadFileEntry(item, version));
    part.files.push_back(std::move(file));
  }
  GT_RETURN_IF_ERROR(CheckPartFiles(part));
  return part;
}

absl::StatusOr<ShardIndex> ParseShardIndex(absl::string_view key, absl::string_view text) {
  GT_ASSIGN_OR_RETURN(const ParsedJson object, ParseSealed(text, kManifestBytesMax));
  GT_ASSIGN_OR_RETURN(const int version,
                      ReadHead(object, kIndexFormat, kOldestIndexVersion, kManifestVersion));
  GT_RETURN_IF_ERROR(CheckFields(object, {"format", "version", "epoch", "timeline", "generation", "step",
                                          "attempt", "rank", "world_size", "file", "error", "verified"}));
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
    GT_ASSIGN_OR_RETURN(const std::string error, GetString(object, "error", kReasonBytesMax));
    index.error = error.empty() ? "unknown error" : BoundedWords(error);
    if (object.contains("verified")) return absl::DataLossError("an error that verified something");
    return index;
  }
  GT_ASSIGN_OR_RETURN(index.file, ReadFileEntry(object["file"], version));
  index.file.xxh3.clear();  // of version 2; what is written now does not say it
  if (version >= 3) {
    GT_ASSIGN_OR_RETURN(index.verified, ReadVerified(object));
  }
  GT_RETURN_IF_ERROR(ValidateFile(index.file, index.rank, index.world_size));
  return index;
}

absl::StatusOr<OwnerClaim> ParseOwnerClaim(absl::string_view key, absl::string_view text) {
  GT_ASSIGN_OR_RETURN(const ParsedJson object, ParseSealed(text, kSmallFileBytesMax));
  GT_RETURN_IF_ERROR(ReadHead(object, kOwnerFormat).status());
  GT_RETURN_IF_ERROR(CheckFields(object, {"format", "version", "epoch", "cluster", "job", "job_hash"}));
  OwnerClaim claim;
  GT_ASSIGN_OR_RETURN(claim.epoch, GetUint(object, "epoch", kCounterMax));
  GT_ASSIGN_OR_RETURN(claim.owner, ReadIdentity(object));
  GT_RETURN_IF_ERROR(CheckKey(key, OwnerKey(claim.epoch)));
  return claim;
}

}  // namespace gtrain::ckpt
