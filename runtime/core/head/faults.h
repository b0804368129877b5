// Faults ends a generation that failed and decides whether the job has another one. PURE. Private to
// runtime/core/head.
//
// HeadState owns it; only the loop's thread uses it; it never blocks and has no state of its own.
#pragma once
#include <string>

#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_model.h"

namespace gtrain::core {

class JobLife;
class Leaves;
class Newcomers;
class Sizing;

class Faults {
 public:
  Faults(HeadContext& context, HeadModel& model, JobLife& life, Sizing& sizing, Leaves& leaves,
         Newcomers& newcomers);

  FaultRecord FaultOf(const Job& job, const RankExit& exit) const;
  // Revokes the generation at once. Whether another one follows is decided when no process of it is left.
  void Fail(Job& job, FaultRecord fault, Instant now);
  // The ranks of a node fail together, as one infrastructure fault (fault N1).
  void RanksLost(Job& job, const Node& node, const std::string& why, Instant now);
  // True when the exit gives no reason yet. A rank that cannot go on without another one says 75 at once,
  // while that one still unwinds; a revoke now would end it and lose its error. An exit that says why ends
  // the wait, and so does the last one.
  bool AwaitsCause(Job& job, const RankExit& exit, Instant now);
  void FailBy75(Job& job, Instant now);
  // Called when all processes of the failed generation are gone, so that all exits are here.
  void DecideAfterFault(Job& job, Instant now);
  // A head that restarted calls it, too, since it does not know how much of the time had passed.
  void WaitForStorage(Job& job, absl::Duration delay, Instant now);

 private:
  void Excuse(const Job& job, FaultRecord& fault, Instant now) const;
  void FindStorageFault(Job& job);
  void FindCauseOfExit75(Job& job);
  void ChargeUnlessEarned(Job& job);
  void NameTheOthers(Job& job);

  HeadContext& context_;
  HeadModel& model_;
  const HeadConfig& config_;
  JobLife& life_;
  Sizing& sizing_;
  Leaves& leaves_;
  Newcomers& newcomers_;
};

}  // namespace gtrain::core
