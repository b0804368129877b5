// Copies chooses the machines outside a job that keep copies of its checkpoints (docs/design/README.md,
// "Copies near by"). PURE. Private to runtime/core/head.
//
// HeadState owns it; only the loop's thread uses it; it never blocks and has no state of its own. Each
// generation costs O(jobs + nodes log nodes).
#pragma once
#include <set>
#include <vector>

#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_model.h"

namespace gtrain::core {

class Recovery;

class Copies {
 public:
  Copies(HeadContext& context, HeadModel& model, Recovery& recovery);

  std::vector<NodePlace> HoldersOutside(const Job& job, const std::vector<NodePlace>& of_job) const;
  void TellHolder(const Job& job, const NodeId& id);
  // Tells a node that said hello which copies count: it may have restarted or have missed that a job is over.
  void SettleCopies(const NodeId& node, const AgentHello& hello);

 private:
  std::vector<NodePlace> Candidates(const Job& job, const std::vector<NodePlace>& of_job,
                                    const std::set<NodeId>& before) const;

  HeadContext& context_;
  HeadModel& model_;
  const HeadConfig& config_;
  Recovery& recovery_;
};

}  // namespace gtrain::core
