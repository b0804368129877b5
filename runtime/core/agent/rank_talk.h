// RankTalk takes in what ranks say and write. PURE. Private to runtime/core/agent.
//
// AgentCore owns it; only the loop's thread uses it; it never blocks and has no state of its own.
#pragma once
#include "runtime/core/agent/agent_context.h"
#include "runtime/core/agent/agent_model.h"

namespace gtrain::core {

class Exchanges;
class HeadTalk;
class Idleness;
class Tails;

class RankTalk {
 public:
  RankTalk(AgentContext& context, AgentModel& model, HeadTalk& head, Exchanges& exchanges, Tails& tails,
           Idleness& idleness);

  void OnRelay(const JobId& job, const keeper::RelayUp& relay);
  void OnOutput(const JobId& job, const keeper::Output& output);
  void OnReport(const JobId& job, const keeper::ReportBytes& report);

 private:
  void Apply(const JobId& job, AgentGeneration& generation, int number, const RankSaid& said);
  void TakeProgress(AgentRank& rank, const RankSaid& said);
  void CountSamples(AgentRank& rank, double samples);
  void TakeRefusal(const JobId& job, AgentGeneration& generation, int number, const keeper::Output& output);
  void TakeNote(const JobId& job, AgentGeneration& generation, int number, const RankSaid& said);
  void TakeRecord(const JobId& job, AgentGeneration& generation, const keeper::RelayUp& relay,
                  const std::string& text);

  AgentContext& context_;
  AgentModel& model_;
  HeadTalk& head_;
  Exchanges& exchanges_;
  Tails& tails_;
  Idleness& idleness_;
};

}  // namespace gtrain::core
