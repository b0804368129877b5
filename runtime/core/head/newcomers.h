// Newcomers looks after the processes that come up beside a generation, for their place in the next one
// (`elastic.mode: in-place`). PURE. Private to runtime/core/head.
//
// When processes go on (Grants), those that have to be started do not hold them up: the generation begins
// without them, if it has enough ranks. Once all of them have come up, or kJoinBatch after the first has, the
// generation is re-formed free of charge and they are members. Where none comes up they are started anew
// kTryAgain later, doubling. So are spares that are missing, once the program is known to stay and where
// there is room: a program that does not stay is never re-formed for them. Nothing is re-formed before the
// ranks made a step (they may report none: or a minute after they began, or three steps of which the time is
// known from this generation or an earlier one, 10 minutes at most), nor while a node is silent. Where a
// member that goes on has not come yet, because it is in the step that the generation before began, nobody
// computes and no step is waited for.
//
// Likewise where a member that was started has not joined yet and a spare is ready: it takes that place.
//
// Where rank 0 says that its ranks can stand still behind a step (gtrain::Elastic), they are asked to before
// that, and given the time of a few steps: the newcomers then get the state beside all of the next one, and
// not behind what had been computed when the generation ended.
//
// HeadState owns it; only the loop's thread uses it; it never blocks and has no state of its own. A look at w
// processes beside n ranks costs O(n + w), and a placement where it is due: one for each process that comes
// up or ends, one when the ranks have stepped and one a tick. Re-forming costs a generation: a revoke, a word
// that it is over, a grant and both ways of the entry barrier for each node, two `RanksStarted` of each rank,
// which are the most messages of all, and two commits; a pause two messages, whatever n is.
#pragma once
#include <optional>
#include <string>

#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_model.h"

namespace gtrain::core {

class Faults;
class JobLife;
class Placer;

class Newcomers {
 public:
  Newcomers(HeadContext& context, HeadModel& model, Placer& placer, JobLife& life, Faults& faults)
      : context_(context), model_(model), placer_(placer), life_(life), faults_(faults) {}

  // `number` is one behind the ranks of the granted generation.
  void OnStatus(Job& job, const RankStatus& status, Instant now);
  void OnExit(Job& job, const RankExit& exit, Instant now);
  void OnHeld(Job& job, const NodeId& node, const HeldGeneration& held, Instant now);
  void OnNodeLost(Job& job, const NodeId& node, Instant now);
  // The newest generation was re-formed and is over there: says of whom nobody has heard that they have
  // ended, of members once it is over everywhere (SilentText).
  void OnGone(Job& job, const NodeId& node, const GenerationGone& gone);
  // Whether they stand still has changed.
  void OnPause(Job& job, Instant now);
  // Re-forms the generation where that is due.
  void Consider(Job& job, Instant now);
  std::optional<Instant> NextDeadline(const Job& job) const;

 private:
  // Of those that wait: for whom the head waits, who could be a member, and how many are to be. Where members
  // are wanted and a copy of the model lies on several ranks, only those count that complete a copy.
  struct Count {
    int open = 0, ready = 0, wanted = 0;
    bool all_ready = false;  // nobody is on the way any more
  };
  static Count CountOf(const Job& job);
  static void SayWhyLast(Job& job, const std::string& why);
  void PlanAnew(Job& job, Instant now);
  bool AwaitsPause(Job& job, Instant now);
  static bool Joins(const Job& job, const Count& count);
  static void Plan(Job& job, const Count& count, Instant now);
  void GiveUpLate(Job& job, Instant now);
  bool HasRoom(const Job& job, int open);
  void Join(Job& job, int ready, Instant now);

  HeadContext& context_;
  HeadModel& model_;
  Placer& placer_;
  JobLife& life_;
  Faults& faults_;
};

// These tell people, in O(n + w).
// What runs and what waits beside it now, with the words of the placement.
std::string PlacesText(const Job& job);
// When those that are to join the ranks are started again, where none of them is on its way, and why the last
// one ended; empty: some are, or none are to join.
std::string NewcomersText(const Job& job, Instant now);
// How many spares wait, and when the others come; empty: all do, or none are asked for.
std::string SparesText(const Job& job, Instant now);
// Which members did not go on although nobody heard that they ended; empty: none, or the program does not
// stay.
std::string SilentText(const Job& job);
// For which ranks the others stand still before the first step of a generation; empty: the head knows of
// none.
std::string AwaitedText(const Job& job);

}  // namespace gtrain::core
