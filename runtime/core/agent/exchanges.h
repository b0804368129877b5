// Exchanges runs the bootstrap all-gathers of the ranks on this machine. PURE. Private to
// runtime/core/agent.
//
// AgentCore owns it; only the loop's thread uses it; it never blocks and has no state of its own. A table
// goes to each rank.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/core/agent/agent_context.h"
#include "runtime/core/agent/agent_model.h"

namespace gtrain::core {

class Exchanges {
 public:
  Exchanges(AgentContext& context, AgentModel& model) : context_(context), model_(model) {}

  void Exchange(const JobId& job, AgentGeneration& generation, int number, const RankSaid& said,
                uint64_t relay);
  // Called when a rank has waited long enough to give up and asks which ranks are missing. Only the head
  // knows about other nodes: it answers a part that it has already.
  void SayWhoIsMissing(const JobId& job, const AgentGeneration& generation, int number, uint64_t sequence);
  void SendExchangePart(const JobId& job, const AgentGeneration& generation, uint64_t sequence);
  void OnTable(const ExchangeTable& table);
  void OnMissing(const ExchangeMissing& missing);

 private:
  void CompleteExchange(const JobId& job, AgentGeneration& generation, uint64_t sequence,
                        const std::vector<std::string>& blobs);

  AgentContext& context_;
  AgentModel& model_;
};

}  // namespace gtrain::core
