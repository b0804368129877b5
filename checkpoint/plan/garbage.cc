#include "checkpoint/plan/garbage.h"

#include <algorithm>
#include <optional>

namespace gtrain::ckpt {

Abandoned IsAbandoned(const SaveId& attempt, const std::vector<Retained>& committed) {
  Abandoned answer = Abandoned::kNo;
  for (const Retained& c : committed) {
    if (c.id.epoch == attempt.epoch && c.id > attempt) return Abandoned::kYes;
    if (c.id.epoch > attempt.epoch) answer = Abandoned::kWhenOld;
  }
  return answer;
}

Abandoned IsPutAbandoned(absl::string_view key, const StoredCheckpoints& stored) {
  const std::optional<SaveId> manifest = ParseManifestKey(key);
  const std::optional<SaveId> attempt = manifest ? manifest : ParseAttemptName(key.substr(0, key.find('/')));
  if (!attempt) return Abandoned::kWhenOld;
  const bool pinned = std::find(stored.pinned.begin(), stored.pinned.end(), *attempt) != stored.pinned.end();
  return pinned ? Abandoned::kWhenOld : IsAbandoned(*attempt, stored.committed);
}

Abandoned IsLeaseAbandoned(const LeaseName& lease, uint64_t newest_owner) {
  return lease.epoch < newest_owner ? Abandoned::kWhenOld : Abandoned::kNo;
}

}  // namespace gtrain::ckpt
