// The checkpointers of a run's generations, opened and closed beside training: what the storage takes for it
// is no part of the time in which a generation comes to its first step. And the newest save, whichever of
// them made it: the next one is due by that, however often generations end.
//
//   Open -> Opened: true, on every rank -> Adopt -> SaveIfDue ... -> Leave
//   Set -> SaveIfDue ... -> Leave
//
// One thread calls; Open and Leave never block, and another thread does the work in order. The destructor
// waits for the storage's answers. No wait here has a deadline of its own: the storage's calls and the
// collectives of a checkpointer have theirs, and a generation that ends ends the collectives.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
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
  void Set(std::unique_ptr<Checkpointer> started) { current_ = std::move(started); }
  // Between Open and Adopt.
  bool opening() const { return opening_ != nullptr; }
  // Whether Adopt would not wait.
  bool Opened() const;
  // Waits until it is open: from here on get() is it. Returns the error of Checkpointer::Start
  // or PrepareToSave; then there is none.
  absl::Status Adopt();
  Checkpointer* get() const { return current_.get(); }  // null: none is open
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

  std::optional<Save> newest_;
  std::optional<Save> saving_;  // runs, or has ended since anybody looked
  std::unique_ptr<Checkpointer> current_;
  std::shared_ptr<Opening> opening_;
  TaskThread thread_;
};

}  // namespace gtrain::elastic
