// Port: durable key-value records of the head. Adapters: runtime/store (RocksDB, memory).
#pragma once
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace gtrain::port {

struct Write {
  std::string key;
  std::optional<std::string> value;  // nullopt deletes
  bool operator==(const Write&) const = default;
};

// Thread-compatible; Commit blocks on the disk, so only the head's disk thread calls it.
class MetaStore {
 public:
  virtual ~MetaStore() = default;

  // Applies all writes atomically and returns when they survive a power cut.
  // Any error leaves the outcome unknown: the caller must stop (never retry), restart and reload (fault H4).
  virtual absl::Status Commit(const std::vector<Write>& writes) = 0;

  // All records in key order. DataLoss names the first record whose checksum or version is wrong.
  virtual absl::StatusOr<std::vector<std::pair<std::string, std::string>>> LoadAll() = 0;
};

}  // namespace gtrain::port
