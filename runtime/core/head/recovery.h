// Recovery: the start of a head from its records, also from lost or older ones, and its end when a newer
// head serves the cluster (faults H8, H9). PURE. Private to runtime/core/head.
//
// HeadState owns it; only the loop's thread uses it, and it never blocks.
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

  // These are called once, at the start.
  void Begin(Instant now);
  void Adopt(Job& job, Instant now);
  void SetAside(const JobId& job, std::vector<std::string> keys) { set_aside_[job] = std::move(keys); }
  // Hands out the keys of its records that were set aside, once.
  std::vector<std::string> TakeSetAside(const JobId& job);

  // True when a hello shows that another head serves this cluster; StepDown ends this one then.
  bool Outranked(const AgentHello& hello) const;
  void StepDown(const AgentHello& hello);

  // True once the agents had the time to say what they hold.
  bool Settled(Instant now) const;
  // True when the head takes up what agents hold of the job: all records were lost or are older, or that of
  // this job cannot be read.
  bool TakesUp(const JobId& job) const;
  bool WantsDescriptions() const { return model_.cluster.recovering || !set_aside_.empty(); }
  // True when the head does not know the generation that an agent holds, so that its description must come
  // first.
  bool AwaitsDescription(const HeldGeneration& held) const;
  // True while a node holds a generation of the job that proves nothing and that no person has accepted.
  bool AwaitsWord(const JobId& job) const;
  // Processes of it may wait on a node that has not said hello to this head, and is not dead either: what is
  // granted, or ended, before that would lose what they have in memory.
  std::optional<NodeId> AwaitsHello(const Job& job) const;
  // The node holds nothing of the job; the head judges that once all agents had the time to speak.
  void JudgeLater(const JobId& job, const NodeId& node) { unsettled_.emplace(job, node); }

  void OnDescribed(Node& node, const GenerationDescribed& described, Instant now);
  void OnGone(const NodeId& node, const GenerationGone& gone);
  void ForgetNode(const NodeId& node);
  void RecoveryTimers(Instant now);
  std::optional<Instant> NextDeadline() const;

 private:
  void ContinueGoodput(Job& job, Instant now);
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
  // The jobs whose records are incomplete or cannot be read, with the keys of those that are there.
  std::map<JobId, std::vector<std::string>> set_aside_;
  std::set<std::pair<JobId, NodeId>> unsettled_;  // judged at settle_at_
  // A node holds these without a seal: they are neither taken up nor granted anew before somebody says so.
  std::map<std::pair<JobId, NodeId>, HeldGeneration> unproven_;
};

}  // namespace gtrain::core
