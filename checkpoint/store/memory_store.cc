#include "checkpoint/store/memory_store.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"

namespace gtrain::ckpt {
namespace {

absl::Status CheckKey(absl::string_view key) {
  if (port::IsBlobKey(key)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("\"", key, "\" is not a key"));
}

absl::Status Absent(absl::string_view key) {
  return absl::NotFoundError(absl::StrCat(key, " does not exist"));
}

}  // namespace

absl::Status MemoryStore::PutIfAbsent(absl::string_view key, absl::Span<const absl::string_view> parts) {
  GT_RETURN_IF_ERROR(CheckKey(key));
  MutexLock lock(&mu_);
  if (!blobs_.emplace(key, Blob{absl::StrJoin(parts, ""), clock_}).second) {
    return absl::AlreadyExistsError(absl::StrCat(key, " exists"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> MemoryStore::Get(absl::string_view key, size_t bytes_max) {
  GT_RETURN_IF_ERROR(CheckKey(key));
  MutexLock lock(&mu_);
  const auto it = blobs_.find(key);
  if (it == blobs_.end()) return Absent(key);
  if (it->second.bytes.size() > bytes_max)
    return absl::OutOfRangeError(absl::StrCat(key, " is over the limit"));
  return it->second.bytes;
}

absl::Status MemoryStore::Read(absl::string_view key, uint64_t offset, absl::Span<char> out) {
  GT_RETURN_IF_ERROR(CheckKey(key));
  MutexLock lock(&mu_);
  const auto it = blobs_.find(key);
  if (it == blobs_.end()) return Absent(key);
  if (offset > it->second.bytes.size() || out.size() > it->second.bytes.size() - offset) {
    return absl::OutOfRangeError(absl::StrCat(key, " has only ", it->second.bytes.size(), " bytes"));
  }
  std::copy_n(it->second.bytes.begin() + static_cast<ptrdiff_t>(offset), out.size(), out.begin());
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> MemoryStore::Size(absl::string_view key) {
  GT_RETURN_IF_ERROR(CheckKey(key));
  MutexLock lock(&mu_);
  const auto it = blobs_.find(key);
  if (it == blobs_.end()) return Absent(key);
  return it->second.bytes.size();
}

absl::StatusOr<std::vector<std::string>> MemoryStore::List(absl::string_view prefix) {
  MutexLock lock(&mu_);
  std::vector<std::string> keys;
  for (auto it = blobs_.lower_bound(prefix); it != blobs_.end() && absl::StartsWith(it->first, prefix);
       ++it) {
    keys.push_back(it->first);
  }
  return keys;
}

absl::StatusOr<std::vector<std::string>> MemoryStore::ListFolders() {
  MutexLock lock(&mu_);
  std::vector<std::string> folders;
  for (const auto& [key, data] : blobs_) {
    const size_t slash = key.find('/');
    if (slash == std::string::npos) continue;
    if (folders.empty() || folders.back() != key.substr(0, slash)) folders.push_back(key.substr(0, slash));
  }
  std::sort(folders.begin(), folders.end());
  folders.erase(std::unique(folders.begin(), folders.end()), folders.end());
  return folders;
}

absl::Status MemoryStore::Delete(absl::string_view key) {
  GT_RETURN_IF_ERROR(CheckKey(key));
  MutexLock lock(&mu_);
  if (const auto it = blobs_.find(key); it != blobs_.end()) blobs_.erase(it);
  return absl::OkStatus();
}

absl::StatusOr<absl::Duration> MemoryStore::Unchanged(absl::string_view name) {
  GT_RETURN_IF_ERROR(CheckKey(name));
  MutexLock lock(&mu_);
  absl::Duration youngest = absl::InfiniteDuration();
  for (const auto& [key, blob] : blobs_) {
    const bool inside = key == name || (absl::StartsWith(key, name) && key[name.size()] == '/');
    if (inside) youngest = std::min(youngest, clock_ - blob.put);
  }
  if (youngest == absl::InfiniteDuration()) return Absent(name);
  return youngest;
}

void MemoryStore::Age(absl::Duration by) {
  MutexLock lock(&mu_);
  clock_ += by;
}

}  // namespace gtrain::ckpt
