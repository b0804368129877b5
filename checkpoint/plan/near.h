// Which copies of shards a near tier keeps (checkpoint/port/near_tier.h): of each job the newest checkpoint
// that is committed and the save that is under way, below a cap that all jobs of the machine share.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "checkpoint/format/names.h"

namespace gtrain::ckpt {

struct NearCopy {
  std::string job;
  SaveId attempt;
  std::string file;
  uint64_t bytes = 0;  // as many as it will have, while it is being written
  bool whole = true;   // false: it is being written
  absl::Duration age;  // since it came
};

struct NearPlan {
  std::vector<size_t> drop;  // indices into what is held
  bool fits = false;         // after that
  uint64_t bytes = 0;        // held after that, without the new one
};

// Another job's copies may go for room when none of that job's came for so long.
inline constexpr absl::Duration kNearIdle = absl::Hours(1);

// Plans which copies to drop for `coming`, which is about to be written; `committed` is the newest checkpoint
// of its job that its writer knows to be committed. Older attempts are dropped, and other copies of the same
// file that are neither: they are of attempts that were never committed. Attempts newer than `coming` stay.
// When there is still no room, copies of other jobs are dropped that are idle, the longest idle job first.
// Copies that are being written are never dropped.
NearPlan PlanNear(const std::vector<NearCopy>& held, const NearCopy& coming,
                  const std::optional<SaveId>& committed, uint64_t bytes_max);

// Whether `file` may be the name of a copy: that of a shard, of its index, or of the order of rank 0.
bool IsNearFile(absl::string_view file);

}  // namespace gtrain::ckpt
