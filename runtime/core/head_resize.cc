// Jobs of `ranks: {min, max}` with another number of ranks than they should have: less than max, or than a
// person asked for with `gtrain scale`, or more than that. They are re-formed right behind a checkpoint, so
// that nothing of the training is lost, and at nobody's charge.
//
// Where nobody asked, the room must have been there for `grow_after`, and no other job may be waiting: a
// machine that comes and goes would re-form the job each time, and who waits needs the room more. A look
// costs one placement, O(nodes), per such job and change of what nodes have free.
#include "absl/strings/str_cat.h"
#include "base/probe.h"
#include "nlohmann/json.hpp"
#include "runtime/core/authority.h"
#include "runtime/core/head_state.h"

namespace gtrain::core {

// Of what the job file counts, ranks or nodes.
int HeadState::SizeOf(const Job& job) {
  const GenerationGrant& grant = *job.record.grant;
  return static_cast<int>(job.demand.count_nodes ? grant.nodes.size() : grant.ranks.size());
}

// How many ranks it would have, re-formed now; 0: none that are a reason to.
int HeadState::RanksItWouldHave(const Job& job) {
  if (job.record.state != JobState::kRunning || !job.Live() || job.leave || SizeOf(job) == job.demand.max)
    return 0;
  const bool grows = SizeOf(job) < job.demand.max;
  if (grows) {
    for (const Job* other : LiveJobs()) {
      if (other->Wanting()) return 0;
    }
  }
  CheckViews();
  const plan::Placement placement = PlacementFor(job);
  const size_t ranks = placement.placed ? placement.ranks.size() : 0;
  const size_t now = job.record.grant->ranks.size();
  return (grows ? ranks > now : ranks < now) ? static_cast<int>(ranks) : 0;
}

void HeadState::LookForRoom(Job& job, Instant now) {
  if (RanksItWouldHave(job) == 0) return job.room_since.reset();
  if (job.room_since) return;
  job.room_since = now;
  if (SizeOf(job) > job.demand.max) return;
  GT_PROBE("head.room_to_grow");
  Emit(job, "room", "there is room for more ranks: it grows behind a checkpoint");
}

// A checkpoint of this generation has just been committed.
void HeadState::ResizeBehindCheckpoint(Job& job, Instant now) {
  LookForRoom(job, now);
  if (!job.room_since) return;
  const bool asked = job.scale_asked || SizeOf(job) > job.demand.max;
  if (asked || now - *job.room_since >= config_.grow_after) Resize(job, now);
}

void HeadState::Resize(Job& job, Instant now) {
  const int ranks = RanksItWouldHave(job);
  if (ranks == 0) return;
  GT_PROBE("head.resizes");
  const size_t had = job.record.grant->ranks.size();
  FaultRecord fault;
  fault.kind = FaultKind::kPreempted;
  fault.cause = ExitCause::kStopped;
  fault.message =
      absl::StrCat(static_cast<size_t>(ranks) > had ? kGrows : kShrinks, had, " to ", ranks, " ranks");
  if (job.checkpoint) absl::StrAppend(&fault.message, ", from the checkpoint of step ", job.checkpoint->step);
  Fail(job, std::move(fault), now);
}

absl::StatusOr<std::string> HeadState::Scale(const Peer& peer, const ClientScale& scale, Instant now) {
  Job* job = FindJob(scale.job);
  if (job == nullptr) return absl::InvalidArgumentError("the request names no job");
  JobRecord& record = job->record;
  if (IsFinal(record.state) || (record.ending != Ending::kNone && record.ending != Ending::kReform)) {
    return absl::FailedPreconditionError(
        absl::StrCat(record.id.value, " is over or ending: ", Name(record.state), ", ", record.reason));
  }
  const plan::Demand whole = DemandOf(job->spec, config_.local);
  const absl::string_view things = whole.count_nodes ? "nodes" : "ranks";
  if (scale.size < whole.min || scale.size > whole.max) {
    return absl::InvalidArgumentError(
        whole.min == whole.max
            ? absl::StrCat("the job file of ", record.id.value, " says `", things, ": ", whole.min,
                           "`: only what says `", things, ": {min: A, max: B}` can change while it runs")
            : absl::StrCat("the job file of ", record.id.value, " allows ", whole.min, " to ", whole.max, " ",
                           things, ", not ", scale.size));
  }
  // Anything else would never be placed again: a mesh has whole units only.
  const int64_t ranks = int64_t{scale.size} * (whole.count_nodes ? whole.ranks_per_node.value_or(0) : 1);
  if (ranks % whole.unit != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the mesh of ", record.id.value, " takes ranks in units of ", whole.unit, "; ",
                     scale.size, " ", things, " are no multiple of that: ask for another number"));
  }
  record.size_wanted = scale.size;
  TakeSpec(*job, job->spec);
  job->scale_asked = true;
  job->room_since.reset();
  schedule_ = true;
  Emit(*job, "scale", absl::StrCat(OwnerName(peer), " asks for ", scale.size, " ", things));
  Dirty(*job);
  const int size = job->Live() ? SizeOf(*job) : 0;
  CheckViews();
  const plan::Placement placement = PlacementFor(*job);
  const size_t room = !placement.placed   ? 0
                      : whole.count_nodes ? placement.nodes.size()
                                          : placement.ranks.size();
  if (scale.now && job->Live()) Resize(*job, now);
  const char* when = !job->Live() || record.ending == Ending::kReform ? "at its next start"
                     : size == job->demand.max                        ? "has them"
                                                                      : "behind its next checkpoint";
  return nlohmann::json({{"job", record.id.value},
                         {"counts", things},
                         {"size", size},
                         {"wanted", scale.size},
                         {"room", room},
                         {"when", when}})
      .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace gtrain::core
