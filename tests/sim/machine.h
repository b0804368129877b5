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

#include "runtime/core/agent/agent_core.h"
#include "runtime/core/agent/keeper_order.h"
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
  // Drops the link: for `stalled` nothing passes between the agent and the keeper, then the keeper drops its
  // agent; both live, messages under way are lost, and the agent attaches again.
  void DropKeeperLink(const JobId& job, int64_t stalled);
  // Installs, for `duration`, only an agent that cannot speak to the keepers.
  void InstallOtherAgent(int64_t duration);
  void PowerOff(int64_t down);
  // Its cloud announces what happens in `left`, or takes that back.
  void CloudSays(std::optional<int64_t> left, core::NoticeKind kind = core::NoticeKind::kLeave,
                 int64_t frozen = 0);
  // The whole machine stands still, agent and ranks.
  void Freeze(int64_t duration);
  // Each file work of the job takes so long here, kNever: it ends with the machine. 0: the files are well
  // again, and what waited is done.
  static constexpr int64_t kNever = INT64_MAX;
  void SlowFiles(const JobId& job, int64_t each);

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
  const std::map<JobId, int64_t>& slow_files() const { return slow_files_; }
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

  // Work of the agent in a job's directories, in order, beside its loop (runtime/agent/job_files.h).
  struct FileWork {
    bool touches = false;  // else it only waits for what comes before it
    std::function<void()> done;
  };
  struct Files {
    std::deque<FileWork> work;  // the first is under way
    uint64_t turn = 0;          // of the first, for the event of its end
  };

  void Step(const core::AgentEvent& event);
  void Take(core::AgentEvent event);
  void Prepare(core::StartGeneration start);
  void Post(const JobId& job, bool touches, std::function<void()> done);
  void Work(const JobId& job);
  void WorkDone(const JobId& job, uint64_t turn);
  void Handle_(core::AgentEvent event);
  void Do(core::ToHead& effect);
  void Do(core::ToKeeper& effect);
  void Do(core::ReadStacks& effect);
  void Do(core::LookAtRanks&) {}  // simulated programs never rest
  void Do(core::ReadLog& effect);
  void Do(core::Reconnect& effect);
  void Do(core::Beat&) {}  // machines are connected directly here
  void Do(core::LetThrough&) {}
  void Do(core::GoThrough&) {}
  void Do(core::Leave& effect);
  void Do(core::WriteFile& effect);
  void Do(core::ShareCopies& effect) { copies_.insert(effect.job); }
  void Do(core::DropCopies& effect);
  void Wake();
  void TryConnect();
  void Watch();
  void AttachKeeper(const JobId& job);
  void SendKeeper(const core::ToKeeper& order);
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
  core::KeeperOrder order_;
  std::map<JobId, Files> files_;  // jobs with file work that is not done
  uint64_t file_turns_ = 0;
  std::deque<std::function<void()>> done_;  // file work that ended while the agent stood still
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
  std::map<JobId, int64_t> slow_files_;                    // so do file systems
  size_t inbox_max_ = 0;
};

}  // namespace gtrain::sim
