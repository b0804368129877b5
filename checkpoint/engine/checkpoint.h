// Sharded checkpoints: registered state, saved beside training, committed whole or not at all.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "checkpoint/plan/limits.h"
#include "gtrain/memory.h"
#include "gtrain/sharding.h"
#include "gtrain/types.h"
#include "runtime/port/session.h"

namespace gtrain {

struct CheckpointOptions {
  std::string uri;                     // a directory all ranks see; $GTRAIN_CHECKPOINT_URI wins if set
  int keep = 3;                        // newest committed ones kept; $GTRAIN_CHECKPOINT_KEEP wins if set
  std::optional<int64_t> every_steps;  // when SaveIfDue saves; $GTRAIN_CHECKPOINT_EVERY wins if set
  std::optional<absl::Duration> every;
  absl::Duration commit_timeout = absl::Minutes(10);
  // Opens to look: Restore works, Save and SaveIfDue return FailedPrecondition, nothing is written and no
  // owner loses anything. For inspection, inference, and evaluation beside training.
  // $GTRAIN_CHECKPOINT_READ_ONLY=1 sets it too.
  bool read_only = false;
  // Takes the directory although another program that is alive owns it. The next save of that program fails
  // and names the new owner of the directory. $GTRAIN_TAKEOVER=1 (gtrain launch --takeover) sets it too.
  bool takeover = false;
  // How many damaged checkpoints, one after the other, a Restore may fall back over before it gives up.
  // $GTRAIN_CHECKPOINT_MAX_ROLLBACK wins if set.
  int max_rollback = 1;
  // In which saves ranks compare hashes of their replicated state before anything is written: "off", "first",
  // or "every N" (the first and every N-th after it). The comparison reads all of this rank's state once;
  // rank 0 logs how long it took. $GTRAIN_CHECKPOINT_VERIFY_REPLICAS wins if set.
  std::string verify_replicas = "every 100";
  // Save returns at once and the state is copied while the program computes with it. The program promises to
  // call Fence() before it changes the state.
  bool lazy = false;
  // Of a program that goes on where another Checkpointer was: which step the newest save is of, and how long
  // before this one is made it began. A policy counts from there, so a save that was due meanwhile is made up
  // for. Unset: an interval counts from the opening, or from a Restore.
  struct LastSave {
    int64_t step = 0;
    absl::Duration ago;
  };
  std::optional<LastSave> last_save;
  // Of a program that has had the directory open: what Checkpointer::device said then. It is not made again
  // where it is gone, and where another file system is in its place it is not taken: errors of the storage.
  std::optional<uint64_t> device;
  // Every Save, also one of SaveIfDue, that is not skipped calls it before it copies, to bring state that
  // lies elsewhere into the registered memory. Its error becomes that of the Save, which then saves nothing.
  std::function<absl::Status()> before_save;
};

struct RestoredStep {
  int64_t step = 0;
  uint64_t timeline = 0;
  // Where it is, or will be once the upload that an earlier generation began has ended: with copies near by
  // (the job file's checkpoint.near) nobody waits for that.
  std::string manifest;
  // Bytes of this rank's state, each copied once, and bytes that it read from storage for them (whole chunks
  // of 4 MiB, so that every byte is verified; a chunk that another rank of its machine read for both counts
  // there).
  uint64_t bytes = 0;
  uint64_t bytes_read = 0;
  uint64_t bytes_near = 0;  // of bytes_read: of copies in near memory or on a near disk, not of the storage
};

struct RestoreOptions {
  // Names of registered tensors (`*` and `?` stand for any characters) that the checkpoint may lack: these
  // are left as they are, and named in the log. Any other tensor that it lacks is an error.
  std::vector<std::string> may_be_missing;
};

// Register state once, then Restore, then Save. Registered memory is the caller's and must
// outlive the Checkpointer. Not thread-safe: one owner. Under gtrain a process of its own writes: once Save()
// has returned on all ranks, the save is committed whatever becomes of them. Run by hand a thread writes, and
// destroying the Checkpointer gives up a save that is not committed yet: Wait() first to keep it.
class Checkpointer {
 public:
  // Collective. The session must outlive the checkpointer. Fails with FailedPrecondition if the uri holds
  // checkpoints of a different job and no --resume/--fresh was given.
  static absl::StatusOr<std::unique_ptr<Checkpointer>> Open(Session* session,
                                                            const CheckpointOptions& options = {});
  // Open in two halves, for a caller that trains meanwhile. Make asks the session which generation this is
  // and never blocks; `comm` is this checkpointer's own, of all ranks (null where there is one). Start is
  // collective, runs once, on any thread, and comes before every call but the Adds; its errors are those of
  // Open. Once another generation was joined, a checkpointer begins nothing any more, and it may be destroyed
  // on any thread, which waits for the storage's answers.
  static absl::StatusOr<std::unique_ptr<Checkpointer>> Make(Session* session,
                                                            std::unique_ptr<Communicator> comm,
                                                            const CheckpointOptions& options = {});
  virtual absl::Status Start() = 0;
  // Collective, after all Adds. Does what the first Save would do and wait for before it copies; only where
  // nothing is to be restored.
  virtual absl::Status PrepareToSave() = 0;
  virtual ~Checkpointer() = default;

  // Every Add returns InvalidArgument, with both numbers, when the size of `memory` is not that of the shape
  // and dtype; Unimplemented for memory that is not the host's; ResourceExhausted, with the numbers, for more
  // bytes than there can be: 2^62 of all tensors together, 2^50 of one rank's own.

  // Registers state that is equal on all ranks: saved once (ranks share the writing), restored on every rank.
  virtual absl::Status AddReplicated(absl::string_view name, Memory memory, std::vector<int64_t> shape,
                                     DType dtype) = 0;
  // Registers a tensor of the global `shape` that lies on the ranks as `sharding` says. `memory` is this
  // rank's box of it, dense, row by row (LocalBoxOf tells its shape), and may be null where that box is
  // empty. Every rank registers every tensor, also those of which it holds nothing. Each byte is saved once:
  // ranks that hold the same box share the writing. A tensor saved under one layout and world size is
  // restored under any other, replicated or sharded.
  virtual absl::Status AddSharded(absl::string_view name, Memory memory, std::vector<int64_t> shape,
                                  const Sharding& sharding, DType dtype) = 0;
  // Registers a tensor whose cut no Sharding describes: this rank holds the box of `local_shape` at `begin`,
  // which is empty where one of its dimensions is 0. Ranks that hold the same box share the writing; other
  // boxes have no element in common, and together they are the whole tensor. The first Restore or Save checks
  // that, and its error names tensor and ranks: once, a rank sends 16 bytes a tensor into a sum over all
  // ranks, and then 16 bytes a dimension, for each different way to cut, to all. A list of boxes takes about
  // 60 bytes a rank in every manifest, whatever the number of tensors that it is for; a Sharding takes one
  // line.
  virtual absl::Status AddBox(absl::string_view name, Memory memory, std::vector<int64_t> shape,
                              std::vector<int64_t> begin, std::vector<int64_t> local_shape, DType dtype) = 0;
  // Registers state of this rank alone (data cursor, residuals): saved by each rank, restored by the same
  // rank number, with the same size; at another world size Restore leaves it untouched on ranks that had
  // none, and says so in the log. `rule`, equal on all ranks, says what happens to the state of ranks that no
  // longer exist; not kMerge.
  virtual absl::Status AddPerRank(absl::string_view name, Memory memory,
                                  PerRankRule rule = PerRankRule::kDrop) = 0;
  // Registers bytes of this rank alone whose number may change from save to save (a pickled loader, RNG).
  // Each Save that is not skipped calls `save`, and Restore calls `load` once everything is verified, both on
  // the calling thread; an error of either is that of the Save or Restore. At most kByteEntriesMax together.
  virtual absl::Status AddBytes(absl::string_view name, std::function<absl::StatusOr<std::string>()> save,
                                std::function<absl::Status(absl::string_view)> load,
                                PerRankRule rule = PerRankRule::kDrop) = 0;

  // Collective, `options` equal on all ranks. Reads the newest committed and intact checkpoint into the
  // registered memory; nullopt when there is none. No rank returns before all verified. After an error the
  // registered memory may hold parts of what was read. A checkpoint that is proven to be damaged (another
  // checksum or length, or a file that is absent although the manifest is there) is passed over with a loud
  // log line, at most max_rollback in a row; then DataLoss. Unavailable: the storage cannot be read, or the
  // newest checkpoint that the head knows is not where it was (nothing mounted?). Nothing older is restored
  // instead. Exit with any code but 0 then: gtrain waits for the storage, starts the job again and charges no
  // restart.
  virtual absl::StatusOr<std::optional<RestoredStep>> Restore(const RestoreOptions& options = {}) = 0;

  // Copies the registered state (the only stall) and returns; writing and commit go on beside training.
  // All ranks call it with the same step, which never falls: InvalidArgument below one that was saved or
  // restored. False: skipped, because the previous save is still being written.
  // True without a second save where SaveIfDue saved this step last and nothing came of it that is an error:
  // a last Save after the loop is one commit.
  virtual absl::StatusOr<bool> Save(int64_t step) = 0;
  // With CheckpointOptions::lazy, call it after each Save before anything changes the registered state, in a
  // training step right before the optimiser. Blocks until the state is copied, and helps to copy it; after a
  // step that computed for longer than a copy takes it costs nothing, as without a save. Not a collective.
  // From here on the save is committed whatever becomes of this process. Nothing else fences: a save that was
  // not fenced when Wait, Save, SaveIfDue or the destructor is called may hold values of two steps, so it is
  // given up with a warning, and Wait (or, with on_error: fail, Save) returns FailedPrecondition.
  virtual void Fence() = 0;
  // Save when the policy says so: every_steps of `step`, or a duration, or no policy at all (then as often as
  // Daly's formula says for what a save is measured to cost and how often the job was interrupted); and once
  // as soon as a machine of the job is about to be taken away (Session::PreemptionNotice) or the user asks to
  // stop. Rank 0 decides and all agree through `comm`, a collective at each call (null: a communicator of its
  // own).
  virtual absl::StatusOr<bool> SaveIfDue(int64_t step, Communicator* comm) = 0;
  // Whether the last SaveIfDue found that the user asked to stop (Session::StopRequested of rank 0, equal on
  // all ranks): leave the loop. It has saved the state, unless an earlier save was still being written.
  virtual bool stop_agreed() const = 0;
  // Waits until the last Save is committed or failed, and returns its error.
  virtual absl::Status Wait(absl::Duration timeout) = 0;
  // Rank 0: the newest save has failed, and the claim of the directory is not there: it was removed, renamed
  // or unmounted. This checkpointer may never save again; another one may.
  virtual bool misplaced() const { return false; }
  // Rank 0, once it has started: the file system that the directory lies on. Nullopt: it is in a bucket.
  virtual std::optional<uint64_t> device() const { return std::nullopt; }
  // Returns the step of the newest commit that this process knows of.
  virtual std::optional<int64_t> LastCommitted() const = 0;
};

}  // namespace gtrain
