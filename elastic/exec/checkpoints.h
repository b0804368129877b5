// The checkpointers of a run's generations, opened and closed beside training: what the storage takes for it
// is no part of the time in which a generation comes to its first step.
//
//   Open -> Opened: true, on every rank -> Adopt -> get() -> Leave
//   Set -> get() -> Leave
//
// One thread calls; Open and Leave never block, and another thread does the work in order. The destructor
// waits for the storage's answers. No wait here has a deadline of its own: the storage's calls and the
// collectives of a checkpointer have theirs, and a generation that ends ends the collectives.
#pragma once
#include <memory>
#include <utility>

#include "absl/status/status.h"
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
  // The generation is over: what is open or opens is given up.
  void Leave();

 private:
  struct Opening;
  static void Start(Opening* opening);

  std::unique_ptr<Checkpointer> current_;
  std::shared_ptr<Opening> opening_;
  TaskThread thread_;
};

}  // namespace gtrain::elastic
