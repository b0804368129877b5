#include "checkpoint/engine/leftovers.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace gtrain::ckpt {
namespace {

using Unfinished = port::BlobStore::Unfinished;

// Returns for how long nothing of an attempt changed: of its folder and of puts into it that are under way.
absl::StatusOr<absl::Duration> AgeOf(port::BlobStore* store, const SaveId& id,
                                     const std::vector<Unfinished>& unfinished) {
  absl::StatusOr<absl::Duration> age = store->Unchanged(AttemptName(id));
  if (absl::IsNotFound(age.status())) age = absl::InfiniteDuration();  // deleted meanwhile
  GT_RETURN_IF_ERROR(age.status());
  const std::string inside = absl::StrCat(AttemptName(id), "/");
  for (const Unfinished& u : unfinished) {
    if (absl::StartsWith(u.key, inside)) *age = std::min(*age, u.age);
  }
  return age;
}

}  // namespace

absl::StatusOr<std::vector<SaveId>> SpareInFlight(port::BlobStore* store, absl::Duration age,
                                                  StoredCheckpoints* stored) {
  std::set<SaveId> decided(stored->pinned.begin(),
                           stored->pinned.end());  // of which nothing is to be found out
  decided.insert(stored->aborted.begin(), stored->aborted.end());
  decided.insert(stored->damaged.begin(), stored->damaged.end());
  for (const Retained& c : stored->committed) decided.insert(c.id);
  std::optional<std::vector<Unfinished>> unfinished;
  std::vector<SaveId> spared, others;
  for (const SaveId& id : stored->folders) {
    Abandoned abandoned = decided.contains(id) ? Abandoned::kYes : IsAbandoned(id, stored->committed);
    if (abandoned == Abandoned::kWhenOld) {
      if (!unfinished) {
        GT_ASSIGN_OR_RETURN(unfinished, store->ListUnfinished());
      }
      GT_ASSIGN_OR_RETURN(const absl::Duration unchanged, AgeOf(store, id, *unfinished));
      abandoned = unchanged >= age ? Abandoned::kYes : Abandoned::kNo;
    }
    (abandoned == Abandoned::kYes ? others : spared).push_back(id);
  }
  stored->folders = std::move(others);
  return spared;
}

absl::StatusOr<std::vector<Unfinished>> ListAbandonedPuts(port::BlobStore* store, absl::Duration age,
                                                          const StoredCheckpoints& stored) {
  GT_ASSIGN_OR_RETURN(std::vector<Unfinished> puts, store->ListUnfinished());
  if (puts.empty()) return puts;
  // A copy pins before it puts: pins that are listed after the puts are all that matter.
  StoredCheckpoints now = stored;
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> pins, store->List(kPinPrefix));
  for (const std::string& pin : pins) {
    if (const auto attempt = ParsePinKey(pin)) now.pinned.push_back(*attempt);
  }
  std::erase_if(puts, [&](const Unfinished& put) {
    const Abandoned abandoned = IsPutAbandoned(put.key, now);
    return abandoned == Abandoned::kNo || (abandoned == Abandoned::kWhenOld && put.age < age);
  });
  return puts;
}

absl::StatusOr<std::vector<std::string>> ListAbandonedLeases(port::BlobStore* store, absl::Duration age,
                                                             uint64_t newest_owner) {
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> keys, store->List(kLeasePrefix));
  std::vector<std::string> abandoned;
  for (const std::string& key : keys) {
    const std::optional<LeaseName> lease = ParseLeaseKey(key);
    if (!lease || IsLeaseAbandoned(*lease, newest_owner) == Abandoned::kNo) continue;
    const absl::StatusOr<absl::Duration> unchanged = store->Unchanged(key);
    if (absl::IsNotFound(unchanged.status())) continue;  // renewed or taken away meanwhile
    GT_RETURN_IF_ERROR(unchanged.status());
    if (*unchanged >= age) abandoned.push_back(key);
  }
  return abandoned;
}

}  // namespace gtrain::ckpt
