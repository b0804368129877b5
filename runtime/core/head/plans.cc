#include "runtime/core/head/plans.h"

#include "absl/container/flat_hash_map.h"

namespace gtrain::core {

bool PlacementPlan::StillHolds(const std::vector<plan::NodeView>& now) const {
  absl::flat_hash_map<NodeId, const plan::NodeView*> then, there;
  for (const plan::NodeView& view : *views) then[view.id] = &view;
  for (const plan::NodeView& view : now) there[view.id] = &view;
  for (const NodeId& node : made_.nodes) {
    const auto before = then.find(node), after = there.find(node);
    if (before == then.end() || after == there.end() || !(*before->second == *after->second)) return false;
  }
  return true;
}

}  // namespace gtrain::core
