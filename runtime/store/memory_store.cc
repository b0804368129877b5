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

absl::Status MemoryStore::Read(Reader each) {
  for (const auto& [key, sealed] : *disk_) {
    GT_ASSIGN_OR_RETURN(const absl::string_view value, OpenValue(key, sealed));
    each(key, value);
  }
  return absl::OkStatus();
}

}  // namespace gtrain::store
