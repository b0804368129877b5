// Where checkpoints lie: named immutable blobs. The commit protocol needs one thing of it: PutIfAbsent is
// atomic and durable, so of two writers of one key exactly one wins and a key that exists is whole.
//
// Keys are relative paths of [A-Za-z0-9._-] parts without empty, "." or ".." parts; anything else is
// InvalidArgument. NotFound, AlreadyExists and OutOfRange say what the store holds; every other error says
// that the storage could not be asked (disk full, I/O error, refused, unreachable), and nothing about the
// key.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace gtrain::port {

// Thread-safe. Calls block for as long as the storage takes. tests/ and checkpoint/store hold one conformance
// suite that every implementation passes.
class BlobStore {
 public:
  // The rest of a put that a dead writer began and never finished.
  struct Unfinished {
    std::string key;     // that it was meant for
    std::string handle;  // for DropUnfinished
    // Since its last change (in an object store: since the upload began), by the storage's own clock. Zero
    // where the storage does not say.
    absl::Duration age;
  };
  // Returns the bytes of a blob from `offset` on, as many as lie together, never none. The store asks in
  // ascending order without gaps, from one thread at a time. It may take the beginning of a piece and ask for
  // the rest of it again. A piece stays where it is until the next call. An error ends the put with that
  // error.
  using Source = absl::FunctionRef<absl::StatusOr<absl::string_view>(uint64_t offset)>;

  virtual ~BlobStore() = default;

  // Creates `key` with the concatenation of `parts`: afterwards it survives a power cut. AlreadyExists leaves
  // the other's bytes untouched. After any other error the key may exist or not: Get tells.
  virtual absl::Status PutIfAbsent(absl::string_view key, absl::Span<const absl::string_view> parts) = 0;
  absl::Status PutIfAbsent(absl::string_view key, absl::string_view data) {
    return PutIfAbsent(key, absl::Span<const absl::string_view>(&data, 1));
  }
  // PutIfAbsent of `bytes` bytes that need not be in memory together. It takes the memory that `source`
  // holds, and in an object store parts of an upload: 256 MiB together, or a single larger one. This default
  // holds the whole blob: it is for stores in memory and for decorators of tests.
  virtual absl::Status PutStream(absl::string_view key, uint64_t bytes, Source source);
  // The longest blob. A longer put is InvalidArgument before anything is sent; a program that knows how much
  // it will put asks when it starts.
  virtual uint64_t BytesMax() const { return uint64_t{1} << 62; }
  // Whether the storage itself compared a checksum of what arrived with what was sent, for every put that it
  // acknowledges. False: only reading back tells. Ask after a put: the first one may settle it.
  virtual bool ChecksEveryPut() const { return false; }
  // The whole blob; OutOfRange when it is larger than `bytes_max`.
  virtual absl::StatusOr<std::string> Get(absl::string_view key, size_t bytes_max) = 0;
  // Exactly out.size() bytes from `offset`; OutOfRange when the blob ends before.
  virtual absl::Status Read(absl::string_view key, uint64_t offset, absl::Span<char> out) = 0;
  // The size that one Read of much data should have: smaller reads cost more calls, larger ones leave the
  // processor's cache.
  virtual uint64_t ReadSize() const { return 256 << 10; }
  virtual absl::StatusOr<uint64_t> Size(absl::string_view key) = 0;
  // Keys that start with `prefix`, sorted; only whole blobs. An absent folder is an empty list.
  virtual absl::StatusOr<std::vector<std::string>> List(absl::string_view prefix) = 0;
  // Lists several prefixes, ascending, none the beginning of another. It costs as many requests as List for
  // each, but where requests take time, they are sent at once.
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
  // For how long `name`, a key or a folder of ListFolders with all that it holds, has not changed, by the
  // storage's own clock, so that wrong clocks of machines do not matter. Never negative; NotFound when it is
  // absent. Costs a listing of the folder. Zero where the storage does not say: everything looks new then.
  virtual absl::StatusOr<absl::Duration> Unchanged(absl::string_view name) {
    (void)name;
    return absl::ZeroDuration();
  }
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

// Gives `take` the bytes [from, to) of `source` in order, in the pieces in which it has them.
absl::Status TakeFrom(BlobStore::Source source, uint64_t from, uint64_t to,
                      absl::FunctionRef<absl::Status(absl::string_view)> take);

}  // namespace gtrain::port
