// Port: durable key-value records of the head. Adapters: runtime/store (RocksDB, memory).
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace gtrain::port {

struct Write {
  std::string key;
  std::optional<std::string> value;  // nullopt deletes
  bool operator==(const Write&) const = default;
};

enum class SpaceLevel {
  kPlenty,
  kLow,   // take no new jobs
  kFull,  // Commit is refused before anything is written
};

struct StoreSpace {
  SpaceLevel level = SpaceLevel::kPlenty;
  uint64_t free_bytes = 0;
  uint64_t total_bytes = 0;
  std::string text;  // one sentence for people unless there is plenty
};

// Thread-compatible; Commit blocks on the disk, so only the head's disk thread calls it.
class MetaStore {
 public:
  virtual ~MetaStore() = default;

  // Applies all writes atomically and returns when they survive a power cut.
  // ResourceExhausted: the disk is full and nothing was written; the same again is in order once there is
  // room (fault H3). Any other error leaves the outcome unknown. The caller must stop (never retry), restart
  // and reload (H4).
  virtual absl::Status Commit(const std::vector<Write>& writes) = 0;

  // Each record in key order, one at a time: there may be more of them than fit into memory beside what they
  // mean. DataLoss names the first record whose checksum or version is wrong; those before it were read.
  using Reader = absl::FunctionRef<void(absl::string_view key, absl::string_view value)>;
  virtual absl::Status Read(Reader each) = 0;

  // All of them at once. For tests.
  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> LoadAll() {
    std::vector<std::pair<std::string, std::string>> all;
    absl::Status read = Read([&](absl::string_view key, absl::string_view value) {
      all.emplace_back(std::string(key), std::string(value));
    });
    if (!read.ok()) return read;
    return all;
  }

  // Room on the store's disk.
  virtual StoreSpace Space() { return {}; }

  // Copies the records, as of some moment during the call, into directory `dir` on this machine and verifies
  // the copy. May run beside Commit and is slow.
  virtual absl::Status Backup(const std::string& dir) {
    return absl::UnimplementedError("this store makes no backups: " + dir);
  }
};

}  // namespace gtrain::port
