#include "runtime/core/head/reconciler.h"

#include <algorithm>
#include <set>

#include "base/probe.h"
#include "runtime/core/head/copies.h"
#include "runtime/core/head/faults.h"
#include "runtime/core/head/grants.h"
#include "runtime/core/head/job_life.h"
#include "runtime/core/head/leaves.h"
#include "runtime/core/head/newcomers.h"
#include "runtime/core/head/rank_news.h"
#include "runtime/core/head/recovery.h"
#include "runtime/core/head/survivor_save.h"

namespace gtrain::core {

Reconciler::Reconciler(HeadContext& context, HeadModel& model, Recovery& recovery, JobLife& life,
                       Grants& grants, Faults& faults, Newcomers& newcomers, RankNews& ranks, Leaves& leaves,
                       Copies& copies, SurvivorSave& save)
    : context_(context),
      model_(model),
      config_(context.config()),
      recovery_(recovery),
      life_(life),
      grants_(grants),
      faults_(faults),
      newcomers_(newcomers),
      ranks_(ranks),
      leaves_(leaves),
      copies_(copies),
      save_(save) {}

void Reconciler::Reconcile(Node& node, const AgentHello& hello, bool new_incarnation, bool repeated,
                           Instant now) {
  TakeKept(node.record.id, hello);
  std::map<JobId, std::vector<const HeldGeneration*>> held;
  std::vector<const HeldGeneration*> over;
  std::set<JobId> described;  // what the node says of these follows
  for (const HeldGeneration& generation : hello.held) {
    if (recovery_.AwaitsDescription(generation)) described.insert(generation.job);
  }
  for (const HeldGeneration& generation : hello.held) {
    if (described.contains(generation.job)) continue;
    const Job* job = model_.FindJob(generation.job);
    const bool final = job != nullptr && IsFinal(job->record.state);
    // A job may be over before this node confirmed it: the generations held here keep their room.
    const bool keeps_room = final && job->Unreleased(node.record.id);
    if (keeps_room) GT_PROBE("head.what_is_over_keeps_its_room");
    if (job == nullptr || final) over.push_back(&generation);
    if (job != nullptr && (!final || keeps_room)) held[generation.job].push_back(&generation);
  }
  for (const auto& [number, id] : model_.job_order) {
    const std::vector<const HeldGeneration*>& here = held[id];
    if (repeated && here.empty()) {
      GT_PROBE("head.repeated_hello");
      continue;
    }
    const auto kept = std::ranges::find(hello.kept, id, &KeptProcesses::job);
    if (!described.contains(id))
      ReconcileJob(model_.jobs.at(id), node, here, kept == hello.kept.end() ? nullptr : &*kept,
                   new_incarnation, now);
  }
  for (const HeldGeneration* generation : over) {
    EndForgotten(node.record.id, *generation, model_.FindJob(generation->job) != nullptr);
  }
  copies_.SettleCopies(node.record.id, hello);
}

// A head that restarted knows of no process that waits, and of an agent that restarted nobody knows what it
// has said.
void Reconciler::TakeKept(const NodeId& node, const AgentHello& hello) {
  for (Job* job : model_.LiveJobs()) {  // a machine that restarted has none
    job->kept.erase(node);
    job->coming.erase(node);
  }
  for (const KeptProcesses& kept : hello.kept) {
    Job* job = model_.FindJob(kept.job);
    if (job != nullptr && !IsFinal(job->record.state)) {
      if (!job->Live()) std::tie(job->kept[node], job->coming[node]) = std::tie(kept.processes, kept.coming);
      if (job->Live() && !job->HoldsNode(node)) life_.EndKept(*job, node);
      continue;
    }
    if (job == nullptr && recovery_.TakesUp(kept.job)) continue;  // it is not told yet
    GT_PROBE("head.ends_kept_processes_of_a_forgotten_job");
    context_.Send(node, SendKind::kReply, ForgetJob{model_.epoch(), kept.job});
  }
}

void Reconciler::EndForgotten(const NodeId& node, const HeldGeneration& held, bool known) {
  GT_PROBE("head.ends_forgotten_job");
  for (const RankExit& exit : held.exited) {
    context_.Send(node, SendKind::kReply, AckExit{model_.epoch(), held.job, exit.generation, exit.rank});
  }
  context_.Send(node, SendKind::kNow,
                Revoke{model_.epoch(), held.job, held.generation, EndMode::kStopNow, absl::ZeroDuration(),
                       known ? "the job is over" : "this head knows no such job"});
  context_.Send(node, SendKind::kReply, ForgetJob{model_.epoch(), held.job});
}

// Called before the exits are taken, which are the consequence of the stop. An earlier head began the stop
// and died before it wrote it down (its disk may have been full), or its records are lost.
void Reconciler::FinishUnrecordedStop(Job& job, const NodeId& node, const Held& held, Instant now) {
  const bool stopping = std::any_of(held.begin(), held.end(), [&](const HeldGeneration* generation) {
    return generation->stopping && generation->revoked >= job.record.generation;
  });
  if (!stopping || !job.Live() || !job.HoldsNode(node)) return;
  GT_PROBE("head.finishes_unrecorded_stop");
  if (job.record.after_save != Ending::kNone) {
    return life_.BeginEnding(job, job.record.after_save, EndMode::kStop, job.spec.stop_grace,
                             job.record.after_save_reason, now);
  }
  life_.BeginEnding(job, Ending::kCancel, EndMode::kStop, job.spec.stop_grace,
                    model_.cluster.recovering
                        ? "its agents were told to stop it before the head's records were lost"
                        : "its agents were told to stop it by a head that ended before it could say so",
                    now);
}

void Reconciler::ReconcileJob(Job& job, const Node& node, const Held& held, const KeptProcesses* kept,
                              bool new_incarnation, Instant now) {
  const NodeId& id = node.record.id;
  const bool was_ending = job.Unreleased(id);
  FinishUnrecordedStop(job, id, held, now);
  for (const HeldGeneration* generation : held) {
    for (const RankStatus& status : generation->live) ranks_.OnRankStatus(id, status, now);
    for (const RankExit& exit : generation->exited) ranks_.OnExited(id, exit, now);
  }
  // An exit may have ended the generation, so this is computed only now.
  const bool holds_over = std::ranges::any_of(
      held, [&](const HeldGeneration* generation) { return generation->generation <= job.record.revoked; });
  if (job.Unreleased(id)) {
    if (!holds_over) {
      GT_PROBE("head.released_by_hello");
      life_.Release(job, id, now);
    } else if (was_ending) {
      life_.ResendEnding(job, id, now);
    }
    return;
  }
  if (holds_over) life_.ResendEnding(job, id, now);
  if (job.Live() && job.HoldsNode(id))
    ReconcileNewest(job, node, held, kept, new_incarnation, holds_over, now);
}

// The generation that the job is granted, of which this node is part.
void Reconciler::ReconcileNewest(Job& job, const Node& node, const Held& held, const KeptProcesses* kept,
                                 bool new_incarnation, bool holds_over, Instant now) {
  const NodeId& id = node.record.id;
  const auto saw_revoke = [&](const HeldGeneration* generation) {
    return generation->revoked >= job.record.generation;
  };
  if (std::ranges::any_of(held, saw_revoke)) {
    GT_PROBE("head.finishes_unrecorded_revoke");
    // A head before us revoked this and died before writing it down: finish what it began.
    return FinishUnrecordedRevoke(job, now);
  }
  const bool holds_it = std::ranges::any_of(held, [&](const HeldGeneration* generation) {
    return generation->generation == job.record.generation;
  });
  if (!holds_it) return SettleMissing(job, node, kept, new_incarnation, holds_over, now);
  for (const HeldGeneration* generation : held) {
    if (generation->generation == job.record.generation) newcomers_.OnHeld(job, id, *generation, now);
  }
  if (!job.Live()) return;
  // It may not have heard.
  if (job.told_at && job.leave) leaves_.TellRanks(job, id, now);
  if (job.told_at && !job.leave && SurvivorSave::IsOne(job)) save_.Tell(job, id);
  ranks_.SayWhoLeft(job, &id);
}

void Reconciler::FinishUnrecordedRevoke(Job& job, Instant now) {
  life_.BeginEnding(job, Ending::kReplace, EndMode::kReform, config_.reform_grace,
                    "a generation was revoked by a head that ended before it could say so", now);
}

// It holds nothing of a generation of which it should run ranks.
void Reconciler::SettleMissing(Job& job, const Node& node, const KeptProcesses* kept, bool new_incarnation,
                               bool holds_over, Instant now) {
  const NodeId& id = node.record.id;
  bool missing = false, started = new_incarnation || job.record.state == JobState::kRunning;
  for (const RankPlace& place : job.record.grant->ranks) {
    if (place.node != id || job.ExitOf(place.rank) != nullptr) continue;
    missing = true;
    started = started || job.ranks[place.rank].started;
  }
  if (!missing) return SettleMissingBeside(job, node, now);
  if (kept != nullptr && job.record.state == JobState::kRunning) {
    // Its ranks ran and wait now for the next generation, so this one was revoked, and the node has told the
    // head that died.
    GT_PROBE("head.finishes_unrecorded_revoke_of_who_waits");
    FinishUnrecordedRevoke(job, now);
    std::tie(job.kept[id], job.coming[id]) = std::tie(kept->processes, kept->coming);
    return life_.Release(job, id, now);
  }
  if (!recovery_.Settled(now)) return recovery_.JudgeLater(job.record.id, id);
  if (!started) GT_PROBE("head.grants_again");
  if (!started) return grants_.SendGrant(job, {id});  // it was lost with the connection
  const char* why =
      new_incarnation ? "it restarted and its ranks are gone" : "its keeper is gone and so are its ranks";
  GT_PROBE("head.ranks_gone_at_hello");
  faults_.RanksLost(job, node, why, now);
  if (!holds_over) life_.Release(job, id, now);
}

// It has no ranks of the generation. If it should have processes that wait beside it, they have ended, or its
// grant was lost with the connection.
void Reconciler::SettleMissingBeside(Job& job, const Node& node, Instant now) {
  bool waits = false, heard = false;
  for (size_t i = 0; i < job.waiting.size(); ++i) {
    if (job.record.grant->waiting[i].node != node.record.id) continue;
    waits = true;
    heard = heard || job.waiting[i].status.pid > 0 || job.waiting[i].over;
  }
  if (!waits) return;
  if (!recovery_.Settled(now)) return recovery_.JudgeLater(job.record.id, node.record.id);
  if (heard) return faults_.RanksLost(job, node, "what was to join is gone", now);
  grants_.SendGrant(job, {node.record.id});
}

}  // namespace gtrain::core
