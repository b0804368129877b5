// A file of any program as a checkpoint. The file is read once, front to back of what is written: its hashes
// are those of the very bytes that were put, also when somebody writes to the file meanwhile.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "checkpoint/engine/admin.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/lease.h"
#include "checkpoint/engine/shard_io.h"
#include "checkpoint/format/hash.h"
#include "checkpoint/format/safetensors.h"

namespace gtrain::ckpt {
namespace {

constexpr char kImportJob[] = "import";  // the owner of what is imported; a job has a hash, too

class InputFile {
 public:
  static absl::StatusOr<InputFile> Open(const std::string& path) {
    InputFile file;
    file.path_ = path;
    file.fd_ = UniqueFd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // not to wait at a pipe
    struct stat info;
    if (!file.fd_.valid()) return ErrnoStatus(errno, absl::StrCat("open ", path));
    if (fstat(file.fd_.get(), &info) != 0) return ErrnoStatus(errno, absl::StrCat("stat ", path));
    if (!S_ISREG(info.st_mode))
      return absl::InvalidArgumentError(absl::StrCat(path, " is not a regular file"));
    file.bytes_ = static_cast<uint64_t>(info.st_size);
    return file;
  }

  absl::Status Read(uint64_t offset, absl::Span<char> out) const {
    while (!out.empty()) {
      const ssize_t n = pread(fd_.get(), out.data(), out.size(), static_cast<off_t>(offset));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return ErrnoStatus(errno, absl::StrCat("read ", path_));
      if (n == 0) return absl::InvalidArgumentError(absl::StrCat(path_, " ends before what its header says"));
      out.remove_prefix(static_cast<size_t>(n));
      offset += static_cast<uint64_t>(n);
    }
    return absl::OkStatus();
  }

  absl::StatusOr<ShardHeader> Header() const {
    std::string head(std::min<uint64_t>(8, bytes_), '\0');
    GT_RETURN_IF_ERROR(Read(0, absl::MakeSpan(head.data(), head.size())));
    absl::StatusOr<uint64_t> header_bytes = HeaderBytes(head, bytes_);
    if (header_bytes.ok()) head.resize(*header_bytes);
    if (header_bytes.ok()) GT_RETURN_IF_ERROR(Read(0, absl::MakeSpan(head.data(), head.size())));
    absl::StatusOr<ShardHeader> header = header_bytes.ok()
                                             ? ParseShardHeader(head, bytes_)
                                             : absl::StatusOr<ShardHeader>(header_bytes.status());
    if (header.ok()) return header;
    return absl::InvalidArgumentError(absl::StrCat(path_, ": ", header.status().message()));
  }

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  UniqueFd fd_;
  uint64_t bytes_ = 0;
};

// The one shard of a world of one rank, a block at a time, and what the manifest says of it in the end.
class ShardStream {
 public:
  // Tensor i of the plan lies at begins[i] of `input`. All outlive the stream.
  ShardStream(const InputFile* input, const ShardPlan* plan, const std::vector<Registered>* registered,
              std::vector<uint64_t> begins)
      : input_(input), plan_(plan), registered_(registered), begins_(std::move(begins)) {
    file_ = {.name = ShardName(0, 1),
             .bytes = plan->file_bytes(),
             .data_begin = plan->header.size(),
             .per_rank = plan->per_rank};
  }

  // Serves as a port::BlobStore::Source.
  absl::StatusOr<absl::string_view> At(uint64_t offset) {
    while (offset >= end_ && end_ < file_.bytes) GT_RETURN_IF_ERROR(NextBlock());
    if (offset < end_ - block_.size() || offset >= end_)
      return absl::InternalError("a shard is put out of order");
    return block_.substr(offset - (end_ - block_.size()));
  }

  // Called after all was put.
  absl::StatusOr<ShardFile> Describe() {
    if (end_ != file_.bytes) return absl::InternalError("a shard was not put whole");
    return file_;
  }

 private:
  static constexpr uint64_t kBlockBytes = 1 << 20;  // holds whole elements of every type

  // The header, then blocks of the pieces, each from the piece's beginning on.
  absl::Status NextBlock() {
    if (end_ == 0) {
      block_ = plan_->header;
    } else {
      while (inside_ == plan_->pieces[piece_].bytes) ++piece_, inside_ = 0;
      const Piece& piece = plan_->pieces[piece_];
      buffer_.resize(std::min(kBlockBytes, piece.bytes - inside_));
      GT_RETURN_IF_ERROR(
          input_->Read(begins_[piece.tensor] + piece.begin + inside_, absl::MakeSpan(buffer_)));
      inside_ += buffer_.size();
      block_ = absl::string_view(buffer_.data(), buffer_.size());
      file_.finite = AllFinite(block_, (*registered_)[piece.tensor].tensor.dtype) && file_.finite;
    }
    for (absl::string_view rest = block_; !rest.empty();) {
      const absl::string_view part = rest.substr(0, kChunkBytes - end_ % kChunkBytes);
      chunk_.Add(part);
      end_ += part.size();
      rest.remove_prefix(part.size());
      if (end_ % kChunkBytes == 0 || end_ == file_.bytes)
        file_.chunks.push_back(std::exchange(chunk_, Xxh3()).Hex());
    }
    return absl::OkStatus();
  }

  const InputFile* const input_;
  const ShardPlan* const plan_;
  const std::vector<Registered>* const registered_;
  const std::vector<uint64_t> begins_;
  ShardFile file_;
  Xxh3 chunk_;
  std::vector<char> buffer_;
  absl::string_view block_;  // ends at end_
  uint64_t end_ = 0;
  size_t piece_ = 0;
  uint64_t inside_ = 0;  // of that piece
};

// The epoch that is imported into. The owner of before could commit nothing more after it, so a program that
// is at work keeps its directory, and so does a job of a cluster: that may be waiting between two
// generations.
absl::StatusOr<OwnerClaim> ClaimForImport(port::BlobStore* store, const Identity& owner, bool takeover) {
  std::vector<OwnerClaim> owners;
  GT_ASSIGN_OR_RETURN(const uint64_t epoch, NextEpoch(store, &owners));
  if (owners.empty()) return ClaimOwnership(store, owner, epoch);
  const OwnerClaim& newest = owners.back();
  if (takeover || newest.owner.job == kImportJob) return ClaimOwnership(store, owner, epoch);
  std::optional<std::string> holder;
  if (newest.owner.cluster.empty()) {
    GT_ASSIGN_OR_RETURN(holder, WhoHolds(store, newest, {}));
    if (!holder) return ClaimOwnership(store, owner, epoch);
  }
  return absl::FailedPreconditionError(absl::StrCat(
      store->Describe(), " belongs to ", DescribeOwner(newest.owner),
      holder ? absl::StrCat(", ", *holder) : "",
      ", which could save nothing more. Import into another directory, or add --takeover when it is over"));
}

}  // namespace

absl::StatusOr<Manifest> ImportSafetensors(const std::string& path, port::BlobStore* store, bool takeover) {
  GT_ASSIGN_OR_RETURN(const InputFile input, InputFile::Open(path));
  GT_ASSIGN_OR_RETURN(const ShardHeader header, input.Header());
  std::vector<Registered> registered;
  std::vector<uint64_t> begins;
  for (const TensorEntry& entry : header.tensors) {
    if (IsPieceName(entry.name)) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, ": \"", entry.name, "\" is a part of a sharded tensor; export the checkpoint instead"));
    }
    registered.push_back({.tensor = {.name = entry.name, .dtype = entry.dtype, .shape = entry.shape},
                          .bytes = entry.end - entry.begin});
    begins.push_back(header.data_begin + entry.begin);
  }
  const ShardPlan plan = PlanShard(registered, 0, 1);
  ShardStream stream(&input, &plan, &registered, std::move(begins));
  Manifest manifest;
  manifest.owner.job = kImportJob;
  for (const Registered& r : registered) manifest.tensors.push_back(r.tensor);
  GT_ASSIGN_OR_RETURN(const OwnerClaim claim, ClaimForImport(store, manifest.owner, takeover));
  manifest.id = {.epoch = claim.epoch, .timeline = 1, .step = 0, .generation = 1, .attempt = 1};
  GT_RETURN_IF_ERROR(store->PutStream(AttemptKey(manifest.id, ShardName(0, 1)), plan.file_bytes(),
                                      [&](uint64_t offset) { return stream.At(offset); }));
  GT_ASSIGN_OR_RETURN(ShardFile file, stream.Describe());
  manifest.files.push_back(std::move(file));
  GT_RETURN_IF_ERROR(Validate(manifest));
  GT_RETURN_IF_ERROR(VerifyShard(store, manifest, 0));
  GT_RETURN_IF_ERROR(store->PutIfAbsent(ManifestKey(manifest.id), Print(manifest)));
  return manifest;
}

}  // namespace gtrain::ckpt
