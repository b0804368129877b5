// MetaStore in memory, for tests and the simulator: same sealing and same refusals, nothing durable.
#pragma once
#include <map>
#include <memory>
#include <string>

#include "runtime/port/meta_store.h"

namespace gtrain::store {

// The part of a memory store that survives a "restart": sealed values by key.
using MemoryDisk = std::map<std::string, std::string>;

class MemoryStore final : public port::MetaStore {
 public:
  explicit MemoryStore(std::shared_ptr<MemoryDisk> disk = std::make_shared<MemoryDisk>())
      : disk_(std::move(disk)) {}

  absl::Status Commit(const std::vector<port::Write>& writes) override;
  absl::Status Read(Reader each) override;

  // The next commits fail with `error`, for good, as a real disk does (fault H4).
  void Break(absl::Status error) { broken_ = std::move(error); }

 private:
  std::shared_ptr<MemoryDisk> disk_;
  absl::Status broken_;
};

}  // namespace gtrain::store
