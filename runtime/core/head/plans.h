// Plans of large jobs are made beside the head's loop: the core puts all that a plan is made of into a value,
// any thread makes the plan, and what comes back is compared with what has changed meanwhile. PURE. Private
// to runtime/core/head.
//
// A plan of eight thousand ranks takes a millisecond (bench_placement) and longer ones in proportion, in
// which no heartbeat would be read. It ends by itself: what would take longer than some tenths of a second is
// packed. The value shares what it can with the placer: it costs a pointer, and of a job that holds machines
// a copy of the views.
#pragma once
#include <map>
#include <memory>
#include <vector>

#include "job/plan/by_topology.h"
#include "job/plan/place.h"
#include "runtime/core/values/effects.h"

namespace gtrain::core {

class PlacementPlan final : public PlanWork {
 public:
  using Views = std::shared_ptr<const std::vector<plan::NodeView>>;

  void Make() override { made_ = plan::ByTopology(*views, demand, packed, *known, axes, before, traffic); }
  const plan::Placement& made() const { return made_; }  // after Make
  // Whether every node of the plan is now as it was then, so that what it gives away is still there.
  // O(nodes).
  bool StillHolds(const std::vector<plan::NodeView>& now) const;

  // Constant from the moment in which the plan is asked for.
  JobId job;
  Views views;
  plan::Demand demand;
  plan::Placement packed;
  std::shared_ptr<const plan::KnownTopology> known;
  std::vector<spec::MeshAxis> axes;
  std::vector<plan::RankSlot> before;
  plan::Traffic traffic;

 private:
  plan::Placement made_;
};

}  // namespace gtrain::core
