// NearCopies knows the jobs of whose checkpoints copies may lie on this machine. PURE. Private to
// runtime/core/agent.
//
// AgentCore owns it; only the loop's thread uses it, and it never blocks.
#pragma once
#include <map>
#include <string>

#include "runtime/core/agent/agent_context.h"
#include "runtime/core/agent/agent_model.h"

namespace gtrain::core {

class NearCopies {
 public:
  NearCopies(AgentContext& context, AgentModel& model);

  const std::map<JobId, std::string>& folders() const { return copies_; }
  void ShareNear(const JobId& job, const AgentGeneration& generation);
  void OnKeepCopies(const KeepCopies& keep);
  void Drop(const JobId& job);

 private:
  AgentContext& context_;
  AgentModel& model_;
  const AgentConfig& config_;

  std::map<JobId, std::string> copies_;  // the folder of each job
};

}  // namespace gtrain::core
