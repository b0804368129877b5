// HeadState owns the parts of the head and knows which of them an event concerns. PURE. Private to
// runtime/core/head.
//
//   head_context.h        configuration, clock, random numbers, and what a step puts out
//   head_model.h          jobs, nodes and the cluster's record, which all look at (job.h, node.h)
//   membership.h          hello, heartbeat, silence, quarantine, notices of nodes, revoked nodes
//   relays.h              which agents go through others
//   reconciler.h          what a node holds against what was granted
//   recovery.h            records found at the start, lost and older ones, newer heads
//   head_records.h        jobs from their records and into them
//   placer.h              what nodes have left
//   plans.h               where the ranks of a large job go, beside the loop
//   scheduler.h           which waiting job starts
//   sizing.h              jobs with another number of ranks than they should have
//   grants.h              a new generation
//   copies.h              machines outside a job that keep copies of its checkpoints
//   job_life.h            states, revokes, fences, ends
//   job_timers.h          what is due for a job
//   faults.h              how a generation fails and what follows
//   rank_news.h           what agents report about ranks
//   progress.h            steps, speed, slow nodes
//   goodput.h             where the rank-seconds of a job go
//   stalls.h              jobs that stand still
//   links.h               nodes that cannot reach each other
//   leaves.h              jobs of which a machine leaves
//   directories.h         whose a checkpoint directory is
//   requests.h            what clients ask: changes and documents
//   remembered_answers.h  the answers to changes, to be repeated
//   queries.h             questions to agents, consoles
//   polls.h               clients that wait for events
//   over_jobs.h           what is over and not forgotten
//   documents.h           for people
#pragma once
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/core/head/copies.h"
#include "runtime/core/head/directories.h"
#include "runtime/core/head/faults.h"
#include "runtime/core/head/grants.h"
#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_core.h"
#include "runtime/core/head/head_model.h"
#include "runtime/core/head/head_records.h"
#include "runtime/core/head/job_life.h"
#include "runtime/core/head/job_timers.h"
#include "runtime/core/head/leaves.h"
#include "runtime/core/head/links.h"
#include "runtime/core/head/membership.h"
#include "runtime/core/head/newcomers.h"
#include "runtime/core/head/over_jobs.h"
#include "runtime/core/head/placer.h"
#include "runtime/core/head/polls.h"
#include "runtime/core/head/progress.h"
#include "runtime/core/head/queries.h"
#include "runtime/core/head/rank_news.h"
#include "runtime/core/head/reconciler.h"
#include "runtime/core/head/recovery.h"
#include "runtime/core/head/relays.h"
#include "runtime/core/head/remembered_answers.h"
#include "runtime/core/head/requests.h"
#include "runtime/core/head/scheduler.h"
#include "runtime/core/head/sizing.h"
#include "runtime/core/head/stalls.h"
#include "runtime/core/head/survivor_save.h"

namespace gtrain::core {

// Only the loop's thread uses it, and it never blocks. The parts refer to those that they need, also where
// two need each other, and all live as long as it does.
class HeadState {
 public:
  HeadState(HeadConfig config, Rng rng);
  HeadState(const HeadState&) = delete;
  HeadState& operator=(const HeadState&) = delete;

  absl::StatusOr<StepResult> Recover(StoredRecords stored, Instant now, absl::Time wall);
  StepResult Step(const HeadEvent& event, Instant now);
  std::optional<Instant> NextDeadline() const;

  HeadSnapshot Snapshot() const;
  const JobRecord* RecordOf(const JobId& job) const;
  HeadEpoch epoch() const { return model_.epoch(); }
  const std::string* RouteOf(const NodeId& node) const;
  std::vector<std::pair<JobId, std::string>> Finished() const;
  std::optional<WriteResult> ResultOf(const JobId& job) const;
  const HeadCounters& counters() const { return context_.counters(); }

 private:
  absl::Status Load(StoredRecords& stored, Instant now);
  void TakeOff(absl::Duration slept, Instant now);
  void OnEvent(const HeadEvent& event, Instant now);
  void OnMessage(const PeerMessage& event, Instant now);
  void OnAgentMessage(Node& node, const Message& message, Instant now);
  void OnTail(const NodeId& id, const LogTail& tail);
  void OnStoreRoom(const StoreRoom& room);
  void OnTick(Instant now);
  void CheckIdle(Instant now);
  absl::Duration IdlePatience() const;
  std::optional<Instant> FirstDeadline() const;
  void KeepDeadline(const HeadEvent& event, bool changed);
  StepResult Flush(Instant now);

  HeadContext context_;
  HeadModel model_;
  Placer placer_;
  Progress progress_;
  HeadRecords records_;
  OverJobs over_;
  RememberedAnswers answers_;
  Polls polls_;
  Copies copies_;
  JobLife life_;
  Faults faults_;
  Directories directories_;
  Grants grants_;
  Links links_;
  Leaves leaves_;
  Newcomers newcomers_;
  Sizing sizing_;
  SurvivorSave save_;
  Queries queries_;
  Stalls stalls_;
  RankNews ranks_;
  JobTimers timers_;
  Scheduler scheduler_;
  Reconciler reconciler_;
  Recovery recovery_;
  Relays relays_;
  Membership membership_;
  Requests requests_;

  // FirstDeadline() or earlier; forgotten by all steps but those that thousands of agents cause each second.
  mutable std::optional<std::optional<Instant>> first_deadline_;
};

}  // namespace gtrain::core
