#include "checkpoint/store/faulty_store.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace gtrain::ckpt {

template <typename Result>
Result FaultyStore::Run(absl::string_view name, absl::string_view key, absl::FunctionRef<Result()> call) {
  uint64_t number = 0;
  std::string text = absl::StrCat(name, " ", key);
  {
    MutexLock lock(&mu_);
    number = calls_.size();
    calls_.push_back(text);
  }
  const Fault fault = plan_.fault ? plan_.fault(number, text) : Fault::kNone;
  const auto broken = [&] {
    return absl::Status(plan_.error.code(), absl::StrCat(plan_.error.message(), " at ", text));
  };
  if (fault == Fault::kBefore) return broken();
  Result result = call();
  if (fault == Fault::kAfter) return broken();
  return result;
}

std::vector<std::string> FaultyStore::calls() const {
  MutexLock lock(&mu_);
  return calls_;
}

absl::Status FaultyStore::PutIfAbsent(absl::string_view key, absl::Span<const absl::string_view> parts) {
  return Run<absl::Status>("PutIfAbsent", key, [&] { return base_->PutIfAbsent(key, parts); });
}

absl::Status FaultyStore::PutStream(absl::string_view key, uint64_t bytes, Source source) {
  return Run<absl::Status>("PutIfAbsent", key, [&] { return base_->PutStream(key, bytes, source); });
}

absl::StatusOr<std::string> FaultyStore::Get(absl::string_view key, size_t bytes_max) {
  return Run<absl::StatusOr<std::string>>("Get", key, [&] { return base_->Get(key, bytes_max); });
}

absl::Status FaultyStore::Read(absl::string_view key, uint64_t offset, absl::Span<char> out) {
  return Run<absl::Status>("Read", key, [&] { return base_->Read(key, offset, out); });
}

absl::StatusOr<uint64_t> FaultyStore::Size(absl::string_view key) {
  return Run<absl::StatusOr<uint64_t>>("Size", key, [&] { return base_->Size(key); });
}

absl::StatusOr<std::vector<std::string>> FaultyStore::List(absl::string_view prefix) {
  return Run<absl::StatusOr<std::vector<std::string>>>("List", prefix, [&] { return base_->List(prefix); });
}

absl::StatusOr<std::vector<std::string>> FaultyStore::ListAll(absl::Span<const absl::string_view> prefixes) {
  return Run<absl::StatusOr<std::vector<std::string>>>("ListAll", absl::StrJoin(prefixes, " "),
                                                       [&] { return base_->ListAll(prefixes); });
}

absl::StatusOr<std::vector<std::string>> FaultyStore::ListFolders() {
  return Run<absl::StatusOr<std::vector<std::string>>>("ListFolders", "",
                                                       [&] { return base_->ListFolders(); });
}

absl::StatusOr<absl::Duration> FaultyStore::Unchanged(absl::string_view name) {
  return Run<absl::StatusOr<absl::Duration>>("Unchanged", name, [&] { return base_->Unchanged(name); });
}

absl::Status FaultyStore::Delete(absl::string_view key) {
  return Run<absl::Status>("Delete", key, [&] { return base_->Delete(key); });
}

absl::Status FaultyStore::DropEmptyFolder(absl::string_view folder) {
  return Run<absl::Status>("DropEmptyFolder", folder, [&] { return base_->DropEmptyFolder(folder); });
}

absl::StatusOr<std::vector<port::BlobStore::Unfinished>> FaultyStore::ListUnfinished() {
  return Run<absl::StatusOr<std::vector<Unfinished>>>("ListUnfinished", "",
                                                      [&] { return base_->ListUnfinished(); });
}

absl::Status FaultyStore::DropUnfinished(const Unfinished& unfinished) {
  return Run<absl::Status>("DropUnfinished", unfinished.key,
                           [&] { return base_->DropUnfinished(unfinished); });
}

}  // namespace gtrain::ckpt
