// Sizing: jobs of `ranks: {min, max}` with another number of ranks than they should have. PURE. Private to
// runtime/core/head.
//
// Owned by HeadState; the loop's thread only; never blocks. A look costs a placement, O(nodes + jobs +
// ranks); at most eight of them are made each 100 ms, however many jobs there are.
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

  // Something changed: is there room for more ranks of any job?
  void OweLooks() { looks_owed_ = model_.live_jobs.size(); }
  bool owes_looks() const { return looks_owed_ > 0; }
  bool LooksDue(Instant now) const { return looks_owed_ > 0 && (!next_look_ || now >= *next_look_); }
  // When the next of them may be made; nullopt: now, or none is owed.
  std::optional<Instant> NextDeadline() const { return looks_owed_ > 0 ? next_look_ : std::nullopt; }
  void LookAround(Instant now);

  void ResizeBehindCheckpoint(Job& job, Instant now);
  void Resize(Job& job, Instant now);
  void KeepWhatWorked(Job& job, Instant now);
  bool GoesBack(Job& job, Instant now);
  // How it runs, and what is to become of its size.
  std::string RunningReason(const Job& job);
  void SayHowItRuns(Job& job);

  absl::StatusOr<std::string> Scale(const Peer& peer, const ClientScale& scale, Instant now);

 private:
  bool NeedsRoom(const Job& other) const;
  int RanksItWouldHave(const Job& job);
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
