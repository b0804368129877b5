// What dead writers left, told from what a writer may still need. A writer says nothing when it dies, so age
// counts, too: for how long the storage itself saw no change.
#pragma once
#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "checkpoint/plan/retention.h"

namespace gtrain::ckpt {

// A writer that lives changes something of its attempt sooner.
inline constexpr absl::Duration kAbandonedAge = absl::Hours(24);

enum class Abandoned {
  kNo,       // its writer may commit it
  kYes,      // it can never be committed
  kWhenOld,  // nobody should want it, but its writer may be alive: once nothing of it changed for
             // kAbandonedAge
};

// Of an attempt without a manifest. An attempt is overtaken by a newer commit of its own epoch. One of a
// lower epoch than a commit's may be a copy of `gtrain ckpt cp` that is under way, or a save of a job that
// lost the directory and does not know it.
Abandoned IsAbandoned(const SaveId& attempt, const std::vector<Retained>& committed);

// Of a put of `key` that has not happened. What belongs to no attempt (claims, pins, probes, leases) is small
// and done in seconds. A put of a pinned attempt is a copy that is under way.
Abandoned IsPutAbandoned(absl::string_view key, const StoredCheckpoints& stored);

// Of a lease that stands there. Only that of the newest owner is ever looked at. An earlier owner that lives
// and has not found out yet renews its own, so that it is never old.
Abandoned IsLeaseAbandoned(const LeaseName& lease, uint64_t newest_owner);

}  // namespace gtrain::ckpt
