// Reads a checkpoint into the registered memory of all ranks: the newest that is committed and intact, or a
// save whose upload has not ended and of which copies lie near by. Rank 0 chooses; all ranks load the same,
// and none goes on before all have verified what they read.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "checkpoint/engine/candidate_search.h"
#include "checkpoint/engine/checkpoint.h"
#include "checkpoint/engine/chunk_share.h"
#include "checkpoint/engine/context.h"
#include "checkpoint/engine/directory.h"
#include "checkpoint/engine/near.h"
#include "checkpoint/engine/rank_saves.h"
#include "checkpoint/engine/registration.h"
#include "checkpoint/plan/load_plan.h"

namespace gtrain::ckpt {

// Not thread-safe. What it is given must outlive it.
class Restorer {
 public:
  Restorer(CheckpointContext* context, Directory* directory, Registration* state, RankSaves* saves)
      : context_(*context), directory_(*directory), state_(*state), saves_(*saves) {}

  // Checkpointer::Restore of a registration that is frozen; errors are not yet made for the program. Begins
  // to make what this rank saves with: on this thread where the restore must wait for it.
  absl::StatusOr<std::optional<RestoredStep>> Restore(const RestoreOptions& options);

  // The newest committed step, as far as Restore saw.
  std::optional<int64_t> committed_step() const { return committed_step_; }
  // The step that was restored from the job's own directory last.
  std::optional<int64_t> own_step() const { return own_step_; }

 private:
  using Restored = absl::StatusOr<std::optional<RestoredStep>>;

  Restored RestoreNewest();
  // nullopt: no earlier generation left a save that is whole near by, or its copies are bad.
  Restored RestoreUncommitted(const CandidateSearch& search);
  // nullopt: no candidate was left to try.
  Restored RestoreFrom(CandidateSearch* search);
  Restored RestoreNothing(const CandidateSearch& search);
  absl::Status ListForRestore(CandidateSearch* search);
  absl::Status Spread(Choice* choice);
  absl::Status ReadChosen(Choice* choice, LoadPlan* plan, std::optional<NearShards>* near);
  // Collective; null where this rank reads everything itself.
  absl::StatusOr<std::unique_ptr<ChunkShare>> MeetMates(const Choice* choice);
  absl::Status LoadChosen(Choice* choice, LoadPlan* plan);
  Restored Finish(const Choice& choice, const LoadPlan& plan, const CandidateSearch& search);
  void NoteRestored(const Choice& choice);
  // Collective.
  absl::Status Tell(const Choice& choice, const RestoredStep& restored, const CandidateSearch& search);
  void TellOfPlan(const Choice& choice, const LoadPlan& plan) const;
  std::string TellIfNotFinite(const Choice& choice, port::BlobStore* store) const;

  CheckpointContext& context_;
  Directory& directory_;
  Registration& state_;
  RankSaves& saves_;
  Session* const session_ = context_.session;
  const Settings& settings_ = context_.settings;
  Agreement& agree_ = context_.agree;
  const RealClock clock_;
  std::optional<int64_t> committed_step_, own_step_;

  // During a restore.
  Instant begun_;
  std::vector<std::string> staged_;  // state of ranks, as the plan has it (Registration::MemoryFor)
  std::vector<std::string> may_be_missing_;
  bool touched_ = false;  // something was read into registered memory
};

}  // namespace gtrain::ckpt
