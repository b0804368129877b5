// Tells what dead writers left from what a writer may still need. A writer says nothing when it dies, so age
// counts, too: for how long the storage itself saw no change.
#pragma once
#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "checkpoint/plan/retention.h"

namespace gtrain::ckpt {

// A living writer changes something of its attempt sooner.
inline constexpr absl::Duration kAbandonedAge = absl::Hours(24);

enum class Abandoned {
  kNo,       // its writer may commit it
  kYes,      // it can never be committed
  kWhenOld,  // nobody should want it, but its writer may be alive: once nothing of it changed for
             // kAbandonedAge
};

// Judges an attempt without a manifest. It is overtaken by a newer commit of its own epoch. An attempt of a
// lower epoch than a commit's may be a copy of `gtrain ckpt cp` that is under way, or a save of a job that
// lost the directory and does not know it.
Abandoned IsAbandoned(const SaveId& attempt, const std::vector<Retained>& committed);

// Judges a put of `key` that was not finished. Files that belong to no attempt (claims, pins, probes, leases)
// are small and done in seconds. A put of a pinned attempt is a copy that is under way.
Abandoned IsPutAbandoned(absl::string_view key, const StoredCheckpoints& stored);

// Judges a lease. Only that of the newest owner is ever looked at. An earlier owner that lives and does not
// know yet that it lost the directory renews its own, so that it is never old.
Abandoned IsLeaseAbandoned(const LeaseName& lease, uint64_t newest_owner);

}  // namespace gtrain::ckpt
