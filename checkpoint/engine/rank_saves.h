// What one rank saves with: the plan of its shard, the memory for a copy of its state, who writes it (a
// process of its own, or a thread of this one), and how its saves ended.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/mutex.h"
#include "checkpoint/engine/committer.h"
#include "checkpoint/engine/context.h"
#include "checkpoint/engine/directory.h"
#include "checkpoint/engine/index_board.h"
#include "checkpoint/engine/registration.h"
#include "checkpoint/engine/saver.h"
#include "checkpoint/plan/save_plan.h"
#include "checkpoint/port/writer_host.h"

namespace gtrain::ckpt {

// Not thread-safe: of the training thread. What it is given must outlive it.
class RankSaves {
 public:
  // Why nothing can be saved now on this rank. Ranks agree on the highest of theirs.
  enum class Obstacle : int64_t {
    kNone,
    kWriting,   // an earlier save
    kStarting,  // the memory holds a save of an earlier generation
    kNoRoom,    // in the machine's memory, for copies of the state (fault C12)
  };

  RankSaves(CheckpointContext* context, Directory* directory, Registration* state)
      : context_(*context), directory_(*directory), state_(*state) {}
  ~RankSaves();
  RankSaves(const RankSaves&) = delete;
  RankSaves& operator=(const RankSaves&) = delete;

  // Collective, once, when the registration is frozen.
  absl::Status Prepare();
  // Makes the saver, on this thread and however long an earlier generation's saves need its memory. Without
  // one afterwards, the checkpointer or its generation ends.
  void Start();
  // Begins to make it on a thread of its own, unless that was begun; until TakeStarted finds it, saves are
  // skipped.
  void StartSoon();
  void TakeStarted();
  // Neither is there a saver, nor is one being made.
  bool none() const { return saver_ == nullptr && !starting_.joinable(); }
  Saver* saver() const { return saver_.get(); }  // null: there is none yet

  Obstacle Look();
  // Once, when there is room for it: the first save finds its memory made.
  void Warm();
  // Makes the saver write from this process where its writer is gone.
  void MakeUsable();
  // Of the state that has a tail. Not collective.
  absl::Status PrepareTail();
  // `policy`: why it is saved now, for people.
  void Begin(const SaveId& id, const std::string& policy);
  // Only Fence says that the state has not changed since a save began. Any other end of a copy may come after
  // a change, so the copied part may hold values of two steps. True: there was such a save.
  bool DropUnfenced();
  // What retention shall know of, of this saver and of one that is yet to be made.
  void Resumed(const std::optional<SaveId>& id);

  // Rank 0 knows how the saves of all ranks ended. Called on the Saver's thread, or while it is idle.
  void NoteLost(int64_t step, absl::string_view why);

 private:
  CommitterConfig Commits() const;
  // Collective. The address of the board where this rank's writer meets that of rank 0; 0: in the storage.
  absl::StatusOr<int64_t> MeetOnBoard();
  std::unique_ptr<SaveRoute> MakeRoute();  // null: the checkpointer or its generation ends
  // ResourceExhausted: the copies of the state of this machine's ranks have no room in its memory. OK for
  // ever once they had: they are made then.
  absl::Status FindRoom();
  void Ended(const SaveId& id, const absl::Status& status);

  CheckpointContext& context_;
  Directory& directory_;
  Registration& state_;
  Session* const session_ = context_.session;
  const Settings& settings_ = context_.settings;
  Agreement& agree_ = context_.agree;
  port::WriterHost* const host_ = session_->writer_host();  // null: this process writes its saves itself
  ShardPlan plan_;                                          // of this rank's saves, but for their tails
  uint64_t machine_bytes_ = 0;  // of the copies of the state of the ranks on this machine
  bool has_room_ = false;
  bool warmed_ = false;
  std::unique_ptr<IndexBoard> board_;  // rank 0, for writers outside
  int64_t board_address_ = 0;
  std::optional<SaveId> resumed_;
  std::string policy_;              // of the newest save; changed while none runs
  std::atomic<int> lost_saves_{0};  // rank 0: skipped or failed since the newest commit
  bool committed_ = false;          // any; of the Saver's thread
  std::unique_ptr<Saver> saver_;    // its thread uses what is above
  std::atomic<bool> ending_{false};
  Mutex start_mu_;
  std::unique_ptr<SaveRoute> started_ ABSL_GUARDED_BY(start_mu_);  // what starting_ made
  std::thread starting_;                                           // uses what is above
};

}  // namespace gtrain::ckpt
