// The states of a job and which may follow which. PURE.
//
//   QUEUED <-1-> WAITING        1 fewer than the minimum can be had at all / could be had again
//     |2           |2           2 a generation is granted for the first time, or after a wait
//     v            v
//   STARTING ----3----> RUNNING <-4-> RECONFIGURING --5--> WAITING
//
//   3 every rank has started   4 a generation was revoked, the next one follows   5 no room for the minimum
//   From STARTING also: 4 (a rank failed before all had started).
//   Every state that is not final may become FAILED or CANCELLED; STARTING, RUNNING: SUCCEEDED.
#pragma once
#include "runtime/core/values/records.h"

namespace gtrain::core {

constexpr bool IsFinal(JobState state) {
  return state == JobState::kSucceeded || state == JobState::kFailed || state == JobState::kCancelled;
}

constexpr bool CanMove(JobState from, JobState to) {
  if (IsFinal(from) || from == to) return false;
  if (to == JobState::kFailed || to == JobState::kCancelled) return true;
  switch (from) {
    case JobState::kQueued:
      return to == JobState::kWaiting || to == JobState::kStarting;
    case JobState::kWaiting:
      return to == JobState::kQueued || to == JobState::kStarting;
    case JobState::kStarting:
      return to == JobState::kRunning || to == JobState::kReconfiguring || to == JobState::kSucceeded;
    case JobState::kRunning:
      return to == JobState::kReconfiguring || to == JobState::kSucceeded;
    case JobState::kReconfiguring:
      return to == JobState::kRunning || to == JobState::kWaiting || to == JobState::kSucceeded;
    default:
      return false;
  }
}

}  // namespace gtrain::core
