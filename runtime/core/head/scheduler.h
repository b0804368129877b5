// Scheduler decides which waiting job starts next. PURE. Private to runtime/core/head.
//
// HeadState owns it; only the loop's thread uses it, and it never blocks. A pass costs a placement for each
// waiting job; in a cluster of 64 nodes and more it makes at most one in 100 ms. Where the ranks of a large
// job go on the fabric is planned beside the loop (plans.h), while what it would take stays free for others:
// a plan that comes back too late is made again, and the third time in the loop.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "job/plan/place.h"
#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_model.h"
#include "runtime/core/head/plans.h"

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
  // A plan that was made beside the loop: its job is looked at again at once.
  void OnPlanMade(const std::shared_ptr<PlanWork>& work);
  // The moment in which the pass that is held back may be made.
  std::optional<Instant> NextDeadline() const;

 private:
  bool TryPlace(Job& job, Instant now);
  bool GrantPlanned(Job& job, const plan::Placement& packed, Instant now);
  void Await(Job& job, const NodeId& node, const char* why);
  void NotPlaced(Job& job, const plan::Placement& placement, Instant now);
  void ExplainBlockers(Job& job, const plan::Placement& placement, const plan::Placement& empty);

  struct Beside {
    std::shared_ptr<const PlacementPlan> plan;  // that was asked for; null: none
    bool made = false;                          // it is back
    int stale = 0;                              // plans in a row that came back too late
  };

  HeadContext& context_;
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
  std::map<JobId, Beside> beside_;
  bool others_wait_ = false;  // behind the job that is tried
};

}  // namespace gtrain::core
