// Whether manifests, parts and files are whole and consistent.
#include "checkpoint/format/validate.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "checkpoint/format/hash.h"
#include "checkpoint/format/shares.h"

namespace gtrain::ckpt {
namespace {

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

// Version 1: every byte of every replicated tensor in exactly one slice.
absl::Status CheckSlices(const Manifest& m) {
  absl::flat_hash_map<absl::string_view, const GlobalTensor*> by_name;
  for (const GlobalTensor& t : m.tensors) {
    by_name[t.name] = &t;
    if (t.layout == Layout::kSharded) return absl::DataLossError("a sharded tensor in version 1");
  }
  absl::flat_hash_map<absl::string_view, Ranges> replicated;
  for (const ShardFile& file : m.files) {
    std::map<absl::string_view, int> blobs;
    for (const Slice& s : file.slices) {
      const auto it = by_name.find(s.tensor);
      if (it == by_name.end())
        return absl::DataLossError(absl::StrCat(file.name, ": a slice of an unknown tensor"));
      if (it->second->layout == Layout::kReplicated) {
        if (s.bytes > 0) replicated[it->first].emplace_back(s.begin, s.begin + s.bytes);
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

// Since version 2: the shares of the ranks are disjoint and complete by construction; each file must have the
// length that follows from them.
class ShareCheck {
 public:
  static absl::StatusOr<ShareCheck> Make(const std::vector<GlobalTensor>& tensors, int world_size) {
    absl::StatusOr<Shares> shares = Shares::Make(tensors, world_size);
    if (!shares.ok()) return absl::DataLossError(shares.status().message());
    size_t blobs = 0;
    for (size_t t = 0; t < tensors.size(); ++t) {
      blobs += tensors[t].layout == Layout::kPerRank ? 1 : 0;
      if (tensors[t].layout == Layout::kSharded && shares->partition(t).Key().empty()) {
        return absl::DataLossError(
            absl::StrCat("tensor \"", tensors[t].name, "\" is sharded, but equal on all ranks"));
      }
    }
    return ShareCheck(*std::move(shares), blobs, world_size);
  }

  absl::Status Check(const ShardFile& file, int rank) {
    if (!file.slices.empty()) return absl::DataLossError(absl::StrCat(file.name, ": slices since version 2"));
    if (file.per_rank.size() != blobs_) {
      return absl::DataLossError(
          absl::StrCat(file.name, ": per_rank does not match the tensors of single ranks"));
    }
    unsigned __int128 bytes = file.data_begin;
    bytes += shares_.DataBytes(rank);
    for (uint64_t blob : file.per_rank) bytes += blob;
    for (size_t i = 0; i < file.kept.size(); ++i) {
      const KeptBlob& k = file.kept[i];
      // One place for each, so that nobody has to look at all files to know that none has it twice.
      const bool possible = k.blob < blobs_ && k.rank >= world_size_ && k.rank % world_size_ == rank;
      const auto which = [&](size_t at) { return std::pair(file.kept[at].blob, file.kept[at].rank); };
      if (!possible || (i > 0 && which(i - 1) >= which(i))) {
        return absl::DataLossError(absl::StrCat(file.name, ": it keeps state of rank ", k.rank,
                                                ", which is there already or is not kept here"));
      }
      bytes += k.bytes;
    }
    if (bytes == file.bytes) return absl::OkStatus();
    return absl::DataLossError(
        absl::StrCat(file.name, ": ", file.bytes, " bytes are not what its rank holds of the tensors"));
  }

 private:
  ShareCheck(Shares shares, size_t blobs, int world_size)
      : shares_(std::move(shares)), blobs_(blobs), world_size_(world_size) {}
  Shares shares_;
  size_t blobs_;  // tensors of single ranks
  int world_size_;
};

// How many ranks part `part` has.
int PartSize(int part, int world_size) { return std::min(kPartRanks, world_size - part * kPartRanks); }

absl::Status CheckParts(const Manifest& m) {
  if (m.version < kPartsVersion) {
    return m.parts.empty() ? absl::OkStatus() : absl::DataLossError("parts before version 3");
  }
  if (m.parts.empty()) {
    return m.world_size <= kPartRanks ? absl::OkStatus()
                                      : absl::DataLossError("files of so many ranks without parts");
  }
  if (m.parts.size() != static_cast<size_t>(PartCount(m.world_size))) {
    return absl::DataLossError(absl::StrCat("world size ", m.world_size, " but ", m.parts.size(), " parts"));
  }
  for (size_t i = 0; i < m.parts.size(); ++i) {
    const auto ranks = static_cast<uint64_t>(PartSize(static_cast<int>(i), m.world_size));
    const PartRef& part = m.parts[i];
    const bool possible = part.bytes > 0 && part.bytes <= kPartBytesMax && IsHashHex(part.xxh3) &&
                          part.file_bytes <= ranks * kFileBytesMax &&
                          part.chunks <= part.file_bytes / kChunkBytes + ranks && part.kept <= part.bytes;
    if (!possible) return absl::DataLossError(absl::StrCat("part ", i, " is impossible"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckTensors(const std::vector<GlobalTensor>& tensors) {
  absl::flat_hash_set<absl::string_view> names;
  for (const GlobalTensor& t : tensors) {
    if (!IsTensorName(t.name)) return absl::DataLossError("a tensor with an impossible name");
    if (!names.insert(t.name).second)
      return absl::DataLossError(absl::StrCat("tensor \"", t.name, "\" twice"));
    if (t.layout == Layout::kPerRank && (t.dtype != DType::kUint8 || !t.shape.empty())) {
      return absl::DataLossError(absl::StrCat("per-rank \"", t.name, "\" has a type or a shape"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckPartFiles(const ManifestPart& part) {
  if (part.part < 0 || part.part >= PartCount(part.world_size))
    return absl::DataLossError("part outside the world");
  if (part.files.size() != static_cast<size_t>(PartSize(part.part, part.world_size)))
    return absl::DataLossError("a part with another number of files than its ranks");
  for (size_t i = 0; i < part.files.size(); ++i) {
    GT_RETURN_IF_ERROR(
        ValidateFile(part.files[i], part.part * kPartRanks + static_cast<int>(i), part.world_size));
  }
  return absl::OkStatus();
}

absl::Status ValidateFile(const ShardFile& file, int rank, int world_size, int version) {
  if (file.name != ShardName(rank, world_size)) {
    return absl::DataLossError(
        absl::StrCat("file ", rank, " has another name than ", ShardName(rank, world_size)));
  }
  const auto fail = [&](absl::string_view what) {
    return absl::DataLossError(absl::StrCat(file.name, ": ", what));
  };
  if (file.bytes > kFileBytesMax) return fail("impossible length");
  if (version < 3 ? !IsHashHex(file.xxh3) : !file.xxh3.empty()) return fail("xxh3_128 is not a hash");
  if (file.data_begin > file.bytes || file.data_begin % 8 != 0)
    return fail("its data begins where it cannot");
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
  if (m.version < 1 || m.version > kManifestVersion) return absl::DataLossError("impossible version");
  if (!IsValid(m.id)) return absl::DataLossError("its numbers are out of range");
  if (m.world_size < 1 || m.world_size > kWorldSizeMax ||
      m.files.size() != static_cast<size_t>(m.world_size)) {
    return absl::DataLossError(absl::StrCat("world size ", m.world_size, " but ", m.files.size(), " files"));
  }
  GT_RETURN_IF_ERROR(CheckTensors(m.tensors));
  GT_RETURN_IF_ERROR(CheckParts(m));
  for (int rank = 0; rank < m.world_size; ++rank) {
    if (m.parts.empty() || m.Has(rank))
      GT_RETURN_IF_ERROR(ValidateFile(m.files[rank], rank, m.world_size, m.version));
  }
  if (m.version == 1) return CheckSlices(m);
  GT_ASSIGN_OR_RETURN(ShareCheck shares, ShareCheck::Make(m.tensors, m.world_size));
  for (int rank = 0; rank < m.world_size; ++rank) {
    if (m.Has(rank)) GT_RETURN_IF_ERROR(shares.Check(m.files[rank], rank));
  }
  return absl::OkStatus();
}

absl::Status ValidateFiles(const std::vector<GlobalTensor>& tensors, int world_size, int first_rank,
                           const std::vector<ShardFile>& files) {
  GT_ASSIGN_OR_RETURN(ShareCheck shares, ShareCheck::Make(tensors, world_size));
  for (size_t i = 0; i < files.size(); ++i) {
    const int rank = first_rank + static_cast<int>(i);
    GT_RETURN_IF_ERROR(ValidateFile(files[i], rank, world_size));
    GT_RETURN_IF_ERROR(shares.Check(files[i], rank));
  }
  return absl::OkStatus();
}

PartRef RefOf(const ManifestPart& part, absl::string_view text) {
  PartRef ref{.bytes = text.size(), .xxh3 = Xxh3Hex(text)};
  for (const ShardFile& file : part.files) {
    ref.finite = ref.finite && file.finite;
    ref.file_bytes += file.bytes;
    ref.chunks += file.chunks.size();
    ref.kept += file.kept.size();
  }
  return ref;
}

absl::Status AddParts(const std::vector<PartText>& parts, Manifest* manifest) {
  GT_ASSIGN_OR_RETURN(ShareCheck shares, ShareCheck::Make(manifest->tensors, manifest->world_size));
  for (const auto& [number, text] : parts) {
    GT_CHECK(number >= 0 && static_cast<size_t>(number) < manifest->parts.size());
    const std::string key = AttemptKey(manifest->id, PartName(number, PartCount(manifest->world_size)));
    const auto damaged = [&](absl::string_view what) {
      return absl::DataLossError(absl::StrCat(key, ": ", what));
    };
    const PartRef& ref = manifest->parts[static_cast<size_t>(number)];
    if (text.size() != ref.bytes || Xxh3Hex(text) != ref.xxh3)
      return damaged("is not the part that the manifest names");
    absl::StatusOr<ManifestPart> part = ParseManifestPart(key, text);
    if (!part.ok())
      return absl::Status(part.status().code(), absl::StrCat(key, ": ", part.status().message()));
    if (!part->error.empty() || RefOf(*part, text) != ref)
      return damaged("says something else than the manifest");
    for (size_t i = 0; i < part->files.size(); ++i) {
      const int rank = number * kPartRanks + static_cast<int>(i);
      if (const absl::Status sound = shares.Check(part->files[i], rank); !sound.ok())
        return damaged(sound.message());
    }
    std::move(part->files.begin(), part->files.end(), manifest->files.begin() + number * kPartRanks);
  }
  return absl::OkStatus();
}

}  // namespace gtrain::ckpt
