// AgentQueries answers the head's questions: logs, commands, stacks, consoles. PURE. Private to
// runtime/core/agent.
//
// AgentCore owns it; only the loop's thread uses it; it never blocks and has no state of its own.
#pragma once
#include <cstdint>
#include <string>

#include "runtime/core/agent/agent_context.h"
#include "runtime/core/agent/agent_model.h"

namespace gtrain::core {

class AgentQueries {
 public:
  AgentQueries(AgentContext& context, AgentModel& model)
      : context_(context), model_(model), config_(context.config()) {}

  void OnQuery(const AgentQuery& query);
  void OnExecDone(const keeper::ExecDone& done);
  void OnConsoleTurn(const keeper::ConsoleTurn& turn);

 private:
  void Answer(uint64_t query, bool ok, const std::string& text);

  AgentContext& context_;
  AgentModel& model_;
  const AgentConfig& config_;
};

}  // namespace gtrain::core
