// Progress: how far a job is, how fast it steps, and which of its nodes the others wait for (fault N6). PURE.
// Private to runtime/core/head.
//
// Owned by HeadState; the loop's thread only; never blocks; it keeps nothing of its own. A look at all ranks
// of a job is made once for each stretch of 10 s.
#pragma once
#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_model.h"

namespace gtrain::core {

absl::Duration BetweenSteps(const Job& job);  // from one report of another step to the next; zero: not known

class Progress {
 public:
  Progress(HeadContext& context, HeadModel& model) : context_(context), model_(model) {}

  // A rank of it told its step.
  void UpdateProgress(Job& job, Instant now);
  void MeasurePace(Job& job, RankLive& rank);

 private:
  bool AllBeganAnew(Job& job);
  void ComparePaces(Job& job);

  HeadContext& context_;
  HeadModel& model_;
};

}  // namespace gtrain::core
