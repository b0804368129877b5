// Tails keeps the last words of ranks, of which the head has a mirror. PURE. Private to runtime/core/agent.
//
// AgentCore owns it; only the loop's thread uses it, and it never blocks. It keeps at most 64 KiB a stream
// of each rank.
#pragma once
#include "runtime/core/agent/agent_context.h"
#include "runtime/core/agent/agent_model.h"

namespace gtrain::core {

class Tails {
 public:
  Tails(AgentContext& context, AgentModel& model) : context_(context), model_(model) {}

  void SetJoinsPieces(bool joins_pieces) { joins_pieces_ = joins_pieces; }  // the head does
  void Append(AgentTail& tail, const keeper::Output& output);
  void MirrorTails();

 private:
  AgentContext& context_;
  AgentModel& model_;
  bool joins_pieces_ = false;
};

}  // namespace gtrain::core
