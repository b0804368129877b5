// Faults: how a generation fails, and what the job does behind it. PURE. Private to runtime/core/head.
//
// Owned by HeadState; the loop's thread only; never blocks; it keeps nothing of its own.
#pragma once
#include <string>

#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_model.h"

namespace gtrain::core {

class JobLife;
class Leaves;
class Sizing;

class Faults {
 public:
  Faults(HeadContext& context, HeadModel& model, JobLife& life, Sizing& sizing, Leaves& leaves);

  FaultRecord FaultOf(const Job& job, const RankExit& exit) const;
  // Revoke at once; whether another generation follows is decided when no process of this one is left.
  void Fail(Job& job, FaultRecord fault, Instant now);
  // The ranks of a node fail together, as one infrastructure fault (fault N1).
  void RanksLost(Job& job, const Node& node, const std::string& why, Instant now);
  // A rank that cannot go on without another one says 75 at once, while that one still unwinds. Whoever ended
  // now would be ended by us, and its error lost. What says why, or the last exit, ends the wait.
  bool AwaitsCause(Job& job, const RankExit& exit, Instant now);
  void FailBy75(Job& job, Instant now);
  // All processes of the generation that failed are gone, and all exits are here.
  void DecideAfterFault(Job& job, Instant now);
  // Also after a restart of the head, which does not know any more how much of the time had passed.
  void WaitForStorage(Job& job, absl::Duration delay, Instant now);

 private:
  void Excuse(const Job& job, FaultRecord& fault, Instant now) const;
  void FindStorageFault(Job& job);
  void FindCauseOfExit75(Job& job);
  void ChargeUnlessEarned(Job& job);

  HeadContext& context_;
  HeadModel& model_;
  const HeadConfig& config_;
  JobLife& life_;
  Sizing& sizing_;
  Leaves& leaves_;
};

}  // namespace gtrain::core
