// One machine: an agent (AgentCore with a connection and handles on keepers, as runtime/agent runs it), its
// keepers, their ranks. The agent has a supervisor; keepers and ranks outlive it.
#pragma once
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "runtime/core/agent_core.h"
#include "tests/sim/keeper_model.h"
#include "tests/sim/network.h"

namespace gtrain::sim {

struct MachineConfig {
  int index = 0;
  NodeId node;
  std::string hostname;
  int cpus = 4;
  bool clone = false;  // a copy of another machine's state directory: the same key (fault N4)
};

class Machine {
 public:
  using ParseSpec = std::function<absl::StatusOr<spec::JobSpec>(absl::string_view)>;
  Machine(Kernel& kernel, Network& network, Ranks& ranks, Checker& checker, MachineConfig config,
          ParseSpec parse);

  void StartAgent();
  void KillAgent(int64_t down);  // restarted after `down`
  void PauseAgent(int64_t duration);
  void KillKeeper(const JobId& job);
  // For `stalled` nothing passes between the agent and the keeper, then the keeper drops its agent; both
  // live, what was under way is lost, and the agent attaches again.
  void DropKeeperLink(const JobId& job, int64_t stalled);
  // For so long only an agent that cannot speak to the keepers is installed.
  void InstallOtherAgent(int64_t duration);
  void PowerOff(int64_t down);
  // Its cloud announces what happens in `left`, or takes that back.
  void CloudSays(std::optional<int64_t> left, core::NoticeKind kind = core::NoticeKind::kLeave,
                 int64_t frozen = 0);
  // The whole machine stands still, agent and ranks.
  void Freeze(int64_t duration);

  const MachineConfig& config() const { return config_; }
  int index() const { return config_.index; }
  uint64_t notice() const { return notices_; }  // changes with each
  bool powered() const { return powered_; }
  bool agent_alive() const { return core_ != nullptr; }
  bool agent_paused() const { return paused_; }
  bool stopped_for_good() const { return retired_; }
  const Incarnation& incarnation() const { return incarnation_; }
  const std::map<JobId, std::shared_ptr<KeeperModel>>& keepers() const { return keepers_; }
  size_t inbox_max() const { return inbox_max_; }
  // Jobs of whose checkpoints there are copies in its memory.
  const std::set<JobId>& copies() const { return copies_; }
  int64_t supervisor_delay = 2 * kSec;
  double keeper_start_fails = 0;
  double port_taken = 0;

 private:
  struct Handle {
    bool up = false, quitting = false;
    bool stated = false;  // its first report has arrived
    std::deque<keeper::Command> pending;
    int64_t link = 0;                    // a new one each time it attaches
    int64_t last_down = 0, last_up = 0;  // keeps both directions in order
  };

  struct DeadKeeper {
    std::vector<keeper::Exited> records;  // exits nobody has read yet
    std::vector<RankPtr> processes;
    std::string reason;
  };

  void Step(const core::AgentEvent& event);
  void Handle_(core::AgentEvent event);
  void Do(core::ToHead& effect);
  void Do(core::ToKeeper& effect);
  void Do(core::ReadStacks& effect);
  void Do(core::ReadLog& effect);
  void Do(core::Leave& effect);
  void Do(core::WriteFile&) {}
  void Do(core::ShareCopies& effect) { copies_.insert(effect.job); }
  void Do(core::DropCopies& effect) { copies_.erase(effect.job); }
  void Wake();
  void TryConnect();
  void Watch();
  void AttachKeeper(const JobId& job);
  void ToKeeperSoon(const JobId& job, Handle& handle, keeper::Command command);
  void Bury(const JobId& job, DeadKeeper dead);
  void SweepSoon(const JobId& job);
  bool KnowsItsKeepers() const;
  bool Mine(uint64_t life) const { return life == life_ && core_ != nullptr; }

  Kernel& kernel_;
  Network& network_;
  Ranks& ranks_;
  Checker& checker_;
  const MachineConfig config_;
  const ParseSpec parse_;

  bool powered_ = true, paused_ = false, retired_ = false;
  uint64_t boot_ = 1, life_ = 0, incarnations_ = 0;
  Incarnation incarnation_;
  std::unique_ptr<core::AgentCore> core_;
  std::shared_ptr<Connection> connection_;
  std::deque<core::AgentEvent> inbox_;
  std::optional<int64_t> wake_at_;
  std::optional<int64_t> noticed_for_;  // when the cloud says that it happens
  core::NoticeKind notice_kind_ = core::NoticeKind::kNone;
  int64_t notice_frozen_ = 0;
  uint64_t notices_ = 0;
  int64_t other_agent_until_ = 0;
  int64_t started_at_ = 0;
  std::map<JobId, Handle> handles_;                        // of this agent process
  std::map<JobId, std::shared_ptr<KeeperModel>> keepers_;  // processes
  std::map<JobId, DeadKeeper> dead_keepers_;               // not swept up yet
  std::set<JobId> copies_;                                 // outlive agents
  size_t inbox_max_ = 0;
};

}  // namespace gtrain::sim
