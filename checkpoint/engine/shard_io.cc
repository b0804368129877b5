// A chunk is read into one buffer, hashed there, and only then copied from: what lands in the staged state is
// what was hashed, even when the file changes while it is read.
#include "checkpoint/engine/shard_io.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "checkpoint/format/hash.h"
#include "checkpoint/format/safetensors.h"

namespace gtrain::ckpt {
namespace {

template <typename Word>
bool NoneHasAllOf(absl::string_view data, Word exponent) {
  bool found = false;
  for (size_t i = 0; i + sizeof(Word) <= data.size(); i += sizeof(Word)) {
    Word word;
    std::memcpy(&word, data.data() + i, sizeof(Word));
    found |= (word & exponent) == exponent;
  }
  return !found;
}

absl::Status Damaged(const std::string& name, absl::string_view what) {
  return absl::DataLossError(absl::StrCat(name, ": ", what));
}

// Chunk `index` of `file`, verified, into `buffer`.
absl::StatusOr<absl::string_view> ReadChunk(port::BlobStore* store, const SaveId& id, const ShardFile& file,
                                            uint64_t index, std::vector<char>* buffer) {
  const uint64_t begin = index * kChunkBytes;
  const uint64_t bytes = std::min(kChunkBytes, file.bytes - begin);
  buffer->resize(kChunkBytes);
  const std::string key = AttemptKey(id, file.name);
  const absl::Status read = store->Read(key, begin, absl::MakeSpan(buffer->data(), bytes));
  if (!read.ok()) return Damaged(key, read.message());
  const absl::string_view chunk(buffer->data(), bytes);
  if (Xxh3Hex(chunk) != file.chunks[index]) {
    return Damaged(
        key, absl::StrCat("bytes ", begin, " to ", begin + bytes, " do not have the hash in the manifest"));
  }
  return chunk;
}

absl::Status CheckLength(port::BlobStore* store, const SaveId& id, const ShardFile& file) {
  const std::string key = AttemptKey(id, file.name);
  const absl::StatusOr<uint64_t> bytes = store->Size(key);
  if (!bytes.ok()) return Damaged(key, bytes.status().message());
  if (*bytes == file.bytes) return absl::OkStatus();
  return Damaged(key, absl::StrCat("has ", *bytes, " bytes, the manifest says ", file.bytes));
}

}  // namespace

bool AllFinite(absl::string_view data, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return NoneHasAllOf<uint32_t>(data, 0x7f800000u);
    case DType::kFloat64:
      return NoneHasAllOf<uint64_t>(data, 0x7ff0000000000000u);
    case DType::kFloat16:
      return NoneHasAllOf<uint16_t>(data, 0x7c00u);
    case DType::kBFloat16:
      return NoneHasAllOf<uint16_t>(data, 0x7f80u);
    case DType::kInt32:
    case DType::kInt64:
    case DType::kUint8:
      return true;
  }
  return true;
}

ShardFile DescribeShard(const ShardPlan& plan, absl::string_view data,
                        const std::vector<Registered>& registered, int rank, int world_size) {
  ShardFile file{.name = ShardName(rank, world_size), .bytes = plan.file_bytes(), .slices = plan.slices};
  const absl::string_view parts[] = {plan.header, data};
  file.xxh3 = Xxh3Hex(parts);
  for (uint64_t begin = 0; begin < file.bytes; begin += kChunkBytes) {
    const uint64_t end = std::min(begin + kChunkBytes, file.bytes);
    const uint64_t split = plan.header.size();
    absl::string_view head, tail;
    if (begin < split) head = absl::string_view(plan.header).substr(begin, end - begin);
    if (end > split) tail = data.substr(std::max(begin, split) - split, end - std::max(begin, split));
    const absl::string_view chunk[] = {head, tail};
    file.chunks.push_back(Xxh3Hex(chunk));
  }
  for (size_t i = 0; i < plan.pieces.size() && file.finite; ++i) {
    const uint64_t begin = plan.slices[i].file_begin - plan.header.size();
    file.finite = AllFinite(data.substr(begin, plan.pieces[i].bytes),
                            registered[plan.pieces[i].registered].tensor.dtype);
  }
  return file;
}

absl::Status WriteShard(port::BlobStore* store, const SaveId& id, const ShardPlan& plan,
                        const ShardFile& file, absl::string_view data) {
  const absl::string_view parts[] = {plan.header, data};
  const std::string key = AttemptKey(id, file.name);
  GT_RETURN_IF_ERROR(store->PutIfAbsent(key, parts));
  return CheckLength(store, id, file);
}

StagedState::StagedState(const std::vector<Registered>& registered) {
  constexpr uint64_t kAlign = 64;
  uint64_t bytes = 0;
  for (const Registered& r : registered) {
    offsets_.push_back(bytes);
    bytes += (r.bytes + kAlign - 1) / kAlign * kAlign;
  }
  bytes_ = std::make_unique_for_overwrite<char[]>(bytes);
}

absl::Status LoadShards(port::BlobStore* store, const Manifest& manifest, const LoadPlan& plan,
                        const std::function<absl::Status()>& alive, StagedState* staged) {
  // Lengths of all files first, also of those this rank does not read: a missing one is found before any
  // work.
  for (const ShardFile& file : manifest.files) GT_RETURN_IF_ERROR(CheckLength(store, manifest.id, file));
  std::vector<char> buffer;
  for (const FileRead& read : plan.reads) {
    const ShardFile& file = manifest.files[read.file];
    for (uint64_t index : read.chunks) {
      GT_RETURN_IF_ERROR(alive());
      GT_ASSIGN_OR_RETURN(const absl::string_view chunk, ReadChunk(store, manifest.id, file, index, &buffer));
      const uint64_t begin = index * kChunkBytes;
      for (const Copy& copy : read.copies) {
        const uint64_t first = std::max(copy.file_begin, begin);
        const uint64_t last = std::min(copy.file_begin + copy.bytes, begin + chunk.size());
        if (first >= last) continue;
        std::memcpy(staged->at(copy.registered) + copy.begin + (first - copy.file_begin),
                    chunk.data() + (first - begin), last - first);
      }
    }
  }
  return absl::OkStatus();
}

absl::Status VerifyShard(port::BlobStore* store, const Manifest& manifest, int rank) {
  const ShardFile& file = manifest.files[rank];
  const std::string key = AttemptKey(manifest.id, file.name);
  GT_RETURN_IF_ERROR(CheckLength(store, manifest.id, file));
  std::vector<char> buffer;
  for (uint64_t i = 0; i < file.chunks.size(); ++i) {
    GT_RETURN_IF_ERROR(ReadChunk(store, manifest.id, file, i, &buffer).status());
  }
  std::string head(std::min<uint64_t>(8, file.bytes), '\0');
  GT_RETURN_IF_ERROR(store->Read(key, 0, absl::MakeSpan(head.data(), head.size())));
  absl::StatusOr<uint64_t> header_bytes = HeaderBytes(head, file.bytes);
  if (!header_bytes.ok()) return Damaged(key, header_bytes.status().message());
  head.resize(*header_bytes);
  GT_RETURN_IF_ERROR(store->Read(key, 0, absl::MakeSpan(head.data(), head.size())));
  const absl::StatusOr<ShardHeader> header = ParseShardHeader(head, file.bytes);
  if (!header.ok()) return Damaged(key, header.status().message());
  if (header->tensors.size() != file.slices.size())
    return Damaged(key, "holds other tensors than the manifest says");
  for (size_t i = 0; i < file.slices.size(); ++i) {
    const TensorEntry& entry = header->tensors[i];
    if (header->data_begin + entry.begin != file.slices[i].file_begin ||
        entry.end - entry.begin != file.slices[i].bytes) {
      return Damaged(key, absl::StrCat("tensor \"", entry.name, "\" lies elsewhere than the manifest says"));
    }
  }
  return absl::OkStatus();
}

}  // namespace gtrain::ckpt
