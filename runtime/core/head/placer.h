// Placer computes where a job could run now. PURE. Private to runtime/core/head.
//
// HeadState owns it; only the loop's thread uses it, and it never blocks. A placement is O(nodes + jobs +
// ranks).
#pragma once
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "job/plan/by_topology.h"
#include "job/plan/place.h"
#include "runtime/core/head/head_model.h"
#include "runtime/core/head/plans.h"
#include "topology/topology.h"

namespace gtrain::core {

// The sentence of a view ends so where processes of a generation that is over hold the node.
inline constexpr char kMayStillRun[] = " may still run there";

class Placer {
 public:
  Placer(HeadModel& model, std::shared_ptr<const topology::Topology> topology)
      : model_(model), topology_(std::move(topology)) {
    if (topology_ != nullptr) known_ = std::make_shared<const plan::KnownTopology>(*topology_);
  }

  // Brings the views up to date. It must come before PlacementFor and PlacementAlone.
  void CheckViews();
  // `on_leaving`: also on machines that are about to leave.
  plan::Placement PlacementFor(const Job& job, bool on_leaving = false) const;
  plan::Placement PlacementAlone(const Job& job) const;  // as if no other job held anything
  // How `packed`, which PlacementFor(job) found, becomes what the topology of the cluster wants. To make that
  // plan takes longer than a placement, so it is for what is about to be granted. Null: `packed` is the plan.
  std::shared_ptr<PlacementPlan> PlanOf(const Job& job, plan::Placement packed) const;
  // Whether a plan gives away only what is still there. It must come after CheckViews.
  bool StillHolds(const Job& job, const PlacementPlan& plan) const;
  // NodePlace::fabric_order of the nodes of a grant. O(ranks), and what Known takes.
  void SetFabricOrder(GenerationGrant& grant) const;
  // Whether `job` is still ending an older generation than its newest grant there: how much it takes of the
  // node is not known then, and nobody else is given any of it.
  static bool EndsOlderOn(const Job& job, const NodeId& node);

 private:
  // The key has all that views_ was made of and is compared before each use, so that no change is forgotten.
  struct ViewsKey {
    struct OfNode {
      uint64_t revision = 0;
      std::string unusable;
      bool operator==(const OfNode&) const = default;
    };
    struct OfJob {
      uint64_t number = 0;
      Generation generation;
      bool holds = false;
      std::vector<NodeId> unreleased;
      bool operator==(const OfJob&) const = default;
    };
    std::vector<OfNode> nodes;
    std::vector<OfJob> jobs;
    bool operator==(const ViewsKey&) const = default;
  };

  struct Labelled {
    NodeId id;
    std::string hostname;
    std::map<std::string, std::string> labels;
    bool operator==(const Labelled&) const = default;
  };

  // What is known of the fabric now. O(nodes), and of a change what KnownTopology takes.
  const std::shared_ptr<const plan::KnownTopology>& Known() const;
  static bool TakesPart(const Job& job);
  ViewsKey CurrentViewsKey() const;
  static plan::Demand DemandNow(const Job& job);
  std::vector<plan::NodeView> ViewsWithout(const Job& wanting, bool on_leaving = false) const;

  HeadModel& model_;
  std::shared_ptr<const topology::Topology> topology_;  // null: none was given
  // Of topology_, or of what the labels of known_of_ say.
  mutable std::shared_ptr<const plan::KnownTopology> known_ = std::make_shared<const plan::KnownTopology>();
  mutable std::vector<Labelled> known_of_;
  ViewsKey views_key_;
  // What each node has left; as if no job held anything. Plans that are being made share them.
  PlacementPlan::Views views_ = std::make_shared<const std::vector<plan::NodeView>>(), empty_views_ = views_;
};

}  // namespace gtrain::core
