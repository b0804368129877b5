// Generations: the life of a generation on this machine behind its start: adopted from a keeper, ended, gone,
// forgotten. PURE. Private to runtime/core/agent.
//
// Owned by AgentCore; the loop's thread only; never blocks.
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

  // The head's orders.
  void OnRevoke(const Revoke& revoke);
  void OnAckExit(const AckExit& ack);
  void OnForget(const ForgetJob& forget);
  void OnNoticeRanks(const NoticeRanks& notice);
  void OnRanksLeft(const RanksLeft& left);

  // What the keeper of a job says.
  void OnState(const JobId& job, const keeper::State& state);
  void OnStarted(const JobId& job, const keeper::Started& started);
  void OnExited(const JobId& job, const keeper::Exited& exited);
  void OnGone(const JobId& job, const keeper::Gone& gone);
  void OnKeeperLost(const KeeperLost& event);

  void End(const JobId& job, AgentJob& record, Generation up_to, EndMode mode, absl::Duration grace,
           const std::string& reason);
  // Of a generation that has nothing here. The head takes it for "this node holds nothing of the job up to
  // there" and begins the next one, so it waits for those before it.
  void OweGone(const JobId& job, AgentJob& record, Generation generation, const std::string& message);
  // In the order of the generations: none before those that are older.
  void TellGone(const JobId& job, AgentJob& record);
  // Forgets what the head has acknowledged whole.
  void FinishIfSettled(const JobId& job);

 private:
  AgentGeneration& Adopt(const JobId& job, AgentJob& record, const keeper::GenerationHeld& held);
  void ReadNote(const std::string& text, AgentGeneration& generation);
  void AdoptRank(const JobId& job, const keeper::GenerationHeld& held, const keeper::RankHeld& rank,
                 AgentRank& info);
  bool LetsEmptyKeeperGo(const JobId& job, const keeper::State& state);
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
