// Whether a store is one that commits can rest on.
#pragma once
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "checkpoint/port/blob_store.h"

namespace gtrain::ckpt {

// Creates `key` and proves that a second creation is refused (fault S5). FailedPrecondition: it is not;
// others: the store's own words (fault S10). The key stays.
absl::Status ProveExclusive(port::BlobStore* store, absl::string_view key);

}  // namespace gtrain::ckpt
