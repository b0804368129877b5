// Placer: where a job could run now. PURE. Private to runtime/core/head.
//
// Owned by HeadState; the loop's thread only; never blocks. A placement is O(nodes + jobs + ranks).
#pragma once
#include <string>
#include <vector>

#include "job/plan/place.h"
#include "runtime/core/head/head_model.h"

namespace gtrain::core {

// How a view's sentence ends where processes of a generation that is over hold the node.
inline constexpr char kMayStillRun[] = " may still run there";

class Placer {
 public:
  explicit Placer(HeadModel& model) : model_(model) {}

  // Makes the views true again: before PlacementFor and PlacementAlone.
  void CheckViews();
  plan::Placement PlacementFor(const Job& job) const;
  plan::Placement PlacementAlone(const Job& job) const;  // as if no other job held anything

 private:
  // What views_ was made of. Compared before it is used, so that no change anywhere can be forgotten.
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

  static bool TakesPart(const Job& job);
  ViewsKey CurrentViewsKey() const;
  std::vector<plan::NodeView> ViewsWithout(const Job& wanting) const;

  HeadModel& model_;
  ViewsKey views_key_;
  std::vector<plan::NodeView> views_, empty_views_;  // what each node has left; as if no job held anything
};

}  // namespace gtrain::core
