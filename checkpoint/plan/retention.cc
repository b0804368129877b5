#include "checkpoint/plan/retention.h"

#include <algorithm>
#include <set>
#include <utility>

namespace gtrain::ckpt {

RetentionPlan PlanRetention(const StoredCheckpoints& stored, int keep) {
  std::vector<Retained> newest_first = stored.committed;
  std::sort(newest_first.begin(), newest_first.end(),
            [](const Retained& a, const Retained& b) { return a.id > b.id; });
  std::set<SaveId> kept = {stored.just_committed};
  bool finite_kept = false;
  for (size_t i = 0; i < newest_first.size(); ++i) {
    const bool among_newest = i < static_cast<size_t>(std::max(keep, 1));
    const bool last_finite = newest_first[i].finite && !finite_kept;
    if (among_newest || last_finite) kept.insert(newest_first[i].id);
    finite_kept |= newest_first[i].finite;
  }
  const SaveId oldest_kept = *kept.begin();
  kept.insert(stored.pinned.begin(), stored.pinned.end());
  if (stored.verified) kept.insert(*stored.verified);
  const auto life = [](const SaveId& id) { return std::pair(id.epoch, id.timeline); };
  const auto passed_over = [&](const SaveId& id) {
    return stored.resumed && id > *stored.resumed && life(id) < life(stored.just_committed);
  };
  for (const Retained& r : stored.committed) {
    if (passed_over(r.id)) kept.insert(r.id);
  }
  RetentionPlan plan;
  for (const Retained& r : stored.committed) {
    if (!kept.contains(r.id)) plan.manifests.push_back(r.id);
  }
  for (const SaveId& id : stored.aborted) {
    if (id < oldest_kept) plan.manifests.push_back(id);
  }
  for (const SaveId& id : stored.damaged) {
    if (id < oldest_kept && !passed_over(id)) {
      plan.manifests.push_back(id);
    } else {
      kept.insert(id);
    }
  }
  for (const SaveId& id : stored.folders) {
    if (!kept.contains(id) && id < stored.just_committed) plan.folders.push_back(id);
  }
  std::sort(plan.manifests.begin(), plan.manifests.end());
  std::sort(plan.folders.begin(), plan.folders.end());
  return plan;
}

}  // namespace gtrain::ckpt
