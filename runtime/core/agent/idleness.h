// Idleness finds ranks that rest. PURE. Private to runtime/core/agent.
//
// AgentCore owns it; only the loop's thread uses it; it never blocks and has no state of its own.
#pragma once
#include "runtime/core/agent/agent_context.h"
#include "runtime/core/agent/agent_model.h"

namespace gtrain::core {

class Idleness {
 public:
  Idleness(AgentContext& context, AgentModel& model) : context_(context), model_(model) {}

  void LookForIdle();
  void OnRanksSeen(const RanksSeen& event);
  void Heard(AgentRank& rank);

 private:
  AgentContext& context_;
  AgentModel& model_;
};

}  // namespace gtrain::core
