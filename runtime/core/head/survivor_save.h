// SurvivorSave has the ranks that are left of a job save what only they know (`elastic.mode: in-place`).
// PURE. Private to runtime/core/head.
//
// Only a generation can save. Where fewer ranks are left than `ranks.min`, or their job is to end while they
// wait for a generation, they are granted one of their own, in which nothing is started: they are told as if
// a machine was about to go, save behind their next step, and the generation is over when that is committed,
// or after three minutes. Then they wait on for room, in memory, or the job ends as it was to
// (JobStatus::after_save). They train on meanwhile, a few steps with fewer ranks than asked for; of the same
// batches, since these do not depend on the number of ranks.
//
// It is done once for each generation that has ranks enough, whatever heads there are (JobStatus::saves), and
// again by those that are left when another one of these ranks or machines is lost before it is committed. A
// fault of the storage ends it like any other.
//
// HeadState owns it; only the loop's thread uses it; it never blocks and has no state of its own. A look at a
// job that trains costs O(1), at one that waits, or saves and has n ranks, O(n log n); where it is due it
// costs two placements, a message to each node, and re-forming twice (newcomers.h).
#pragma once
#include <optional>

#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_model.h"

namespace gtrain::core {

class Grants;
class JobLife;
class Placer;

class SurvivorSave {
 public:
  SurvivorSave(HeadContext& context, HeadModel& model, Placer& placer, Grants& grants, JobLife& life)
      : context_(context), model_(model), placer_(placer), grants_(grants), life_(life) {}

  // Whether processes that wait know steps that no checkpoint has, could save them, and have not tried.
  static bool IsDue(const Job& job);
  // What of that does not ask who waits, which a new head does not know yet.
  static bool MayBeDue(const Job& job);
  // A machine of those that wait which cannot be used for the moment: its agent is neither there nor given
  // up, or what another job had there is still being ended.
  std::optional<NodeId> AwaitsMachine(const Job& job) const;
  // The live generation is there to save.
  static bool IsOne(const Job& job);

  // Grants it, after Placer::CheckViews. False: none is due, or it finds no room.
  bool Begin(Job& job, Instant now);
  void Step(Job& job, Instant now);
  std::optional<Instant> NextDeadline(const Job& job) const;
  // Once more, where the node may not have heard it.
  void Tell(const Job& job, const NodeId& node);

 private:
  bool MayTell(const Job& job, Instant now) const;

  HeadContext& context_;
  HeadModel& model_;
  Placer& placer_;
  Grants& grants_;
  JobLife& life_;
};

}  // namespace gtrain::core
