// A rank's membership in its job.
#pragma once
#include <gtrain/sharding.h>

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
#include "comm/port/communicator.h"

namespace gtrain {

namespace port {
class WriterHost;
}

struct SessionOptions {
  // Entry barrier: all ranks of the generation joined. A process that was started beside a generation first
  // waits for its place, for as long as it is not needed; that does not count.
  absl::Duration join_timeout = absl::Minutes(10);
  // This process means to call Rejoin when its generation is over. Only a job with `elastic.mode: in-place`
  // lets it; in others it is ended as without this.
  bool stays = false;
  // Rejoin waits so long for the end of the generation, at most join_timeout; then DeadlineExceeded.
  absl::Duration over_timeout = absl::InfiniteDuration();
  // Such a process, when it was started beside a generation, does not wait for its place in the join: Rejoin
  // does, which is to be called first (has_place), so what the program does before holds nobody up. In a job
  // with a `mesh` of more than dp it waits all the same, for what it prepares depends on its place.
  bool place_later = false;
};

// What ranks need to compute the same bits whatever their number (`elastic.determinism: bitwise`).
struct Determinism {
  int virtual_ranks = 0;  // parts of a step; 0: the job does not ask for it
  std::string threads;    // settings of this process, which are equal on all ranks
};

struct ProgressReport {
  int64_t step = 0;
  std::optional<double> loss;
  int64_t samples = 0;  // consumed since the previous report, by this rank
};

// Kinds of Session::ReportNote.
inline constexpr char kNoteRestore[] = "restore";  // what the state was restored from
inline constexpr char kNoteOwner[] = "owner";      // whose the checkpoint directory is, when that changed
// The storage of checkpoints cannot be read; an empty text takes that back. A rank that said so and ends
// without an exit code of 0 has met a storage fault: the job waits for the storage, and nothing is charged
// (docs/operations.md).
inline constexpr char kNoteStorage[] = "storage";
inline constexpr char kNoteSaves[] =
    "saves";  // saves since the newest commit came to nothing; empty: no more
// Which samples are trained next (sharding/ledger/audit.h), when a generation begins to train and at the end.
inline constexpr char kNoteSamples[] = "samples";
// An actor threw, or was lost with its process, and what became of it. Each is an event of the job.
inline constexpr char kNoteActors[] = "actors";

// Thread-safe. Owns one background thread that talks to the keeper; starts no other, installs no
// signal handler. In a forked child every call returns FailedPrecondition and nothing is sent.
class Session {
 public:
  // Joins from the environment (docs/protocols/rank-environment.md) and waits for all ranks.
  // Outside gtrain (no GTRAIN_GENERATION) it makes a session of one rank that reports nowhere,
  // so the same program runs by hand; several ranks of another launcher (WORLD_SIZE > 1) are refused.
  // DeadlineExceeded: some rank did not join in time.
  static absl::StatusOr<std::unique_ptr<Session>> Join(const SessionOptions& options = {});
  virtual ~Session() = default;

  // Called when Alive() or a collective says Unavailable: waits until the generation is over, for the next
  // one, and until all of its ranks have joined. After OK this process is a rank of that: rank, size,
  // generation and timeline are new, and communicators of the one before say Unavailable to every call.
  // DeadlineExceeded: that took longer than join_timeout. Unavailable: there is none for this process (it did
  // not say `stays`, its job does not allow it, or its keeper is gone): exit 75. FailedPrecondition: by hand.
  virtual absl::Status Rejoin(const SessionOptions& options) = 0;

  // False: this process came up beside a generation and has yet to call Rejoin. Its rank is a number behind
  // the ranks of that until then, and Alive says Unavailable.
  virtual bool has_place() const { return true; }

  // Of the generation that was joined last.
  virtual int rank() const = 0;
  virtual int local_rank() const = 0;
  virtual int world_size() const = 0;
  virtual uint64_t generation() const = 0;
  virtual uint64_t timeline() const = 0;
  virtual bool managed() const = 0;                       // false outside gtrain
  virtual bool has_checkpoints() const { return false; }  // GTRAIN_CHECKPOINT_URI says where
  // `mesh` of the job file with the sizes of this generation; without one all ranks lie along dp.
  virtual std::vector<MeshAxis> mesh() const { return {{"dp", world_size()}}; }
  virtual bool step_copies() const { return false; }  // elastic.step_copies of the job file
  virtual int64_t global_batch() const { return 0; }  // elastic.global_batch of the job file; 0: none
  virtual Determinism determinism() const { return {}; }
  virtual const std::string& job() const = 0;

  // Collective: every rank calls it in the same order. The session must outlive the communicator.
  // Unavailable: a member was lost, or a machine cannot be reached; exit 75. InvalidArgument and
  // FailedPrecondition: GTRAIN_COMM_ALGO or GTRAIN_COMM_TLS is none, differs, or names what a machine has
  // not; starting again does not help.
  virtual absl::StatusOr<std::unique_ptr<Communicator>> MakeCommunicator(
      const CommunicatorOptions& options = {}) = 0;

  // What every rank of the generation says, by rank; all call it in the same order, and in that of
  // MakeCommunicator, which does the same. Blocks for `timeout` at most. For blobs of some hundred bytes.
  // Unavailable: the generation is over.
  virtual absl::StatusOr<std::vector<std::string>> AllGather(absl::string_view blob,
                                                             absl::Duration /*timeout*/) {
    return std::vector<std::string>{std::string(blob)};
  }
  // What processes of one job prove to each other (GTRAIN_JOB_SECRET), and how others reach this machine.
  // Empty outside gtrain.
  struct Reach {
    std::string secret;
    std::string address;  // numeric
    std::string node;
    std::string actors_shm;  // GTRAIN_ACTORS_SHM as it is; empty: not set
  };
  virtual absl::StatusOr<Reach> reach() { return Reach(); }
  // elastic.mode of the job file is in-place.
  virtual bool in_place() const { return false; }

  // Where processes are started that save what this rank leaves behind (checkpoint/port/writer_host.h); null
  // outside gtrain. It lives as long as this.
  virtual port::WriterHost* writer_host() { return nullptr; }

  // Never blocks; the newest report wins.
  virtual void Report(const ProgressReport& report) = 0;
  // A checkpoint that this rank knows to be committed; `policy` says to people how often there is one, or
  // nothing. Never blocks. Checkpointer calls it.
  virtual void ReportCheckpoint(int64_t step, const std::string& manifest, const std::string& policy) = 0;
  // Adds to the time for which checkpoints have held up the training of this rank. Never blocks. Checkpointer
  // calls it.
  virtual void CountStall(absl::Duration time) = 0;
  // Sets a note of this rank in `gtrain status`; the newest of each kind (kNote...) counts, and at most 400
  // printable bytes of it are kept. Never blocks. Checkpointer calls it.
  virtual void ReportNote(absl::string_view kind, const std::string& text) = 0;

  // What this process says when somebody asks it (`gtrain actors`); null: nothing. The session's thread calls
  // it, for which everything else of the session waits meanwhile. Once this returns, the one before is called
  // no more.
  using AskedFunction = std::function<std::string(absl::string_view question)>;
  virtual void SetAsked(AskedFunction /*answer*/) {}

  // Ranks of this generation that have ended with exit code 0, as far as this process was told: nobody
  // replaces them, and no collective with them ends well.
  virtual std::vector<int> left() const { return {}; }
  // OK, or Unavailable with the reason once this generation is over: end the step and exit 75.
  virtual absl::Status Alive() const = 0;
  // True once the user asked to stop: save, then exit 0. Every rank may see it at another step;
  // agree on it with an AllReduce(max) before acting.
  virtual bool StopRequested() const = 0;
  // True on rank 0 once others have come up and the generation is to be re-formed, which costs least between
  // two steps. Programs whose rank 0 said ReportPause(false) in this generation are asked: the ranks agree
  // behind which step they stand still, rank 0 says ReportPause(true), and the generation ends within
  // milliseconds, if nothing is in the way. ReportPause never blocks. Nobody has to: else it ends by itself.
  virtual bool PauseRequested() const { return false; }
  virtual void ReportPause(bool /*paused*/) {}
  // Seconds left after a preemption notice.
  virtual std::optional<absl::Duration> PreemptionNotice() const = 0;
};

}  // namespace gtrain
