// Rank processes and the gangs they form, as the world really is: the checkers compare what the control plane
// says with this. A gang steps while every rank of its generation is alive, joined and able to talk to the
// others.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/ids.h"
#include "elastic/plan/hand_over.h"
#include "runtime/core/values/keeper_messages.h"
#include "runtime/core/values/messages.h"
#include "runtime/core/worker/worker_core.h"
#include "sharding/ledger/ledger.h"
#include "tests/sim/kernel.h"
#include "tests/sim/saves.h"

namespace gtrain::sim {

class Checker;

// Steps over samples, with a state that has a size: a step takes as long as the largest share of its batch.
struct Training {
  sharding::SampleOptions samples;
  int64_t sample_time = 30 * kMs;      // of one rank
  int64_t save_every = 0;              // time; 0: only when a notice comes
  int64_t state_bytes = 0;             // of a rank; equal on all
  int64_t link_rate = 0;               // bytes a second, from those that have the state to those that need it
  int64_t store_rate = 0;              // bytes a second, of all ranks together, to and from the storage
  int64_t TimeOf(int64_t rate) const;  // to move the state
  int64_t StepTime(int ranks) const { return (samples.global_batch + ranks - 1) / ranks * sample_time; }
};

// The behaviour of a job's program, which is not in the spec.
struct Program {
  bool sdk = false;    // joins a session
  bool stays = false;  // and can go on in another generation, where the job lets it
  // How long a process that stays takes at most to let go of its generation, mostly; 0: none does by itself.
  int64_t letting_go = 300 * kMs;
  double lets_go_late = 0.05;  // part of those that take up to 20 s
  bool pauses = true;          // between two steps, where it stays and is asked to
  int64_t steps = 0;           // it ends well after so many; 0: never
  int64_t step_time = 10 * kSec;
  int64_t startup = 2 * kSec;
  int checkpoint_every = 0;  // gang steps; 0: never
  // What a program of gtrain::Elastic does beside that. Without samples: nothing of it.
  std::optional<Training> training;
  std::string directory;  // its checkpoints; empty: one of its own
  int keep = 3;
  int64_t commit_timeout = 10 * kMin;
  int64_t join_timeout = 10 * kMin;
  double crash_at_start = 0;
  double ignores_term = 0.1;
};

struct RankProcess {
  JobId job;
  uint64_t generation = 0;
  int rank = 0;
  int machine = 0;
  int64_t pid = 0;
  bool alive = true;
  bool up = false;  // past its startup; for an SDK program: joined
  bool hung = false;
  bool stuck = false;  // in state D: SIGKILL does nothing
  bool asked_to_end = false;
  bool over = false;    // knows that its generation is
  bool frozen = false;  // stands still for a while, as its cgroup or its machine does
  int64_t thawed_at = -1;
  std::vector<std::string> unread;        // what came down meanwhile
  bool lies = false;                      // reports steps it did not make
  keeper::Kept born;                      // the rank as which it was started
  bool in_place = false;                  // its environment says that the job lets it stay
  bool stays = false;                     // it has said that it can go on in another generation
  bool termed = false;                    // it got SIGTERM, and can go on no more
  bool released = false;                  // nothing that it says belongs to its generation any more
  bool waits = false;                     // it comes up beside its generation, and is in no gang
  bool asked = false;                     // likewise, and whether it still answers
  bool stopped = false;                   // by a signal
  bool kept = false;                      // it waits between two generations
  bool deaf = false;                      // its connection to its keeper is gone
  int64_t step = -1;                      // the newest one that it has in memory; only where it stays
  sharding::SampleCursor cursor;          // likewise, of a program with Training
  std::optional<int64_t> saved_at;        // likewise: when the newest save began, or training did
  int64_t computes_until = 0;             // likewise: it hears of nothing before
  elastic::BatchShare share;              // likewise: what it computes
  elastic::BatchShare computed = {0, 0};  // likewise: of the step for which its generation was over meanwhile
  bool noticed = false;                   // in this generation, that a machine of the job goes
  std::optional<core::WorkerCore> worker;
  std::string table;  // what the entry barrier gave it
  // Sends to its keeper; empty when the keeper is gone.
  std::function<void(const std::string& json)> relay;
  std::function<void(const std::string& line)> report;
  std::function<void(keeper::Exited)> exited;
  std::function<void()> let_go;  // kRankReleased
};
using RankPtr = std::shared_ptr<RankProcess>;

struct Gang {
  JobId job;
  uint64_t generation = 0;
  uint64_t timeline = 0;
  int world = 0;
  std::map<int, RankPtr> ranks;
  int64_t step = 0;
  bool ticking = false;
  int ups = 0;
  int64_t stepped_at = 0;  // or became whole
  sharding::SampleCursor cursor;
  int64_t saved_at = 0;  // or began
  bool saved_for_notice = false;
  bool pauses = false;  // rank 0 was asked to stand still behind a step
};
// False: the process is kept, or is a member of a later gang.
bool IsOf(const RankProcess& rank, const Gang& gang);

// The checkpoints of a job that saves by itself, for a resume to find. Checkpoints of the SDK are in Saves.
struct Checkpoints {
  int64_t newest_step = 0;
  std::set<std::pair<uint64_t, int64_t>> committed;  // (timeline, step)
};

// What rank 0 says of its data behind the last step.
inline constexpr char kAllTrained[] = "all is trained";

class Ranks {
 public:
  Ranks(Kernel& kernel, Checker& checker) : saves(kernel), kernel_(kernel), checker_(checker) {}

  std::map<JobId, Program> programs;
  // Asked once for each job.
  std::function<Program(const JobId&)> program_of = [](const JobId&) { return Program{}; };
  // Called with each batch that the ranks of a program with Training have applied, and before the first of a
  // generation; may be empty.
  std::function<void(const Gang& gang, const sharding::SampleRange& batch)> on_batch;
  std::function<void(const Gang& gang)> on_begin;
  // Whether the ranks on these two machines can talk.
  std::function<bool(int, int)> reachable = [](int, int) { return true; };

  RankPtr Spawn(RankPtr rank, int world, uint64_t timeline);
  // A process that comes up beside its generation. Later it lets go, as one that waits for the next one.
  void SpawnBeside(const RankPtr& rank, int world);
  // A process that stays hears that its generation is over.
  void Revoke(const RankPtr& rank);
  // One that waits is asked whether it still answers.
  void Ask(const RankPtr& rank);
  // A kept process is that rank of that generation from now on.
  void GoOn(const RankPtr& rank, uint64_t generation, int number, int world, uint64_t timeline);
  void FromAgent(const RankPtr& rank, const std::string& text);  // a relay that came down
  void Term(const RankPtr& rank, bool save);
  void Notice(const RankPtr& rank, uint32_t seconds, int signal);
  void KillProcess(const RankPtr& rank, keeper::Cause cause, int code, int signal);
  void Hang(const RankPtr& rank) { rank->hung = true; }
  void Freeze(const RankPtr& rank, int64_t duration);
  void FreezeMachine(int machine, int64_t duration);
  // A process without its keeper: an SDK rank ends itself.
  void Orphan(const RankPtr& rank);

  Gang* FindGang(const JobId& job, uint64_t generation);
  const std::map<std::pair<JobId, uint64_t>, Gang>& gangs() const { return gangs_; }
  const std::map<int64_t, RankPtr>& living() const { return living_; }
  RankPtr Random();
  std::map<JobId, Checkpoints> checkpoints;
  Saves saves;
  // Whether the job has a checkpoint of that step.
  bool Committed(const JobId& job, uint64_t timeline, int64_t step) const;

 private:
  const Program& ProgramOf(const JobId& job);
  Gang& GangOf(const RankProcess& rank, int world, uint64_t timeline);
  void ComeUp(const RankPtr& rank, int64_t delay);
  void Join(const RankPtr& rank);
  void Rejoin(const RankPtr& rank, int64_t delay);
  void LetGo(const RankPtr& rank, int64_t delay);
  void Up(const RankPtr& rank);
  void Begin(Gang& gang, int64_t step);
  void BeginTraining(Gang& gang, int64_t restored);
  // The first batch of a generation, which takes so long, of which ranks compute for `computes`.
  struct FirstBatch {
    int64_t takes = 0, computes = 0;
    std::vector<elastic::BatchShare> shares;  // index = rank
  };
  FirstBatch FirstBatchOf(const Gang& gang, const elastic::Agreement& agreed, int64_t transfer);
  void Train(const JobId& job, uint64_t generation, const sharding::SampleCursor& cursor,
             const FirstBatch& first);
  int64_t StepTime(const Gang& gang);
  void Compute(const Gang& gang, int64_t takes);
  void Apply(Gang& gang);
  bool SaveIsDue(const Gang& gang);
  void Save(Gang& gang);
  void SayWhere(const Gang& gang, const std::string& text);
  void MeetStorageFault(const RankPtr& rank, const std::string& text);
  void AwaitTable(const RankPtr& rank, uint64_t generation, int64_t timeout);
  void Tick(const JobId& job, uint64_t generation);
  bool CanStep(const Gang& gang) const;
  void Report(Gang& gang);
  void MayPause(const Gang& gang);
  bool Pauses(Gang& gang);
  void ReportLinks(const Gang& gang);
  void Do(const RankPtr& rank, core::WorkerStepResult result);

  Kernel& kernel_;
  Checker& checker_;
  int64_t next_pid_ = 1000;
  std::map<int64_t, RankPtr> living_;
  std::map<std::pair<JobId, uint64_t>, Gang> gangs_;
};

}  // namespace gtrain::sim
