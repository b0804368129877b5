// MachineNotice tells the head what the cloud says of this machine, until the head has acknowledged it.
// PURE. Private to runtime/core/agent.
//
// AgentCore owns it; only the loop's thread uses it, and it never blocks.
#pragma once
#include <cstdint>

#include "runtime/core/agent/agent_context.h"

namespace gtrain::core {

class MachineNotice {
 public:
  explicit MachineNotice(AgentContext& context) : context_(context) {}

  void OnCloudSays(const CloudSays& event);
  void OnAck(const AckNotice& ack);
  void TellNotice();
  void ForgetAck() { notice_acked_ = false; }  // another head may not know of it

 private:
  AgentContext& context_;

  NodeNotice notice_;  // what the cloud said last
  Instant notice_at_;  // when it happens
  uint64_t notice_sequence_ = 0;
  bool notice_acked_ = false;
};

}  // namespace gtrain::core
