// Reconciler compares what a node holds with what the head has granted and revoked, and settles each
// difference at once. PURE. Private to runtime/core/head.
//
// HeadState owns it; only the loop's thread uses it; it never blocks and has no state of its own. A hello
// costs a look at each job and at each generation that the node holds.
#pragma once
#include <map>
#include <vector>

#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_model.h"

namespace gtrain::core {

class Copies;
class Faults;
class Grants;
class JobLife;
class Leaves;
class Newcomers;
class RankNews;
class SurvivorSave;
class Recovery;

class Reconciler {
 public:
  Reconciler(HeadContext& context, HeadModel& model, Recovery& recovery, JobLife& life, Grants& grants,
             Faults& faults, Newcomers& newcomers, RankNews& ranks, Leaves& leaves, Copies& copies,
             SurvivorSave& save);

  // Settles all that the node said in its hello.
  void Reconcile(Node& node, const AgentHello& hello, bool new_incarnation, bool repeated, Instant now);
  // `held` has every generation of the job that has anything left on this node.
  using Held = std::vector<const HeldGeneration*>;
  // `kept`, which may be null, are processes of it that wait there.
  void ReconcileJob(Job& job, const Node& node, const Held& held, const KeptProcesses* kept,
                    bool new_incarnation, Instant now);
  void TakeKept(const NodeId& node, const AgentHello& hello);
  // The job is over or was never ours: its exits are acknowledged, and everything of it is ended.
  void EndForgotten(const NodeId& node, const HeldGeneration& held, bool known);

 private:
  void FinishUnrecordedStop(Job& job, const NodeId& node, const Held& held, Instant now);
  void FinishUnrecordedRevoke(Job& job, Instant now);
  void ReconcileNewest(Job& job, const Node& node, const Held& held, const KeptProcesses* kept,
                       bool new_incarnation, bool holds_over, Instant now);
  void SettleMissing(Job& job, const Node& node, const KeptProcesses* kept, bool new_incarnation,
                     bool holds_over, Instant now);
  void SettleMissingBeside(Job& job, const Node& node, Instant now);

  HeadContext& context_;
  HeadModel& model_;
  const HeadConfig& config_;
  Recovery& recovery_;
  JobLife& life_;
  Grants& grants_;
  Faults& faults_;
  Newcomers& newcomers_;
  RankNews& ranks_;
  Leaves& leaves_;
  Copies& copies_;
  SurvivorSave& save_;
};

}  // namespace gtrain::core
