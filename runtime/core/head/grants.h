// Grants begins a new generation of a job. PURE. Private to runtime/core/head.
//
// A generation is granted by writing it into the JobRecord; StartGeneration leaves after that is durable.
// HeadState owns it; only the loop's thread uses it; it never blocks and has no state of its own. A grant
// grows with the ranks and nodes of the job and goes to each node.
#pragma once
#include <vector>

#include "job/plan/place.h"
#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_model.h"

namespace gtrain::core {

class Copies;
class Directories;
class Faults;
class JobLife;
class Placer;

class Grants {
 public:
  Grants(HeadContext& context, HeadModel& model, JobLife& life, Faults& faults, Directories& directories,
         Copies& copies, const Placer& placer);

  // `saves`: it is a SurvivorSave.
  void Grant(Job& job, const plan::Placement& placement, Instant now, bool saves = false);
  // Sends it again to nodes that may not have it.
  void SendGrant(const Job& job, const std::vector<NodeId>& nodes);
  // Ends processes that wait for another generation, but those on the nodes `but`.
  void LetKeptGo(Job& job, const std::vector<NodeId>& but);
  // Clears what is known of a generation only while it lives.
  void ResetLive(Job& job, Instant now);

 private:
  int PickPort(const Job& job, const NodeId& node);

  HeadContext& context_;
  HeadModel& model_;
  const HeadConfig& config_;
  JobLife& life_;
  Faults& faults_;
  Directories& directories_;
  Copies& copies_;
  const Placer& placer_;
};

}  // namespace gtrain::core
