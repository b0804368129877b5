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

absl::Status CheckLength(port::BlobStore* store, const SaveId& id, const ShardFile& file) {
  const std::string key = AttemptKey(id, file.name);
  const absl::StatusOr<uint64_t> bytes = store->Size(key);
  if (!bytes.ok()) return Damaged(key, bytes.status().message());
  if (*bytes == file.bytes) return absl::OkStatus();
  return Damaged(key, absl::StrCat("has ", *bytes, " bytes, the manifest says ", file.bytes));
}

// Whether the header of the file of `rank` says what the manifest says.
absl::Status CheckEntries(const Manifest& manifest, int rank, const ShardHeader& header) {
  const ShardFile& file = manifest.files[rank];
  const auto damaged = [&](absl::string_view what) {
    return Damaged(AttemptKey(manifest.id, file.name), what);
  };
  if (manifest.version > 1) {
    absl::StatusOr<Shares> shares = Shares::Make(manifest.tensors, manifest.world_size);
    if (!shares.ok()) return damaged(shares.status().message());
    const bool same = header.data_begin == file.data_begin &&
                      header.tensors == PlanEntries(manifest.tensors, &*shares, rank, file.per_rank, nullptr);
    return same ? absl::OkStatus() : damaged("holds other tensors than the manifest says");
  }
  if (header.tensors.size() != file.slices.size())
    return damaged("holds other tensors than the manifest says");
  for (size_t i = 0; i < file.slices.size(); ++i) {
    const TensorEntry& entry = header.tensors[i];
    if (header.data_begin + entry.begin != file.slices[i].file_begin ||
        entry.end - entry.begin != file.slices[i].bytes) {
      return damaged(absl::StrCat("tensor \"", entry.name, "\" lies elsewhere than the manifest says"));
    }
  }
  return absl::OkStatus();
}

// What the chunk that begins at `begin` of its file holds of `copy`; how many bytes that were.
uint64_t CopyOut(absl::string_view chunk, uint64_t begin, const Copy& copy, char* memory) {
  const uint64_t first = std::max(copy.file_begin, begin);
  const uint64_t last = std::min(copy.file_begin + copy.bytes, begin + chunk.size());
  if (first >= last) return 0;
  const uint64_t window = copy.begin + (first - copy.file_begin);  // in the box as it was saved
  uint64_t copied = 0;
  copy.overlap.ForEachRun(window, window + (last - first), [&](uint64_t from, uint64_t to, uint64_t bytes) {
    std::memcpy(memory + to, chunk.data() + (first - begin) + (from - window), bytes);
    copied += bytes;
  });
  return copied;
}

}  // namespace

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
  ShardFile file{.name = ShardName(rank, world_size),
                 .bytes = plan.file_bytes(),
                 .data_begin = plan.header.size(),
                 .per_rank = plan.per_rank};
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
    const Piece& piece = plan.pieces[i];
    file.finite = AllFinite(data.substr(piece.offset, piece.bytes), registered[piece.tensor].tensor.dtype);
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
                        absl::FunctionRef<absl::Status()> alive, absl::FunctionRef<char*(size_t)> memory) {
  // Lengths of all files first, also of those this rank does not read: a missing one is found before any
  // work.
  for (const ShardFile& file : manifest.files) GT_RETURN_IF_ERROR(CheckLength(store, manifest.id, file));
  std::vector<char> buffer;
  uint64_t copied = 0;
  for (const FileRead& read : plan.reads) {
    const ShardFile& file = manifest.files[read.file];
    auto copy = read.copies.begin();  // the first that a chunk may still hold something of
    for (const ChunkRange& range : read.chunks) {
      for (uint64_t index = range.first; index < range.first + range.count; ++index) {
        GT_RETURN_IF_ERROR(alive());
        GT_ASSIGN_OR_RETURN(const absl::string_view chunk,
                            ReadChunk(store, manifest.id, file, index, &buffer));
        const uint64_t begin = index * kChunkBytes;
        while (copy != read.copies.end() && copy->file_begin + copy->bytes <= begin) ++copy;
        for (auto c = copy; c != read.copies.end() && c->file_begin < begin + chunk.size(); ++c)
          copied += CopyOut(chunk, begin, *c, memory(c->registered));
      }
    }
  }
  if (copied == plan.needed_bytes) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("restored ", copied, " bytes where ", plan.needed_bytes, " were planned"));
}

absl::Status VerifyBytes(port::BlobStore* store, const SaveId& id, const ShardFile& file) {
  GT_RETURN_IF_ERROR(CheckLength(store, id, file));
  std::vector<char> buffer;
  for (uint64_t i = 0; i < file.chunks.size(); ++i) {
    GT_RETURN_IF_ERROR(ReadChunk(store, id, file, i, &buffer).status());
  }
  return absl::OkStatus();
}

absl::Status VerifyShard(port::BlobStore* store, const Manifest& manifest, int rank) {
  const ShardFile& file = manifest.files[rank];
  const std::string key = AttemptKey(manifest.id, file.name);
  GT_RETURN_IF_ERROR(VerifyBytes(store, manifest.id, file));
  std::string head(std::min<uint64_t>(8, file.bytes), '\0');
  GT_RETURN_IF_ERROR(store->Read(key, 0, absl::MakeSpan(head.data(), head.size())));
  absl::StatusOr<uint64_t> header_bytes = HeaderBytes(head, file.bytes);
  if (!header_bytes.ok()) return Damaged(key, header_bytes.status().message());
  head.resize(*header_bytes);
  GT_RETURN_IF_ERROR(store->Read(key, 0, absl::MakeSpan(head.data(), head.size())));
  const absl::StatusOr<ShardHeader> header = ParseShardHeader(head, file.bytes);
  if (!header.ok()) return Damaged(key, header.status().message());
  return CheckEntries(manifest, rank, *header);
}

}  // namespace gtrain::ckpt
