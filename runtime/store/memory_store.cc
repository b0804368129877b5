#include "runtime/store/memory_store.h"

#include "base/status_macros.h"
#include "runtime/store/sealed_value.h"

namespace gtrain::store {

absl::Status MemoryStore::Commit(const std::vector<port::Write>& writes) {
  if (!broken_.ok()) return broken_;
  for (const port::Write& write : writes) {
    if (write.value) {
      (*disk_)[write.key] = SealValue(write.key, *write.value);
    } else {
      disk_->erase(write.key);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::pair<std::string, std::string>>> MemoryStore::LoadAll() {
  std::vector<std::pair<std::string, std::string>> all;
  for (const auto& [key, sealed] : *disk_) {
    GT_ASSIGN_OR_RETURN(std::string value, OpenValue(key, sealed));
    all.emplace_back(key, std::move(value));
  }
  return all;
}

}  // namespace gtrain::store
