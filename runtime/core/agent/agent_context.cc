#include "runtime/core/agent/agent_context.h"

namespace gtrain::core {

void AgentContext::Begin(Instant now) {
  now_ = now;
  effects_.clear();
  why_.clear();
}

void AgentContext::Tell(Message message) {
  if (welcomed_) effects_.push_back(ToHead{std::move(message)});
}

void AgentContext::Command(const JobId& job, keeper::Command command) {
  effects_.push_back(ToKeeper{job, std::move(command)});
}

}  // namespace gtrain::core
