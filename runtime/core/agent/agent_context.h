// AgentContext holds what every part of the agent works with: the configuration, the time of the step that
// runs, and the step's output. PURE. Private to runtime/core/agent.
//
// AgentCore owns it; only the loop's thread uses it, and it never blocks.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "runtime/core/agent/agent_core.h"

namespace gtrain::core {

class AgentContext {
 public:
  explicit AgentContext(AgentConfig config) : config_(std::move(config)) {}

  const AgentConfig& config() const { return config_; }
  void SetCluster(const ClusterId& cluster) { config_.cluster = cluster; }  // a head has named it

  void Begin(Instant now);
  Instant now() const { return now_; }
  // True while a head listens, so that what is told reaches it.
  bool welcomed() const { return welcomed_; }
  void SetWelcomed(bool welcomed) { welcomed_ = welcomed; }

  void Say(std::string why) { why_ = std::move(why); }  // instead of what was said before
  void Do(AgentEffect effect) { effects_.push_back(std::move(effect)); }
  void Tell(Message message);  // dropped unless welcomed; what matters is repeated after the welcome
  void Command(const JobId& job, keeper::Command command);
  AgentStep TakeStep() { return {std::move(effects_), std::move(why_)}; }

 private:
  AgentConfig config_;
  Instant now_;
  bool welcomed_ = false;
  std::vector<AgentEffect> effects_;
  std::string why_;
};

}  // namespace gtrain::core
