// One run: a cluster, its users, faults for a while, then quiet, then the question whether every job got
// somewhere. Everything that happens follows from the seed.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/sim/client.h"
#include "tests/sim/head_process.h"
#include "tests/sim/joins.h"
#include "tests/sim/machine.h"

namespace gtrain::sim {

enum class FaultKind {
  kHeadKill,
  kHeadPower,
  kHeadPause,
  kDiskSlow,
  kDiskError,
  kDiskFull,
  kAgentKill,
  kAgentLong,
  kAgentPause,
  kKeeperKill,
  kPower,
  kRankCrash,
  kRankOom,
  kRankSaved,
  kRankHang,
  kRankStuck,
  kRankFreeze,
  kRankLies,
  kCut,
  kOneWay,
  kRackCut,
  kClog,
  kReset,
  kHalfOpen,
  kPartial,
  kClone,
  kNotice,
  kAtRisk,
  kFreeze,
  kKeeperLink,
  kOtherAgent,
  kStaleHead,
  kSlowFiles,
  kStorageSlow,
  kStorageError,
  kStorageGone,
  kDrain,
  kClientKill,
  kJoinStorm,
  kCount
};
const char* Name(FaultKind kind);

// The faults that a seed turns on, and how often they happen.
struct Profile {
  int nodes = 3;
  int64_t faults_for = 20 * kMin;
  int faults_min = 50;
  int64_t fault_gap = 10 * kSec;
  double weights[static_cast<int>(FaultKind::kCount)] = {};
  NetworkFaults network;
  int clients = 2;
  int jobs_max = 4;
  bool shared_directory = false;  // some jobs save into one
  double port_taken = 0, keeper_start_fails = 0;
  double in_place = 0;  // part of the jobs whose processes stay
  int64_t sync_time = 3 * kMs;
  bool usual_times = false;  // those of the product, where the swarm has shorter ones
};
Profile Draw(Rng& rng);

class World {
 public:
  World(uint64_t seed, const Profile& profile);
  ~World();

  // The whole run of a seed.
  void RunSwarm();

  // For scenarios.
  void Boot();
  void RunFor(int64_t duration);
  bool RunUntil(const std::function<bool()>& condition, int64_t limit);
  void Inject(FaultKind kind);
  void HealAll();
  // Empty: every job runs, waits for a true reason, or is over.
  std::string Unsettled();

  Kernel kernel;
  Profile profile;
  Network network;
  Disk disk;
  Checker checker;
  Ranks ranks;
  std::unique_ptr<HeadProcess> head;
  std::vector<std::unique_ptr<Machine>> machines;
  std::vector<std::unique_ptr<Client>> clients;
  std::unique_ptr<Client> operator_;  // drains nodes
  Joins joins;
  int64_t recovery = 0;  // from the end of the faults to the last job's rest

  const spec::JobSpec* SpecOf(const std::string& text);
  void SetProgram(const std::string& text, const Program& program) { programs_of_text_[text] = program; }
  void AddMachine(int cpus, int clone_of = -1);
  // The ranks of two machines cannot talk for so long; 0: they can from now on.
  void CutPair(int a, int b, int64_t duration);

 private:
  void ClientLoop(int index);
  void Submit(Client& client);
  std::string DrawSpec(Program* program);
  void FaultLoop();
  void NextFault();
  void Count(FaultKind kind) { ++kernel.counts[absl::StrCat("fault ", Name(kind))], ++faults_; }
  Machine& AnyMachine() { return *machines[kernel.rng.Below(machines.size())]; }
  void HeadFault(FaultKind kind);
  void AgentFault(FaultKind kind);
  void RankFault(FaultKind kind);
  void LinkFault(FaultKind kind);
  Machine& BusyMachine();
  void AnnounceLeave(Machine& machine);
  void AnnounceFreeze(Machine& machine);
  void SpeakAsStaleHead(Machine& machine);
  void SlowFiles();
  void DrainByHand();
  void ClientFault();
  bool TrulyRunning(const core::HeadSnapshot::Job& job);
  bool TrulyWaiting(const core::HeadSnapshot::Job& job);
  std::string Leftovers();
  void DrawInPlace(Program* program, std::string* text);
  std::string LeftoverCopies();
  std::string Unreleased();
  void CheckQueues();
  void CheckJoins();

  // Its own, so that a seed without jobs in place takes the course that it took before there were any.
  Rng elastic_rng_;
  std::map<std::string, std::optional<spec::JobSpec>> specs_;
  std::map<std::string, Program> programs_of_text_;
  // Machines whose ranks cannot talk, smaller first: until when, or until when they could not.
  std::map<std::pair<int, int>, int64_t> partial_;
  std::vector<JobId> known_jobs_;
  int faults_ = 0, submitted_ = 0;
  std::pair<int, int> ranks_drawn_;  // of the spec that is being drawn: min and max
  bool quiet_ = false;
};

}  // namespace gtrain::sim
