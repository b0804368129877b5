// A keeper as docs/protocols/keeper.md describes it, over simulated rank processes.
#pragma once
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "runtime/core/values/keeper_messages.h"
#include "tests/sim/ranks.h"

namespace gtrain::sim {

class KeeperModel : public std::enable_shared_from_this<KeeperModel> {
 public:
  KeeperModel(Kernel& kernel, Ranks& ranks, Checker& checker, JobId job, int machine)
      : kernel_(kernel), ranks_(ranks), checker_(checker), job_(std::move(job)), machine_(machine) {}

  void Attach(std::function<void(keeper::Report)> agent, int64_t lease);
  void Detach();  // the agent died
  void Do(const keeper::Command& command);
  // SIGKILL: what its exit records say is left behind.
  std::vector<keeper::Exited> Die();
  std::vector<RankPtr> Processes() const;  // those that are kept, too
  bool alive() const { return alive_; }
  std::function<void()> left;  // it exited by itself, after Quit
  size_t relays_held() const;

 private:
  enum class Phase { kLive, kEnding, kGone };
  struct Rank {
    RankPtr process;
    std::optional<keeper::Exited> exit;
    bool acked = false;
    std::deque<keeper::RelayUp> relays;
  };
  struct Generation {
    keeper::BeginGeneration begin;
    std::map<int, Rank> ranks;
    Phase phase = Phase::kLive;
    bool ordered = false, clean = true;
    bool keep = false;  // EndGeneration::keep
    keeper::End mode = keeper::End::kReform;
    uint64_t kill_number = 0;
  };

  struct Waiting {
    RankPtr process;
    uint64_t generation = 0;  // that it was in last
    bool ending = false;
  };
  struct How {
    keeper::End mode = keeper::End::kReform;
    int64_t grace = 0;
    bool keep = false;
  };

  void Tell(keeper::Report report);
  void TellGone(uint64_t number, bool clean, const std::string& message);
  std::vector<keeper::Kept> ListKept(bool ready) const;
  keeper::State Describe() const;
  void PrepareStart(Generation& generation, const keeper::StartRank& start);
  void Start(Generation& generation, const keeper::StartRank& start);
  void Connect(const RankPtr& process, uint64_t generation, int rank);
  void Take(Generation& generation);
  bool GoOn(Generation& generation, const keeper::StartRank& start);
  void NeverRuns(Generation& generation, const keeper::StartRank& start);
  void EndKept(uint64_t generation, int64_t grace);
  void EndWaiting(const RankPtr& process, uint64_t generation);
  void KeptDied(const RankPtr& process, const keeper::Exited& exit);
  void Released(const RankPtr& process);
  void ComesUp(const RankPtr& process);
  void WaitOn(const RankPtr& process, Generation& generation, const keeper::StartRank& start);
  void Relay(uint64_t generation, int rank, const std::string& json);
  void Exited(uint64_t generation, int rank, keeper::Exited exit);
  void End(uint64_t number, Generation& generation, const How& how);
  void KillAll(uint64_t number);
  void Advance(uint64_t number);
  void Finish(uint64_t number, bool clean);
  void CheckLease();
  void CheckFence();

  Kernel& kernel_;
  Ranks& ranks_;
  Checker& checker_;
  const JobId job_;
  const int machine_;
  bool alive_ = true, quitting_ = false;
  std::function<void(keeper::Report)> agent_;
  int64_t lease_ = 0, agent_seen_ = 0, fence_until_ = 0;
  uint64_t highest_revoked_ = 0, highest_stopped_ = 0, next_relay_ = 1, attach_ = 0;
  std::map<uint64_t, Generation> generations_;
  std::deque<Waiting> kept_;
  std::vector<std::pair<keeper::Kept, keeper::Exited>> deaths_;  // of those that died while they waited
  bool lease_over_ = false;                                      // and no agent came since
  int64_t quit_by_ = 0;
};

}  // namespace gtrain::sim
