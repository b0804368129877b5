// Scheduler decides which waiting job starts next. PURE. Private to runtime/core/head.
//
// HeadState owns it; only the loop's thread uses it, and it never blocks. A pass costs a placement for each
// waiting job; in a cluster of 64 nodes and more it makes at most one in 100 ms.
#pragma once
#include <optional>
#include <vector>

#include "job/plan/place.h"
#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_model.h"

namespace gtrain::core {

class Directories;
class Grants;
class JobLife;
class JobTimers;
class Placer;
class Recovery;
class Sizing;
class SurvivorSave;

class Scheduler {
 public:
  Scheduler(HeadContext& context, HeadModel& model, Placer& placer, Grants& grants, JobLife& life,
            JobTimers& timers, Directories& directories, Sizing& sizing, Recovery& recovery,
            SurvivorSave& save);

  bool owes_pass() const { return model_.schedule || !model_.fresh.empty(); }
  void Schedule(Instant now);
  // The moment in which the pass that is held back may be made.
  std::optional<Instant> NextDeadline() const;

 private:
  bool TryPlace(Job& job, Instant now);
  void Await(Job& job, const NodeId& node, const char* why);
  void NotPlaced(Job& job, const plan::Placement& placement, Instant now);
  void ExplainBlockers(Job& job, const plan::Placement& placement, const plan::Placement& empty);

  HeadModel& model_;
  const HeadConfig& config_;
  Placer& placer_;
  Grants& grants_;
  JobLife& life_;
  JobTimers& timers_;
  Directories& directories_;
  Sizing& sizing_;
  Recovery& recovery_;
  SurvivorSave& save_;

  std::optional<Instant> next_pass_;  // not before then over all jobs
};

}  // namespace gtrain::core
