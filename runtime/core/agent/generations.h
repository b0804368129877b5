// Generations leads a generation from its start, or its adoption from a keeper, to its end on this machine.
// PURE. Private to runtime/core/agent.
//
// AgentCore owns it; only the loop's thread uses it; it never blocks and has no state of its own.
#pragma once
#include <string>

#include "runtime/core/agent/agent_context.h"
#include "runtime/core/agent/agent_model.h"

namespace gtrain::core {

class Lease;
class NearCopies;
class Starter;
class Tails;

class Generations {
 public:
  Generations(AgentContext& context, AgentModel& model, Starter& starter, Lease& lease, NearCopies& copies,
              Tails& tails);

  // The head orders these.
  void OnRevoke(const Revoke& revoke);
  void OnAckExit(const AckExit& ack);
  void OnForget(const ForgetJob& forget);
  void OnNoticeRanks(const NoticeRanks& notice);
  void OnRanksLeft(const RanksLeft& left);
  void OnPauseRanks(const PauseRanks& pause);

  // The keeper of a job says these.
  void OnState(const JobId& job, const keeper::State& state);
  void OnStarted(const JobId& job, const keeper::Started& started);
  void OnReady(const JobId& job, const keeper::Ready& ready);
  void OnExited(const JobId& job, const keeper::Exited& exited);
  void OnGone(const JobId& job, const keeper::Gone& gone);
  void OnKeeperLost(const KeeperLost& event);

  // `revoke` names the job and says how: every generation up to its own ends.
  void End(AgentJob& record, const Revoke& revoke);
  // Tells the head that a generation is gone which has nothing here. The head takes that for "this node holds
  // nothing of the job up to there" and begins the next one, so it waits until the older ones are gone.
  void OweGone(const JobId& job, AgentJob& record, Generation generation, const std::string& message);
  // Tells the head which generations are gone, none before those that are older.
  void TellGone(const JobId& job, AgentJob& record);
  // Likewise of the processes that wait here, which a hello may have come too early to name.
  void TellKept(const JobId& job, AgentJob& record);
  // Forgets the generations of which the head has acknowledged everything.
  void FinishIfSettled(const JobId& job);

 private:
  AgentGeneration& Adopt(const JobId& job, AgentJob& record, const keeper::GenerationHeld& held);
  void ReadNote(const std::string& text, AgentGeneration& generation);
  void LoseUnstarted(const JobId& job, AgentGeneration& generation);
  static void AdoptNics(AgentJob& record, AgentGeneration& generation, int rank);
  void AdoptRank(const JobId& job, const keeper::GenerationHeld& held, const keeper::RankHeld& rank,
                 AgentRank& info);
  bool LetsEmptyKeeperGo(const JobId& job, const keeper::State& state);
  static std::vector<ProcessId> Processes(const std::vector<keeper::Kept>& kept);
  void EndWhatNeverBegan(const JobId& job, const AgentJob& record, const keeper::State& state);

  AgentContext& context_;
  AgentModel& model_;
  const AgentConfig& config_;
  Starter& starter_;
  Lease& lease_;
  NearCopies& copies_;
  Tails& tails_;
};

}  // namespace gtrain::core
