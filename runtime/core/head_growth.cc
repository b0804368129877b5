// Jobs of `ranks: {min, max}` that run with less than max. Where there is room for more they are re-formed
// right behind a checkpoint, so that nothing of the training is lost, and at nobody's charge.
//
// The room must have been there for `grow_after`, and no other job may be waiting: a machine that comes and
// goes would re-form the job each time, and who waits needs the room more. A look costs one placement,
// O(nodes), per such job and change of what nodes have free.
#include "absl/strings/str_cat.h"
#include "base/probe.h"
#include "runtime/core/head_state.h"

namespace gtrain::core {

bool HeadState::MayGrow(const Job& job) const {
  if (job.record.state != JobState::kRunning || !job.Live() || job.leave || job.demand.min == job.demand.max)
    return false;
  const GenerationGrant& grant = *job.record.grant;
  const size_t size = job.demand.count_nodes ? grant.nodes.size() : grant.ranks.size();
  return static_cast<int>(size) < job.demand.max;
}

// How many ranks it would have, re-formed now; 0: not more than it has.
int HeadState::RanksItWouldHave(const Job& job) {
  if (!MayGrow(job)) return 0;
  for (const Job* other : LiveJobs()) {
    if (other->Wanting()) return 0;
  }
  CheckViews();
  const plan::Placement placement = PlacementFor(job);
  const size_t ranks = placement.placed ? placement.ranks.size() : 0;
  return ranks > job.record.grant->ranks.size() ? static_cast<int>(ranks) : 0;
}

void HeadState::LookForRoom(Job& job, Instant now) {
  if (RanksItWouldHave(job) == 0) return job.room_since.reset();
  if (job.room_since) return;
  GT_PROBE("head.room_to_grow");
  job.room_since = now;
  Emit(job, "room", "there is room for more ranks: it grows behind a checkpoint");
}

// A checkpoint of this generation has just been committed.
void HeadState::Grow(Job& job, Instant now) {
  if (!MayGrow(job)) return job.room_since.reset();
  LookForRoom(job, now);
  if (!job.room_since || now - *job.room_since < config_.grow_after) return;
  GT_PROBE("head.grows");
  FaultRecord fault;
  fault.kind = FaultKind::kPreempted;
  fault.cause = ExitCause::kStopped;
  fault.message = absl::StrCat(kGrows, job.record.grant->ranks.size(), " to ", RanksItWouldHave(job),
                               " ranks, from the checkpoint of step ", job.checkpoint->step);
  Fail(job, std::move(fault), now);
}

}  // namespace gtrain::core
