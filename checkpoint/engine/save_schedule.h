// When a checkpointer saves: the job's policy, or, without one, how often it pays (plan/interval.h); and once
// as soon as a machine is to be taken away or the user asks to stop.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "base/clock.h"
#include "checkpoint/engine/context.h"
#include "checkpoint/plan/interval.h"

namespace gtrain::ckpt {

// Not thread-safe; never blocks. What it says differs between ranks: rank 0's is what counts.
class SaveSchedule {
 public:
  explicit SaveSchedule(CheckpointContext* context);

  // The directory is open: intervals count from now on, unless Settings::last_save says from when.
  void Opened();
  // The state is that of a checkpoint now.
  void Restored(int64_t step);
  // `can`: nothing stands in the way of a save. `writing`: how long the newest save took from its beginning
  // to its commit.
  bool Due(int64_t step, bool can, absl::Duration writing) const;
  // A notice that was taken back may come again.
  void LookAtNotice();

  // A save of `step` begins or is skipped now.
  void Tried(int64_t step);
  // SaveIfDue saved. `noticed`, `stopped`: with the notice or the user's wish known.
  void Saved(bool noticed, bool stopped);
  // The training thread goes on: until now it has waited for the save that it tried.
  void GoesOn();
  // It has waited longer for the newest save.
  void AddStall(absl::Duration more);

  // Why saves are due when they are; empty: somebody said it, or no save was measured yet. Rank 0 logs it
  // when it is chosen, and whenever it has become another by a quarter.
  std::string Reason(absl::Duration writing);

 private:
  absl::Duration Every(absl::Duration writing) const;
  // From what is known by now; only with a save behind us.
  Interval Chosen(absl::Duration writing) const;

  CheckpointContext& context_;
  const Settings& settings_ = context_.settings;
  const RealClock clock_;
  Instant last_save_;
  std::optional<int64_t> last_step_;  // of that save; unset: steps that were passed are not made up for
  bool saved_for_notice_ = false;
  bool saved_for_stop_ = false;
  absl::Duration last_stall_;
  absl::Duration told_every_;  // the automatic interval that people were told of
};

}  // namespace gtrain::ckpt
