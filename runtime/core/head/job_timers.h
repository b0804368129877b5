// JobTimers does what is due for a job and says when the next of it is. PURE. Private to runtime/core/head.
//
// HeadState owns it; only the loop's thread uses it; it never blocks and has no state of its own.
#pragma once
#include <optional>

#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_model.h"

namespace gtrain::core {

class Faults;
class Grants;
class JobLife;
class Leaves;
class Links;
class Newcomers;
class Polls;
class RankNews;
class Sizing;
class Stalls;
class SurvivorSave;

class JobTimers {
 public:
  JobTimers(HeadContext& context, HeadModel& model, JobLife& life, Grants& grants, Faults& faults,
            Links& links, Leaves& leaves, Newcomers& newcomers, RankNews& ranks, Stalls& stalls, Polls& polls,
            Sizing& sizing, SurvivorSave& save);

  void Run(Job& job, Instant now);
  // Holds also between two generations: one that is granted only to be ended at once helps nobody.
  bool EndIfItsTimeIsUp(Job& job, Instant now);
  std::optional<Instant> NextDeadline(const Job& job) const;

 private:
  void LetWaitingGo(Job& job, Instant now);
  void FailHungProcesses(Job& job, Instant now);
  void FailLateStart(Job& job, Instant now);

  HeadModel& model_;
  const HeadConfig& config_;
  JobLife& life_;
  Grants& grants_;
  Faults& faults_;
  Links& links_;
  Leaves& leaves_;
  Newcomers& newcomers_;
  RankNews& ranks_;
  Stalls& stalls_;
  Polls& polls_;
  Sizing& sizing_;
  SurvivorSave& save_;
};

}  // namespace gtrain::core
