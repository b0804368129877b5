#include "checkpoint/store/probe.h"

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace gtrain::ckpt {

absl::Status ProveExclusive(port::BlobStore* store, absl::string_view key) {
  GT_RETURN_IF_ERROR(store->PutIfAbsent(key, key));
  const absl::Status second = store->PutIfAbsent(key, "second");
  if (absl::IsAlreadyExists(second)) return absl::OkStatus();
  if (!second.ok()) return second;
  return absl::FailedPreconditionError(
      absl::StrCat(store->Describe(),
                   " lets a second writer replace what a first one wrote (an object store: it ignores "
                   "If-None-Match): checkpoints would not be safe there. Use another store or a directory"));
}

}  // namespace gtrain::ckpt
