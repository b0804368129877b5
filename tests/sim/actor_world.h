// One run of a job of actors: real clusters, with their hosts, connections and directories, in simulated
// processes that are killed, stand still, lose connections and are cut off; their generations; and what the
// programs in them ask. Everything that happens follows from the seed.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "actors/exec/cluster.h"
#include "tests/sim/actor_net.h"
#include "tests/sim/actor_truth.h"
#include "tests/sim/kernel.h"

namespace gtrain::sim {

enum class ActorFault { kKill, kBreak, kCut, kGiveUp, kPause, kCount };

struct ActorProfile {
  int processes = 4;
  int64_t length = 30 * kSec;    // of work and faults
  int64_t fault_gap = 3 * kSec;  // on average
  int64_t work_gap = 20 * kMs;   // of a process
  double weights[static_cast<int>(ActorFault::kCount)] = {};
  double kept = 0.5, throws = 0.02, comes_again = 0.7, same_address = 0.5;
  int64_t runs_max = 20 * kMs;          // a call
  int64_t told_within = 3 * kSec;       // of a generation
  int64_t given_up_within = 20 * kSec;  // a process that is given up ends so late at most
  int actors_max = 40;
  size_t mailbox_calls = 1024;
  ActorNet::Faults network;
};
ActorProfile DrawActors(Rng& rng);

class ActorWorld {
 public:
  ActorWorld(uint64_t seed, const ActorProfile& profile);
  ~ActorWorld();
  ActorWorld(const ActorWorld&) = delete;
  ActorWorld& operator=(const ActorWorld&) = delete;

  // Work and faults, then quiet, then whether all is as it was promised.
  void RunSwarm();

  // ---- for a run that says itself what happens
  // All processes, and their first generation, which each has heard of.
  void Begin();
  void Run(int64_t time);
  // False: it was not so within `limit`.
  bool RunUntil(const std::function<bool()>& condition, int64_t limit);
  struct Spawning {
    bool keep = false;
    int restarts = 1'000'000;
    actors::Placement placement;
    std::string name;
    int64_t timeout = kMin;
  };
  int Spawn(int process, const Spawning& how);
  size_t Call(int process, int actor, int method, int64_t timeout);
  void Kill(int process);
  // The job goes on without it, and it hears nothing of that until it is ended.
  void GiveUp(int process);
  // It hears of no generation meanwhile.
  void Deaf(int process, bool deaf) { processes_[static_cast<size_t>(process)]->deaf = deaf; }
  // Without who is dead or given up; with others in their places where `replace`.
  void Generation(bool replace);
  // Those that are there, in the order of their ranks.
  std::vector<int> Members() const;

  ActorProfile profile;
  Kernel kernel;
  ActorTruth truth;
  ActorNet net;

 private:
  // The clock of a machine begins somewhere.
  class MachineClock final : public Clock {
   public:
    MachineClock(const Kernel& kernel, int64_t offset) : kernel_(kernel), offset_(offset) {}
    Instant Now() const override { return {kernel_.now() + offset_}; }
    absl::Time WallNow() const override { return ManualWall(kernel_.Now()); }

   private:
    const Kernel& kernel_;
    const int64_t offset_;
  };
  struct Process {
    Process(int i, int s, const Kernel& kernel, int64_t offset) : index(i), slot(s), clock(kernel, offset) {}
    const int index, slot;
    const MachineClock clock;
    int rank = -1;  // -1: it has heard of no generation yet
    int told = 0;   // the newest that it has heard of, or does not hear of any more
    bool alive = true, given_up = false, deaf = false;
    int64_t paused_until = 0;
    std::optional<int64_t> wakes_at;
    std::set<actors::BegunCall*> begun;
    std::string endpoint;
    std::unique_ptr<actors::Cluster> cluster;
  };
  class Ranks;

  int Start(int slot, const std::string& endpoint);
  actors::ActorClass TypeOf(Process* process);
  void Finish(ActorTruth::Life* life, size_t call, actors::BegunCall* begun);
  void Wake(Process& process, int64_t when);
  void Turn(Process& process);
  void Tell(Process& process, int generation, int rank, const std::vector<std::string>& table);
  void GenerationSoon();
  void WorkLoop(int process);
  void WorkOnce(Process& process);
  void SpawnAny(Process& process);
  void CallAny(Process& process);
  void FindAny(Process& process);
  void EndAny(Process& process);
  void FaultLoop();
  void Inject(ActorFault fault);
  void CutSome();
  void CalmDown();
  void Audit();
  void AuditName(int actor, Process& from);
  Process* AnyMember();

  std::vector<std::unique_ptr<Process>> processes_;
  std::vector<int> slots_;          // the newest process of each
  std::vector<std::string> names_;  // of actors
  int generation_ = 0;
  bool working_ = false, generation_soon_ = false;
  uint64_t cuts_ = 0, turns_ = 0;
  int64_t turns_since_ = 0;
};

}  // namespace gtrain::sim
