// The places where this process saves. Two Checkpointers with the same attempts would write each other's
// files, and a save that the first one has under way may not be in the storage yet. Thread-safe; never
// blocks.
#pragma once
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "checkpoint/format/names.h"

namespace gtrain::ckpt {

// The place of the attempts of one generation; `location` is absolute.
std::string PlaceOf(const std::string& location, const SaveId& id);
// The first attempt of this opening: at least `attempt`, and one that no earlier opening here has used.
// FailedPrecondition: another Checkpointer of this process saves there now.
absl::StatusOr<uint64_t> TakePlace(const std::string& place, uint64_t attempt);
// The next opening begins with `next_attempt`.
void LeavePlace(const std::string& place, uint64_t next_attempt);

}  // namespace gtrain::ckpt
