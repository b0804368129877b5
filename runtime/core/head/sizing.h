// Sizing changes the number of ranks of jobs with `ranks: {min, max}`. PURE. Private to runtime/core/head.
//
// HeadState owns it; only the loop's thread uses it, and it never blocks. A look costs a placement, O(nodes
// + jobs + ranks), and at most eight looks are made in 100 ms, however many jobs there are.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "job/plan/place.h"
#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_model.h"

namespace gtrain::core {

class Faults;
class JobLife;
class Links;
class Placer;

class Sizing {
 public:
  Sizing(HeadContext& context, HeadModel& model, Placer& placer, JobLife& life, Faults& faults, Links& links);

  // Something changed, so each job is to be looked at for room for more ranks.
  void OweLooks() { looks_owed_ = model_.live_jobs.size(); }
  bool owes_looks() const { return looks_owed_ > 0; }
  bool LooksDue(Instant now) const { return looks_owed_ > 0 && (!next_look_ || now >= *next_look_); }
  // The moment in which the next look may be made; nullopt: it may be made now, or none is owed.
  std::optional<Instant> NextDeadline() const { return looks_owed_ > 0 ? next_look_ : std::nullopt; }
  void LookAround(Instant now);

  void ResizeBehindCheckpoint(Job& job, Instant now);
  void Resize(Job& job, Instant now);
  // Of a job whose processes go on: that needs no checkpoint.
  void GrowInPlace(Job& job, Instant now);
  std::optional<Instant> GrowsInPlaceAt(const Job& job) const;
  void KeepWhatWorked(Job& job, Instant now);
  bool GoesBack(Job& job, Instant now);
  // Between two generations: enough of those that were members twice wait, and need nobody to be started.
  static bool MayGoOnAlone(const Job& job);
  // The job would end by its last fault. True: that was of a process that had come up beside the others, and
  // these go on as they were before it joined.
  bool GoesOnWithoutNewcomer(Job& job, Instant now);
  // These tell people how the job runs and how its size will change.
  std::string RunningReason(const Job& job);
  void SayHowItRuns(Job& job);

  absl::StatusOr<std::string> Scale(const Peer& peer, const ClientScale& scale, Instant now);

 private:
  bool NeedsRoom(const Job& other) const;
  int RanksItWouldHave(const Job& job);
  static std::vector<const RankPlace*> SurvivorsOf(const Job& job, const GenerationGrant& before);
  void GoBackTo(Job& job, const GenerationGrant& worked, Instant now);
  void GoBack(Job& job, const std::vector<const RankPlace*>& places, int size, Instant now);
  void Want(Job& job, int size);
  void LookForRoom(Job& job, Instant now);
  void MayGrowAgain(Job& job, Instant now);
  SizeTried Tried(size_t ranks, const std::vector<NodeId>& nodes) const;
  std::string TooManyFor(const plan::Placement& placement) const;
  bool CouldGrow(const Job& job);
  std::string PendingText(const Job& job);
  absl::Status MayHaveSize(const Job& job, const plan::Demand& whole, int size) const;
  std::string ScaleAnswer(const Job& job, const plan::Demand& whole, const plan::Placement& placement,
                          const ClientScale& scale, int size, bool starts) const;

  HeadContext& context_;
  HeadModel& model_;
  const HeadConfig& config_;
  Placer& placer_;
  JobLife& life_;
  Faults& faults_;
  Links& links_;

  size_t looks_owed_ = 0;             // of live jobs, since something changed
  uint64_t looked_at_ = 0;            // the job that was looked at last, by number
  std::optional<Instant> next_look_;  // at the next of them, while there are many
};

}  // namespace gtrain::core
