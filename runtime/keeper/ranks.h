// The processes of ranks: how they start and how they exit. The record of an exit is on disk before the
// zombie is reaped, so a keeper that dies in between loses nothing.
//
// Owner thread only. Nothing blocks except the write of an exit's record. A start or an exit costs the same
// however many ranks there are.
#pragma once
#include <signal.h>
#include <stdint.h>
#include <sys/types.h>

#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime/keeper/children.h"
#include "runtime/keeper/context.h"
#include "runtime/keeper/outputs.h"
#include "runtime/keeper/posix.h"
#include "runtime/keeper/rank_socket.h"
#include "runtime/keeper/spawn.h"

namespace gtrain::keeper {

// What became of a process, as the exit of the rank that it was last.
Exited DescribeDeath(const RankProcess& rank, const siginfo_t& info);

// The hardware threads that the kernel lets the process run on.
std::vector<int32_t> CpusOf(pid_t pid);

class Ranks final : public ChildOwner {
 public:
  Ranks(Context& context, Children& children, Outputs& outputs, RankSocket& socket)
      : context_(context), children_(children), outputs_(outputs), socket_(socket) {}

  // Everything but the process: StartPrepared starts it with the others of this turn.
  void Prepare(GenerationRecord& record, RankProcess& rank);
  void StartPrepared(GenerationRecord& record);
  // A rank of which there is no process has ended like this.
  void NeverRuns(RankProcess& rank, Exited exit);
  // A process that went on as another rank is that one's from now on; one that waits for another generation
  // is nobody's here.
  void Take(const RankProcess& rank) { rank_of_pid_[rank.pid] = {rank.spec.generation, rank.spec.rank}; }
  void LetGo(const RankProcess& rank) { rank_of_pid_.erase(rank.pid); }
  // Gives it SIGTERM if it has not got one. `processes`: see HearersOf.
  void Term(RankProcess& rank, std::vector<ProcessEntry>* processes);

  bool OnDied(const siginfo_t& info) override;
  std::optional<uint64_t> GenerationOf(pid_t child) override;

 private:
  bool PrepareInput(RankProcess& rank);
  void FailStart(RankProcess& rank, const FailureWords& words);
  void OnStarted(RankProcess& rank, const SpawnResult& result);
  void OnStarterDied(uint64_t generation, const std::vector<int>& ranks);
  void Exit(GenerationRecord& record, RankProcess& rank, const siginfo_t& info);
  void RecordExit(RankProcess& rank);
  GenerationRecord* Find(pid_t pid, RankProcess** rank);

  Context& context_;
  Children& children_;
  Outputs& outputs_;
  RankSocket& socket_;
  std::unordered_map<pid_t, std::pair<uint64_t, int>> rank_of_pid_;  // of the living: generation and rank
};

}  // namespace gtrain::keeper
