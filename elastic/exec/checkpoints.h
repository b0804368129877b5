// The checkpointers of a run's generations, opened and closed beside training: what the storage takes for it
// is no part of the time in which a generation comes to its first step. And the newest save, whichever of
// them made it: the next one is due by that, however often generations end.
//
//   Open -> Opened: true, on every rank -> Adopt -> SaveIfDue ... -> Leave
//   Set -> SaveIfDue ... -> Leave
//
// Within a generation Leave and Open come again where the directory is not the one that was opened (removed,
// renamed, unmounted): rank 0 finds that out (misplaced), and all ranks do it with the same step.
//
// One thread calls; Open and Leave never block, and another thread does the work in order. The destructor
// waits for the storage's answers. No wait here has a deadline of its own: the storage's calls and the
// collectives of a checkpointer have theirs, and a generation that ends ends the collectives.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/task_thread.h"
#include "checkpoint/engine/checkpoint.h"

namespace gtrain::elastic {

class Checkpoints {
 public:
  Checkpoints();
  ~Checkpoints();

  // Begins to open `made` (Checkpointer::Make), with its state registered, and to prepare it for saves.
  void Open(std::unique_ptr<Checkpointer> made);
  void Set(std::unique_ptr<Checkpointer> started);
  // Between Open and Adopt.
  bool opening() const { return opening_ != nullptr; }
  // Whether Adopt would not wait.
  bool Opened() const;
  // Waits until it is open: from here on get() is it. Returns the error of Checkpointer::Start
  // or PrepareToSave; then there is none.
  absl::Status Adopt();
  Checkpointer* get() const { return current_.get(); }  // null: none is open
  // Checkpointer::misplaced of the one that is open.
  bool misplaced() const { return current_ != nullptr && current_->misplaced(); }
  // Checkpointer::device of the newest that was open, which the next one is to find.
  std::optional<uint64_t> device() const { return device_; }
  // Checkpointer::SaveIfDue of the one that is open.
  absl::Status SaveIfDue(int64_t step, Communicator* comm);
  // The generation is over: what is open or opens is given up, a save that is not committed as well, so the
  // next one counts from the save before.
  void Leave();

  struct Save {
    int64_t step = 0;
    Instant began;
  };
  // The newest save that this process knows to be committed, or what the ranks of a generation or a restore
  // say instead.
  const std::optional<Save>& newest() const { return newest_; }
  void SetNewest(const Save& save) { newest_ = save; }

 private:
  struct Opening;
  static void Start(Opening* opening);
  void LookForCommit();

  std::optional<uint64_t> device_;
  std::optional<Save> newest_;
  std::optional<Save> saving_;  // runs, or has ended since anybody looked
  std::unique_ptr<Checkpointer> current_;
  std::shared_ptr<Opening> opening_;
  TaskThread thread_;
};

// All steps are made, and only the save of the last one is missing, which is tried again and again.
struct UnsavedEnd {
  int64_t step = 0;     // the last one
  int64_t saved = 0;    // that of the newest checkpoint; 0: there is none
  bool all = true;      // false: the user, or the program, has stopped the run before its last sample
  bool stops = false;   // the user has asked for a stop, whose grace ends it
  absl::Duration left;  // for how long it is tried; zero: no more
};
// Says that to people. The reason comes last: a note that is too long is cut there.
std::string Say(const UnsavedEnd& end, absl::string_view why);
// The pauses after so many failed tries and up to the last one, together.
absl::Duration PausesAfter(int tries, int tries_max, absl::Duration retry);

}  // namespace gtrain::elastic
