// Progress tells how far a job is, how fast it steps, and for which of its nodes the others wait (fault N6).
// PURE. Private to runtime/core/head.
//
// HeadState owns it; only the loop's thread uses it; it never blocks and has no state of its own. It looks
// at all ranks of a job once in a stretch of 10 s.
#pragma once
#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_model.h"

namespace gtrain::core {

absl::Duration BetweenSteps(const Job& job);  // from one report of another step to the next; zero: not known

class Progress {
 public:
  Progress(HeadContext& context, HeadModel& model) : context_(context), model_(model) {}

  // Called when a rank of the job has reported its step.
  void UpdateProgress(Job& job, Instant now);
  void MeasurePace(Job& job, RankLive& rank);

 private:
  bool AllBeganAnew(Job& job);
  void ComparePaces(Job& job);

  HeadContext& context_;
  HeadModel& model_;
};

}  // namespace gtrain::core
