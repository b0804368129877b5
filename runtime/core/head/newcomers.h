// Newcomers looks after the processes that come up beside a generation, for their place in the next one
// (`elastic.mode: in-place`). PURE. Private to runtime/core/head.
//
// When processes go on (Grants), those that have to be started do not hold them up: the generation begins
// without them, if it has enough ranks. Once all of them have come up, or kJoinBatch after the first has, the
// generation is re-formed free of charge and they are members. Where none comes up they are started anew
// kTryAgain later, doubling.
//
// HeadState owns it; only the loop's thread uses it; it never blocks and has no state of its own. A message
// of one of w processes costs O(w); re-forming costs what a generation costs (grants.h).
#pragma once
#include <optional>

#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_model.h"

namespace gtrain::core {

class Faults;
class JobLife;

class Newcomers {
 public:
  Newcomers(HeadContext& context, HeadModel& model, JobLife& life, Faults& faults)
      : context_(context), model_(model), life_(life), faults_(faults) {}

  // `number` is one behind the ranks of the granted generation.
  void OnStatus(Job& job, const RankStatus& status, Instant now);
  void OnExit(Job& job, const RankExit& exit, Instant now);
  void OnNodeLost(Job& job, const NodeId& node, Instant now);
  // Re-forms the generation where that is due.
  void Consider(Job& job, Instant now);
  std::optional<Instant> NextDeadline(const Job& job) const;

 private:
  void GiveUpLate(Job& job, Instant now);
  void Join(Job& job, int ready, Instant now);

  HeadContext& context_;
  HeadModel& model_;
  JobLife& life_;
  Faults& faults_;
};

}  // namespace gtrain::core
