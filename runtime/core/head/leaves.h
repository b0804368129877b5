// Leaves ends and moves the ranks of a job in time when one of its machines leaves. PURE. Private to
// runtime/core/head.
//
// HeadState owns it; only the loop's thread uses it; it never blocks and has no state of its own.
#pragma once
#include <optional>

#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_model.h"

namespace gtrain::core {

class Faults;
class JobLife;
class Placer;
class Sizing;

class Leaves {
 public:
  Leaves(HeadContext& context, HeadModel& model, Placer& placer, JobLife& life, Faults& faults,
         Sizing& sizing);

  // Finds the node of the job's generation that goes first and plans when its ranks are told and ended.
  void FindLeave(Job& job, Instant now);
  void LeaveStep(Job& job, Instant now);
  void TellRanks(const Job& job, const NodeId& node, Instant now);
  std::optional<Instant> NextDeadline(const Job& job) const;
  // The time that ranks have from TERM to KILL when a machine leaves (fault P13).
  absl::Duration LeaveGrace(const Job& job, Instant now) const;

 private:
  void WithdrawNotice(Job& job, Instant now);

  HeadContext& context_;
  HeadModel& model_;
  const HeadConfig& config_;
  Placer& placer_;
  JobLife& life_;
  Faults& faults_;
  Sizing& sizing_;
};

}  // namespace gtrain::core
