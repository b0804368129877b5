// Stalls finds jobs that stand still. PURE. Private to runtime/core/head.
//
// HeadState owns it; only the loop's thread uses it; it never blocks and has no state of its own. A verdict
// looks once at all ranks of the job.
#pragma once
#include <optional>
#include <string>
#include <utility>

#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_model.h"

namespace gtrain::core {

class Faults;
class Queries;

// Returns "seems stuck: ..."; empty: the job does not seem so now.
std::string StuckText(const Job& job, Instant now);

class Stalls {
 public:
  Stalls(HeadContext& context, HeadModel& model, Faults& faults, Queries& queries);

  std::optional<Instant> NextDeadline(const Job& job) const;
  void CheckStalls(Job& job, Instant now);
  void CountIdle(Job& job, RankLive& rank, Instant now);

 private:
  Instant StallVerdictAt(const Job& job) const;
  void CheckStuck(Job& job, Instant now);
  std::string WhoWaits(const Job& job) const;
  std::optional<Instant> SourceVerdictAt(const Job& job) const;
  void CheckSource(Job& job, Instant now);
  std::pair<int, std::string> Culprit(const Job& job) const;
  void CheckSteps(Job& job, Instant now);

  HeadContext& context_;
  HeadModel& model_;
  const HeadConfig& config_;
  Faults& faults_;
  Queries& queries_;
};

}  // namespace gtrain::core
