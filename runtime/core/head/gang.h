// Gang scheduling: from jobs and nodes to a placement, all or nothing. PURE.
#pragma once
#include <string>
#include <vector>

#include "job/plan/place.h"
#include "job/spec/job_spec.h"
#include "runtime/core/values/messages.h"
#include "runtime/core/values/records.h"

namespace gtrain::core {

// The demand of the spec, in the terms of the placement. `may_oversubscribe`: this cluster lets
// `oversubscribe: auto` mean yes (the local one).
plan::Demand DemandOf(const spec::JobSpec& spec, bool may_oversubscribe);

// A node with everything free.
plan::NodeView ViewOf(const NodeRecord& node);

// Subtracts the resources of a rank of a granted generation from the view of its node.
void Occupy(plan::NodeView& view, const RankPlace& rank, const plan::Demand& demand);

// One thing that keeps a job waiting: shown by ClientWhy.
struct Blocker {
  std::string node;                  // hostname; empty for the whole cluster
  std::string constraint;            // "cpus: 0 of 4 free"
  int room = 0;                      // ranks this node could take now
  std::vector<std::string> held_by;  // job ids
  std::string unblocked_by;
  bool operator==(const Blocker&) const = default;
};

// The most nodes that are listed; the others are counted.
inline constexpr size_t kBlockersMax = 32;
// Those of now.verdicts that keep the job waiting: of a job that names hosts which do not take what is to go
// there, only theirs.
std::vector<size_t> VerdictsThatMatter(const plan::Placement& now);
// `holders(node)` = jobs that hold something there; asked for the first kBlockersMax verdicts that matter.
std::vector<Blocker> Explain(const plan::Placement& now, const plan::Placement& when_empty,
                             const std::map<NodeId, std::vector<std::string>>& holders);

std::vector<RankPlace> ToRankPlaces(const plan::Placement& placement);

// The process of a rank of this generation: one that went on in it, or the one that was started with it.
ProcessId ProcessOf(const GenerationGrant& grant, int rank);

}  // namespace gtrain::core
