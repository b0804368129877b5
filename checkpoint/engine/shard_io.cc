// Only our own memory is hashed, the very bytes that are used then, even when the file changes while it is
// read. A piece of a chunk that goes into registered memory unchanged is read to its place at once, others
// pass through a buffer. Pieces are hashed while they are in the cache.
#include "checkpoint/engine/shard_io.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <optional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "base/logging.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "checkpoint/engine/parallel.h"
#include "checkpoint/format/hash.h"
#include "checkpoint/format/safetensors.h"

namespace gtrain::ckpt {
namespace {

constexpr size_t kReadersMax = 4;            // one reads while another hashes
constexpr uint64_t kCacheBytes = 256 << 10;  // fits the second level of any cache

// Lanes of a fixed count are what the compiler makes vector instructions of: three times as fast as words.
template <typename Word>
bool NoneHasAllOf(absl::string_view data, Word exponent) {
  constexpr size_t kLineBytes = 64, kLanes = kLineBytes / sizeof(Word);
  Word found[kLanes] = {};
  size_t at = 0;
  for (; at + kLineBytes <= data.size(); at += kLineBytes) {
    Word words[kLanes];
    std::memcpy(words, data.data() + at, kLineBytes);
    for (size_t i = 0; i < kLanes; ++i) found[i] |= static_cast<Word>((words[i] & exponent) == exponent);
  }
  for (; at + sizeof(Word) <= data.size(); at += sizeof(Word)) {
    Word word;
    std::memcpy(&word, data.data() + at, sizeof(Word));
    found[0] |= static_cast<Word>((word & exponent) == exponent);
  }
  return std::all_of(std::begin(found), std::end(found), [](Word f) { return f == 0; });
}

// Whether the elements that begin in bytes [begin, end) of the data are finite. `piece` goes along.
bool FiniteBetween(const ShardPlan& plan, const std::vector<Registered>& registered, absl::string_view data,
                   uint64_t begin, uint64_t end, size_t* piece) {
  bool finite = true;
  for (; *piece < plan.pieces.size() && plan.pieces[*piece].offset < end; ++*piece) {
    const Piece& p = plan.pieces[*piece];
    const DType dtype = registered[p.tensor].tensor.dtype;
    const uint64_t width = DTypeSize(dtype);
    const auto element = [&](uint64_t at) {  // the first that begins at `at` or after it
      const uint64_t inside = at <= p.offset ? 0 : (at - p.offset + width - 1) / width * width;
      return p.offset + std::min(inside, p.bytes);
    };
    finite &= AllFinite(data.substr(element(begin), element(end) - element(begin)), dtype);
    if (p.offset + p.bytes > end) break;  // goes on in the next block
  }
  return finite;
}

absl::Status Damaged(const std::string& name, absl::string_view what) {
  return absl::DataLossError(absl::StrCat(name, ": ", what));
}

// Interprets a store's answer about a file of a committed checkpoint. A file that is absent or too short is
// damage; an error says nothing about the file and stays what it is.
absl::Status Judge(const std::string& key, const absl::Status& status) {
  if (absl::IsNotFound(status) || absl::IsOutOfRange(status)) return Damaged(key, status.message());
  if (absl::IsDataLoss(status)) return Damaged(key, status.message());
  return status;
}

absl::Status CheckLength(port::BlobStore* store, const SaveId& id, const std::string& name,
                         uint64_t expected) {
  const std::string key = AttemptKey(id, name);
  const absl::StatusOr<uint64_t> bytes = store->Size(key);
  if (!bytes.ok()) return Judge(key, bytes.status());
  if (*bytes == expected) return absl::OkStatus();
  return Damaged(key, absl::StrCat("has ", *bytes, " bytes, the manifest says ", expected));
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
    std::vector<TensorEntry> planned =
        PlanEntries(manifest.tensors, &*shares, rank, {file.per_rank, file.kept}, nullptr);
    std::sort(planned.begin(), planned.end(), &LiesBefore);
    const bool same = header.data_begin == file.data_begin && header.tensors == planned;
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

using Place = absl::FunctionRef<char*(uint64_t begin, uint64_t end)>;
using Have = absl::FunctionRef<void(uint64_t begin, absl::string_view piece)>;

// Reads chunk `index` piece by piece and compares its hash. `place` says where the bytes [begin, end) of the
// file are to be read to, `have` gets them when they are there, before they are known to be right.
absl::Status ReadPieces(const NearShards::ReadFrom& from, const ShardFile& file, uint64_t index, Place place,
                        Have have) {
  const uint64_t begin = index * kChunkBytes, end = std::min(begin + kChunkBytes, file.bytes);
  Xxh3 hash;
  for (uint64_t at = begin; at < end;) {
    const uint64_t next = std::min(at + from.size, end);
    const absl::Span<char> piece(place(at, next), next - at);
    GT_RETURN_IF_ERROR(from.read(at, piece));
    hash.Add({piece.data(), piece.size()});
    have(at, {piece.data(), piece.size()});
    at = next;
  }
  if (hash.Hex() == file.chunks[index]) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("bytes ", begin, " to ", end, " do not have the hash in the manifest"));
}

absl::Status ReadFromStore(port::BlobStore* store, const SaveId& id, const ShardFile& file, uint64_t index,
                           Place place, Have have) {
  const std::string key = AttemptKey(id, file.name);
  const auto read = [&](uint64_t at, absl::Span<char> out) { return store->Read(key, at, out); };
  return Judge(key, ReadPieces({store->ReadSize(), read}, file, index, place, have));
}

// Where in the memory of `copy` the bytes [begin, end) of its file go if they all go there, one after the
// other.
std::optional<uint64_t> WholeRun(const Copy& copy, uint64_t begin, uint64_t end) {
  if (begin < copy.file_begin || end > copy.file_begin + copy.bytes || copy.needed < end - begin) return {};
  const uint64_t window = copy.begin + (begin - copy.file_begin);
  std::optional<uint64_t> place;
  copy.overlap.ForEachRun(window, window + (end - begin), [&](uint64_t, uint64_t to, uint64_t bytes) {
    if (bytes == end - begin) place = to;
  });
  return place;
}

// Copies the part of `copy` that is in the piece which begins at `begin` of its file. Returns how many bytes
// that were.
uint64_t CopyOut(absl::string_view piece, uint64_t begin, const Copy& copy, char* memory) {
  const uint64_t first = std::max(copy.file_begin, begin);
  const uint64_t last = std::min(copy.file_begin + copy.bytes, begin + piece.size());
  if (first >= last) return 0;
  const uint64_t window = copy.begin + (first - copy.file_begin);  // in the box as it was saved
  uint64_t copied = 0;
  copy.overlap.ForEachRun(window, window + (last - first), [&](uint64_t from, uint64_t to, uint64_t bytes) {
    std::memcpy(memory + to, piece.data() + (first - begin) + (from - window), bytes);
    copied += bytes;
  });
  return copied;
}

using Memory = absl::FunctionRef<char*(size_t registered)>;

// Brings the pieces of one chunk to where a plan wants them: a piece that lies there as it is in the file is
// read to its place, others pass through `buffer`. A chunk that is read anew begins anew.
class ChunkCopier {
 public:
  // `begin`: of the chunk in its file. Some of `copies` needs it.
  ChunkCopier(const std::vector<Copy>& copies, uint64_t begin, Memory memory, std::vector<char>* buffer)
      : copies_(copies),
        begin_(begin),
        memory_(memory),
        buffer_(buffer),
        first_(std::partition_point(copies.begin(), copies.end(),
                                    [&](const Copy& c) { return c.file_begin + c.bytes <= begin; })),
        copy_(first_) {}

  bool IsNeeded() const { return first_ != copies_.end(); }
  char* Place(uint64_t from, uint64_t to) {
    if (from == begin_) {
      copy_ = first_;
      bytes_ = 0;
    }
    while (copy_ != copies_.end() && copy_->file_begin + copy_->bytes <= from) ++copy_;
    const std::optional<uint64_t> whole = copy_ == copies_.end() ? std::nullopt : WholeRun(*copy_, from, to);
    placed_ = whole.has_value();
    if (placed_) return memory_(copy_->registered) + *whole;
    buffer_->resize(to - from);
    return buffer_->data();
  }
  void Have(uint64_t from, absl::string_view piece) {
    if (placed_) {
      bytes_ += piece.size();
      return;
    }
    for (auto c = copy_; c != copies_.end() && c->file_begin < from + piece.size(); ++c)
      bytes_ += CopyOut(piece, from, *c, memory_(c->registered));
  }
  uint64_t bytes() const { return bytes_; }  // of this chunk that were copied

 private:
  const std::vector<Copy>& copies_;
  const uint64_t begin_;
  const Memory memory_;
  std::vector<char>* const buffer_;
  const std::vector<Copy>::const_iterator first_;  // that needs some of the chunk
  std::vector<Copy>::const_iterator copy_;         // that needs some of the piece
  bool placed_ = false;                            // the piece was read to its place
  uint64_t bytes_ = 0;
};

// Carries out one LoadShards. Its threads take chunk after chunk until none is left or one of them fails.
class ShardLoader {
 public:
  ShardLoader(port::BlobStore* store, NearShards* near, ChunkShare* share, const Manifest& manifest,
              const LoadPlan& plan, absl::FunctionRef<absl::Status()> alive, Memory memory)
      : store_(store),
        near_(near),
        share_(share),
        manifest_(manifest),
        plan_(plan),
        alive_(alive),
        memory_(memory) {
    for (const FileRead& read : plan.reads) {
      for (const ChunkRange& range : read.chunks) {
        for (uint64_t i = 0; i < range.count; ++i) chunks_.push_back({&read, range.first + i});
      }
    }
  }

  absl::StatusOr<uint64_t> Load() {
    std::vector<std::thread> helpers;
    for (size_t i = 1; i < std::min(kReadersMax, chunks_.size()); ++i)
      helpers.emplace_back([this] { Work(); });
    Work();
    for (std::thread& helper : helpers) helper.join();
    {
      MutexLock lock(&mu_);
      GT_RETURN_IF_ERROR(failed_);
    }
    if (copied_ == plan_.needed_bytes) return bytes_read_;
    return absl::InternalError(
        absl::StrCat("restored ", copied_.load(), " bytes where ", plan_.needed_bytes, " were planned"));
  }

 private:
  using Task = ChunkShare::Task;
  struct Chunk {
    const FileRead* read;
    uint64_t index;  // in the file
  };

  const ShardFile& FileOf(const Chunk& chunk) const { return manifest_.files[chunk.read->file]; }

  void Work() {
    std::vector<char> buffer;
    while (true) {
      const absl::StatusOr<std::optional<Task>> task = Next();
      if (task.ok() && !*task) return;
      const absl::Status status = task.ok() ? LoadChunk(**task, &buffer) : task.status();
      if (!status.ok()) return GiveUp(status);
    }
  }

  absl::StatusOr<std::optional<Task>> Next() {
    if (share_ != nullptr) return share_->Next(alive_);
    GT_RETURN_IF_ERROR(alive_());
    const size_t i = next_alone_++;
    return i < chunks_.size() ? std::optional(Task{Task::Kind::kAlone, i}) : std::nullopt;
  }

  void GiveUp(const absl::Status& status) {
    {
      MutexLock lock(&mu_);
      failed_.Update(status);
    }
    next_alone_ = chunks_.size();  // the others stop
    if (share_ != nullptr) share_->Fail(status);
  }

  absl::Status LoadChunk(const Task& task, std::vector<char>* buffer) {
    const Chunk& chunk = chunks_[task.wanted];
    if (task.kind == Task::Kind::kRead) GT_RETURN_IF_ERROR(ReadForAll(chunk, task));
    ChunkCopier copier(chunk.read->copies, chunk.index * kChunkBytes, memory_, buffer);
    if (!copier.IsNeeded()) return absl::InternalError("a chunk is read that nothing needs");
    const auto place = [&](uint64_t from, uint64_t to) { return copier.Place(from, to); };
    const auto have = [&](uint64_t from, absl::string_view piece) { copier.Have(from, piece); };
    if (task.slot == nullptr || !TakeFromSlot(chunk, task, place, have))
      GT_RETURN_IF_ERROR(Read(chunk, place, have));
    if (share_ != nullptr) share_->Done(task);
    copied_ += copier.bytes();
    return absl::OkStatus();
  }

  // Reads the chunk from where it lies: the copies that are near, then the storage.
  absl::Status Read(const Chunk& chunk, Place place, Have have) {
    const ShardFile& file = FileOf(chunk);
    bytes_read_ += std::min(kChunkBytes, file.bytes - chunk.index * kChunkBytes);
    const bool found =
        near_ != nullptr && near_->Read(chunk.read->file, [&](const NearShards::ReadFrom& from) {
          return ReadPieces(from, file, chunk.index, place, have);
        });
    return found ? absl::OkStatus() : ReadFromStore(store_, manifest_.id, file, chunk.index, place, have);
  }

  // Reads it for the ranks of this machine.
  absl::Status ReadForAll(const Chunk& chunk, const Task& task) {
    const uint64_t begin = chunk.index * kChunkBytes;
    GT_RETURN_IF_ERROR(Read(
        chunk, [&](uint64_t from, uint64_t) { return task.slot + (from - begin); },
        [](uint64_t, absl::string_view) {}));
    share_->Publish(task);
    return absl::OkStatus();
  }

  // False: it is not as it was saved.
  bool TakeFromSlot(const Chunk& chunk, const Task& task, Place place, Have have) const {
    const ShardFile& file = FileOf(chunk);
    const auto take = [&](uint64_t at, absl::Span<char> out) {
      std::memcpy(out.data(), task.slot + (at - chunk.index * kChunkBytes), out.size());
      return absl::OkStatus();
    };
    const absl::Status status = ReadPieces({kCacheBytes, take}, file, chunk.index, place, have);
    if (!status.ok()) {
      LogWarning("checkpoint: ", AttemptKey(manifest_.id, file.name),
                 " as another rank of this machine read it is NOT USED: ", status.message());
    }
    return status.ok();
  }

  port::BlobStore* const store_;
  NearShards* const near_;   // may be null
  ChunkShare* const share_;  // may be null
  const Manifest& manifest_;
  const LoadPlan& plan_;
  const absl::FunctionRef<absl::Status()> alive_;
  const Memory memory_;
  std::vector<Chunk> chunks_;  // as WantChunks has them
  std::atomic<size_t> next_alone_ = 0;
  std::atomic<uint64_t> copied_ = 0, bytes_read_ = 0;
  Mutex mu_;
  absl::Status failed_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

absl::StatusOr<absl::string_view> ReadChunk(port::BlobStore* store, const SaveId& id, const ShardFile& file,
                                            uint64_t index, std::vector<char>* buffer) {
  buffer->resize(kChunkBytes);
  const uint64_t first = index * kChunkBytes;
  size_t bytes = 0;
  GT_RETURN_IF_ERROR(ReadFromStore(
      store, id, file, index, [&](uint64_t begin, uint64_t) { return buffer->data() + (begin - first); },
      [&](uint64_t, absl::string_view piece) { bytes += piece.size(); }));
  return absl::string_view(buffer->data(), bytes);
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
    case DType::kFloat8E4M3:  // its largest exponent holds numbers, too: NaN is all bits but the sign
      return NoneHasAllOf<uint8_t>(data, 0x7fu);
    case DType::kFloat8E5M2:
      return NoneHasAllOf<uint8_t>(data, 0x7cu);
    case DType::kComplex64:
      return NoneHasAllOf<uint32_t>(data, 0x7f800000u);
    case DType::kInt32:
    case DType::kInt64:
    case DType::kUint8:
    case DType::kBool:
    case DType::kInt8:
    case DType::kInt16:
    case DType::kUint16:
    case DType::kUint32:
    case DType::kUint64:
      return true;
  }
  return true;
}

ShardFile DescribeShard(const ShardPlan& plan, absl::string_view data,
                        const std::vector<Registered>& registered, int rank, int world_size) {
  ShardFile file{.name = ShardName(rank, world_size),
                 .bytes = plan.file_bytes(),
                 .data_begin = plan.header.size(),
                 .per_rank = plan.per_rank,
                 .kept = plan.kept};
  const std::string& header = plan.header;
  Xxh3 chunk;
  size_t piece = 0;  // the first that has not been seen whole
  for (uint64_t begin = 0; begin < file.bytes;) {
    // A block of one chunk, of the header or of the data: looked at twice while it is in the cache.
    uint64_t end = std::min({begin + kCacheBytes, (begin / kChunkBytes + 1) * kChunkBytes, file.bytes});
    if (begin < header.size()) end = std::min<uint64_t>(end, header.size());
    const absl::string_view block = begin < header.size()
                                        ? absl::string_view(header).substr(begin, end - begin)
                                        : data.substr(begin - header.size(), end - begin);
    chunk.Add(block);
    if (end % kChunkBytes == 0 || end == file.bytes)
      file.chunks.push_back(std::exchange(chunk, Xxh3()).Hex());
    if (begin >= header.size()) {
      file.finite =
          FiniteBetween(plan, registered, data, begin - header.size(), end - header.size(), &piece) &&
          file.finite;
    }
    begin = end;
  }
  return file;
}

absl::Status WriteShard(port::BlobStore* store, const SaveId& id, const ShardPlan& plan,
                        const std::string& name, absl::string_view data) {
  const absl::string_view parts[] = {plan.header, data};
  return store->PutIfAbsent(AttemptKey(id, name), parts);
}

std::pair<int, int> LengthsOf(const Manifest& manifest, int rank, int world_size) {
  const auto cut = [&](int64_t r) { return static_cast<int>(manifest.world_size * r / world_size); };
  return {cut(rank), cut(rank + 1)};
}

absl::Status CheckLengths(port::BlobStore* store, const NearShards* near, const Manifest& manifest, int rank,
                          int world_size) {
  const std::pair<int, int> ours = LengthsOf(manifest, rank, world_size);
  const auto begin = static_cast<size_t>(ours.first);
  std::vector<absl::Status> found(static_cast<size_t>(ours.second - ours.first));
  ForEachAtOnce(found.size(), [&](size_t i) {
    const ShardFile& file = manifest.files[begin + i];
    if (manifest.Has(ours.first + static_cast<int>(i)) && (near == nullptr || !near->Holds(begin + i)))
      found[i] = CheckLength(store, manifest.id, file.name, file.bytes);
  });
  for (const absl::Status& status : found) GT_RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

void WantChunks(const Manifest& manifest, const LoadPlan& plan, const NearShards* near, ChunkShare* share) {
  for (const FileRead& read : plan.reads) {
    const uint64_t before = manifest.ChunksBefore(read.file);
    const bool here = near != nullptr && near->HoldsHere(static_cast<size_t>(read.file));
    for (const ChunkRange& range : read.chunks) {
      for (uint64_t i = 0; i < range.count; ++i) share->Want(before + range.first + i, !here);
    }
  }
}

absl::StatusOr<uint64_t> LoadShards(port::BlobStore* store, NearShards* near, ChunkShare* share,
                                    const Manifest& manifest, const LoadPlan& plan,
                                    absl::FunctionRef<absl::Status()> alive,
                                    absl::FunctionRef<char*(size_t)> memory) {
  return ShardLoader(store, near, share, manifest, plan, alive, memory).Load();
}

absl::Status VerifyBytes(port::BlobStore* store, const SaveId& id, const ShardFile& file) {
  GT_RETURN_IF_ERROR(CheckLength(store, id, file.name, file.bytes));
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
  GT_RETURN_IF_ERROR(Judge(key, store->Read(key, 0, absl::MakeSpan(head.data(), head.size()))));
  absl::StatusOr<uint64_t> header_bytes = HeaderBytes(head, file.bytes);
  if (!header_bytes.ok()) return Damaged(key, header_bytes.status().message());
  head.resize(*header_bytes);
  GT_RETURN_IF_ERROR(Judge(key, store->Read(key, 0, absl::MakeSpan(head.data(), head.size()))));
  const absl::StatusOr<ShardHeader> header = ParseShardHeader(head, file.bytes);
  if (!header.ok()) return Damaged(key, header.status().message());
  return CheckEntries(manifest, rank, *header);
}

}  // namespace gtrain::ckpt
