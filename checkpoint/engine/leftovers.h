// Finds what dead writers left in a checkpoint directory, by the rules of plan/garbage.h. `age` is
// kAbandonedAge except in tests.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "checkpoint/plan/garbage.h"
#include "checkpoint/port/blob_store.h"

namespace gtrain::ckpt {

// Takes the attempts out of stored->folders that have no manifest and that a writer may still commit, and
// returns them. To be called between ListStored, whose lists it needs whole, and PlanRetention. Costs nothing
// but for attempts of lower epochs: a listing of each, and one of unfinished puts.
absl::StatusOr<std::vector<SaveId>> SpareInFlight(port::BlobStore* store, absl::Duration age,
                                                  StoredCheckpoints* stored);

// Puts that never happened and whose writers are gone; `stored` is as of ListStored, or empty where nothing
// is committed. Costs a listing, and one of the pins if there are any such puts.
absl::StatusOr<std::vector<port::BlobStore::Unfinished>> ListAbandonedPuts(port::BlobStore* store,
                                                                           absl::Duration age,
                                                                           const StoredCheckpoints& stored);

// Keys of leases of owners before `newest_owner` that nobody renews. Costs a listing, and a look at each
// lease of such an owner.
absl::StatusOr<std::vector<std::string>> ListAbandonedLeases(port::BlobStore* store, absl::Duration age,
                                                             uint64_t newest_owner);

}  // namespace gtrain::ckpt
