// Lease ends ranks without the SDK when no head was heard for the time that the head gave them. PURE.
// Private to runtime/core/agent.
//
// AgentCore owns it; only the loop's thread uses it, and it never blocks. It costs a frame a job every
// twelfth of a lease, however many ranks there are.
#pragma once
#include "runtime/core/agent/agent_context.h"
#include "runtime/core/agent/agent_model.h"

namespace gtrain::core {

class Generations;

class Lease {
 public:
  Lease(AgentContext& context, AgentModel& model, Generations& generations);

  void Start(Instant now) { lease_from_ = now; }
  void SetLength(absl::Duration fence_after);  // as a head said
  // `sent` is when the agent sent what the head has answered now. The head counts from when it heard that,
  // which is later.
  void ExtendLease(Instant sent);
  absl::Duration length() const { return fence_after_; }
  void TellLease(const JobId& job);
  void CheckLease();

 private:
  AgentContext& context_;
  AgentModel& model_;
  Generations& generations_;

  absl::Duration fence_after_ = absl::Seconds(120);
  // The head has answered what was sent then, so ranks without the SDK may run for fence_after_ from there.
  Instant lease_from_;
  bool lease_known_ = false;  // a head has said fence_after_ to this agent
  Instant next_fence_;
};

}  // namespace gtrain::core
