// Where checkpoints lie: named immutable blobs. The commit protocol needs one thing of it: PutIfAbsent is
// atomic and durable, so of two writers of one key exactly one wins and a key that exists is whole.
//
// Keys are relative paths of [A-Za-z0-9._-] parts without empty, "." or ".." parts; anything else is
// InvalidArgument. NotFound, AlreadyExists and OutOfRange say what the store holds; every other error says that
// the storage could not be asked (disk full, I/O error, refused, unreachable), and nothing about the key.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace gtrain::port {

// Thread-safe. Calls block for as long as the storage takes. tests/ and checkpoint/store hold one conformance
// suite that every implementation passes.
class BlobStore {
 public:
  // What a writer that died left of a put that never happened.
  struct Unfinished {
    std::string key;     // that it was meant for
    std::string handle;  // for DropUnfinished
  };

  virtual ~BlobStore() = default;

  // Creates `key` with the concatenation of `parts`: afterwards it survives a power cut. AlreadyExists leaves
  // the other's bytes untouched. After any other error the key may exist or not: Get tells.
  virtual absl::Status PutIfAbsent(absl::string_view key, absl::Span<const absl::string_view> parts) = 0;
  absl::Status PutIfAbsent(absl::string_view key, absl::string_view data) {
    return PutIfAbsent(key, absl::Span<const absl::string_view>(&data, 1));
  }
  // The whole blob; OutOfRange when it is larger than `bytes_max`.
  virtual absl::StatusOr<std::string> Get(absl::string_view key, size_t bytes_max) = 0;
  // Exactly out.size() bytes from `offset`; OutOfRange when the blob ends before.
  virtual absl::Status Read(absl::string_view key, uint64_t offset, absl::Span<char> out) = 0;
  // What one Read of much data should ask for: less costs more calls, more leaves the processor's cache.
  virtual uint64_t ReadSize() const { return 256 << 10; }
  virtual absl::StatusOr<uint64_t> Size(absl::string_view key) = 0;
  // Keys that start with `prefix`, sorted; only whole blobs. An absent folder is an empty list.
  virtual absl::StatusOr<std::vector<std::string>> List(absl::string_view prefix) = 0;
  // The same for several, ascending, none the beginning of another: not with less, but where requests cost,
  // at once.
  virtual absl::StatusOr<std::vector<std::string>> ListAll(absl::Span<const absl::string_view> prefixes) {
    std::vector<std::string> keys;
    for (const absl::string_view prefix : prefixes) {
      absl::StatusOr<std::vector<std::string>> some = List(prefix);
      if (!some.ok()) return some;
      keys.insert(keys.end(), some->begin(), some->end());
    }
    return keys;
  }
  // First parts of the keys that contain a "/", sorted ("step-..." folders), without looking inside.
  virtual absl::StatusOr<std::vector<std::string>> ListFolders() = 0;
  // OK when there is none.
  virtual absl::Status Delete(absl::string_view key) = 0;
  // All of them, in any order; after an error some may be gone.
  virtual absl::Status DeleteAll(absl::Span<const std::string> keys) {
    for (const std::string& key : keys) {
      if (absl::Status deleted = Delete(key); !deleted.ok()) return deleted;
    }
    return absl::OkStatus();
  }
  // Whether few keys cost as much to delete as many: then what is small may wait until there is more of it.
  virtual bool DeletesTogether() const { return false; }
  // A folder that a writer made and died before its first blob. OK when it is absent, not empty, or no such
  // thing exists in this storage.
  virtual absl::Status DropEmptyFolder(absl::string_view folder) = 0;
  virtual absl::StatusOr<std::vector<Unfinished>> ListUnfinished() = 0;
  virtual absl::Status DropUnfinished(const Unfinished& unfinished) = 0;
  // For people: "/data/ckpt", "s3://bucket/prefix".
  virtual std::string Describe() const = 0;
};

// Whether every call may be made with `key`.
bool IsBlobKey(absl::string_view key);

}  // namespace gtrain::port
