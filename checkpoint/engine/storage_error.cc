#include "checkpoint/engine/storage_error.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/cord.h"

namespace gtrain::ckpt {
namespace {

constexpr char kMark[] = "gtrain.dev/storage";

bool IsAnswer(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
      return true;
    default:
      return false;
  }
}

absl::Status Marked(const absl::Status& status) { return IsAnswer(status) ? status : StorageError(status); }

template <typename T>
absl::StatusOr<T> Marked(absl::StatusOr<T> result) {
  if (result.ok() || IsAnswer(result.status())) return result;
  return StorageError(result.status());
}

class MarkingStore final : public port::BlobStore {
 public:
  explicit MarkingStore(std::unique_ptr<port::BlobStore> base) : base_(std::move(base)) {}

  using port::BlobStore::PutIfAbsent;
  absl::Status PutIfAbsent(absl::string_view key, absl::Span<const absl::string_view> parts) override {
    return Marked(base_->PutIfAbsent(key, parts));
  }
  absl::Status PutStream(absl::string_view key, uint64_t bytes, Source source) override {
    return Marked(base_->PutStream(key, bytes, source));
  }
  uint64_t BytesMax() const override { return base_->BytesMax(); }
  bool ChecksEveryPut() const override { return base_->ChecksEveryPut(); }
  absl::StatusOr<absl::Duration> Unchanged(absl::string_view name) override {
    return Marked(base_->Unchanged(name));
  }
  absl::StatusOr<std::string> Get(absl::string_view key, size_t bytes_max) override {
    return Marked(base_->Get(key, bytes_max));
  }
  absl::Status Read(absl::string_view key, uint64_t offset, absl::Span<char> out) override {
    return Marked(base_->Read(key, offset, out));
  }
  uint64_t ReadSize() const override { return base_->ReadSize(); }
  absl::StatusOr<uint64_t> Size(absl::string_view key) override { return Marked(base_->Size(key)); }
  absl::StatusOr<std::vector<std::string>> List(absl::string_view prefix) override {
    return Marked(base_->List(prefix));
  }
  absl::StatusOr<std::vector<std::string>> ListAll(absl::Span<const absl::string_view> prefixes) override {
    return Marked(base_->ListAll(prefixes));
  }
  absl::StatusOr<std::vector<std::string>> ListFolders() override { return Marked(base_->ListFolders()); }
  absl::Status Delete(absl::string_view key) override { return Marked(base_->Delete(key)); }
  absl::Status DeleteAll(absl::Span<const std::string> keys) override {
    return Marked(base_->DeleteAll(keys));
  }
  bool DeletesTogether() const override { return base_->DeletesTogether(); }
  absl::Status DropEmptyFolder(absl::string_view folder) override {
    return Marked(base_->DropEmptyFolder(folder));
  }
  absl::StatusOr<std::vector<Unfinished>> ListUnfinished() override {
    return Marked(base_->ListUnfinished());
  }
  absl::Status DropUnfinished(const Unfinished& unfinished) override {
    return Marked(base_->DropUnfinished(unfinished));
  }
  std::string Describe() const override { return base_->Describe(); }

 private:
  const std::unique_ptr<port::BlobStore> base_;
};

}  // namespace

absl::Status StorageError(const absl::Status& status) {
  absl::Status marked = status;
  if (!marked.ok()) marked.SetPayload(kMark, absl::Cord());
  return marked;
}

bool IsStorageError(const absl::Status& status) { return status.GetPayload(kMark).has_value(); }

std::unique_ptr<port::BlobStore> MarkStorageErrors(std::unique_ptr<port::BlobStore> base) {
  return std::make_unique<MarkingStore>(std::move(base));
}

}  // namespace gtrain::ckpt
