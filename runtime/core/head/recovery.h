// Recovery: a head that starts with records, with lost or older ones, and one that a newer head has replaced
// (faults H8, H9). PURE. Private to runtime/core/head.
//
// Owned by HeadState; the loop's thread only; never blocks.
#pragma once
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_model.h"

namespace gtrain::core {

class Copies;
class Faults;
class Grants;
class JobLife;
class Membership;
class OverJobs;
class RankNews;
class Reconciler;
class RememberedAnswers;

class Recovery {
 public:
  Recovery(HeadContext& context, HeadModel& model, Membership& membership, Reconciler& reconciler,
           JobLife& life, Grants& grants, Faults& faults, RankNews& ranks, Copies& copies, OverJobs& over,
           RememberedAnswers& answers);

  // At the start.
  void Begin(Instant now);
  void Adopt(Job& job, Instant now);
  void SetAside(const JobId& job, std::vector<std::string> keys) { set_aside_[job] = std::move(keys); }
  // The keys of what was set aside of it, once.
  std::vector<std::string> TakeSetAside(const JobId& job);

  // Whether a hello shows that another head serves this cluster; StepDown ends this one then.
  bool Outranked(const AgentHello& hello) const;
  void StepDown(const AgentHello& hello);

  // Whether the agents had the time to say what they hold.
  bool Settled(Instant now) const;
  // Whether what agents hold of a job is taken up: all records were lost or are older, or that of this job
  // cannot be read.
  bool TakesUp(const JobId& job) const;
  bool WantsDescriptions() const { return model_.cluster.recovering || !set_aside_.empty(); }
  // Held by an agent and not known here, or newer than what is: wait for its description.
  bool AwaitsDescription(const HeldGeneration& held) const;
  // Whether a node holds a generation of it of which nobody has said whether it counts.
  bool AwaitsWord(const JobId& job) const;
  // The node holds nothing of the job; what that means is judged once all had the time to speak.
  void JudgeLater(const JobId& job, const NodeId& node) { unsettled_.emplace(job, node); }

  void OnDescribed(Node& node, const GenerationDescribed& described, Instant now);
  void OnGone(const NodeId& node, const GenerationGone& gone);
  void ForgetNode(const NodeId& node);
  void RecoveryTimers(Instant now);
  std::optional<Instant> NextDeadline() const;

 private:
  bool Proven(const GrantSeal& seal) const;
  void AwaitWord(const Node& node, const GenerationDescribed& described);
  Job* TakeJob(const GenerationDescribed& described, Instant now);
  void TakeGeneration(Job& job, const GenerationDescribed& described, Instant now);
  void ExpectNodes(const GenerationGrant& grant, Instant now);
  void RevokeStray(Job& job, const NodeId& node, const HeldGeneration& held, Instant now);

  HeadContext& context_;
  HeadModel& model_;
  const HeadConfig& config_;
  Membership& membership_;
  Reconciler& reconciler_;
  JobLife& life_;
  Grants& grants_;
  Faults& faults_;
  RankNews& ranks_;
  Copies& copies_;
  OverJobs& over_;
  RememberedAnswers& answers_;

  Instant settle_at_, recover_until_;  // while the cluster is recovering
  // Whose records are not all there or cannot all be read, with the keys of those that are there.
  std::map<JobId, std::vector<std::string>> set_aside_;
  std::set<std::pair<JobId, NodeId>> unsettled_;  // judged at settle_at_
  // Held without a seal by a node: neither taken up nor granted anew before somebody says so.
  std::map<std::pair<JobId, NodeId>, HeldGeneration> unproven_;
};

}  // namespace gtrain::core
