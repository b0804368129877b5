// Links decides which node a job does without when two of its nodes reach the head but not each other (fault
// W5). PURE. Private to runtime/core/head.
//
// HeadState owns it; only the loop's thread uses it; it never blocks and has no state of its own.
#pragma once
#include <optional>
#include <string>

#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_model.h"

namespace gtrain::core {

class Faults;
class RankNews;

class Links {
 public:
  Links(HeadContext& context, HeadModel& model, Faults& faults, RankNews& ranks);

  void OnLinkDown(const NodeId& node, const LinkDown& report, Instant now);
  void LinkStep(Job& job, Instant now);
  void ForgetLinks(const NodeId& node);
  void Avoid(Job& job, const NodeId& node, std::string why, Instant now);
  void EndAvoidances(const NodeId& node, const std::string& why);

 private:
  std::optional<NodeId> NodeToAvoid(const Job& job) const;
  void EndAvoidance(Job& job, const NodeId& node, const std::string& why);

  HeadContext& context_;
  HeadModel& model_;
  const HeadConfig& config_;
  Faults& faults_;
  RankNews& ranks_;
};

}  // namespace gtrain::core
