#include "runtime/core/head/survivor_save.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/probe.h"
#include "runtime/core/head/cells.h"
#include "runtime/core/head/gang.h"
#include "runtime/core/head/grants.h"
#include "runtime/core/head/job_life.h"
#include "runtime/core/head/members.h"
#include "runtime/core/head/placer.h"

namespace gtrain::core {
namespace {

constexpr absl::Duration kSaveBy = absl::Minutes(3);

// The newest step that a rank has told.
std::optional<int64_t> StepOf(const Job& job) {
  if (job.low_step) return job.low_step;
  if (job.top_step) return job.top_step;
  const std::optional<int64_t> lost =  // all that a new head has of a generation that ended before it
      job.record.faults.empty() ? std::nullopt : job.record.faults.back().step;
  return std::max(lost, job.record.last_step);
}

// Members of the newest generation that wait.
std::vector<const RankPlace*> WhoWaits(const Job& job) {
  const GenerationGrant& last = *job.record.grant;
  std::set<ProcessId> wait;
  for (const auto& [node, there] : job.kept) wait.insert(there.begin(), there.end());
  std::vector<const RankPlace*> who;
  for (const RankPlace& place : last.ranks) {
    const ProcessId process = ProcessOf(last, place.rank);
    if (wait.contains(process) && !job.hung.contains(process)) who.push_back(&place);
  }
  return who;
}

// It has fewer processes than the generation that was to save: what ended that was another loss, and of those
// there are no more than ranks.
bool LostSomebody(const Job& job) {
  size_t wait = 0;
  for (const auto& [node, there] : job.kept) wait += there.size();
  return wait < job.record.grant->ranks.size();
}

// How many of them are whole copies of the model.
int RanksOf(const Job& job, const std::vector<const RankPlace*>& who) {
  const GenerationGrant& last = *job.record.grant;
  std::vector<std::optional<int>> cells;
  for (const RankPlace* place : who) cells.push_back(CellOf(last, place->rank, job.demand.unit));
  const int most = static_cast<int>(last.ranks.size()) / job.demand.unit;
  return CopiesOf(cells, job.demand.unit, most) * job.demand.unit;
}

// All ranks that the placement makes are processes that wait: where these are of other parts of a mesh, or a
// machine is avoided, one would be started.
bool AllGoOn(const Job& job, const plan::Placement& placement, int ranks) {
  if (!placement.placed) return false;
  GenerationGrant trial;
  Divide(job, ToRankPlaces(placement), trial);
  return trial.world_size == ranks && std::ranges::none_of(trial.ranks, [](const RankPlace& place) {
           return place.process.generation.value == 0;
         });
}

// All ranks have come to it: what waits in a barrier may not hear that it is to save.
bool AllJoined(const Job& job) {
  return std::ranges::all_of(job.ranks, [](const RankLive& rank) {
    return rank.status.state == RankState::kJoined || rank.exit >= 0;
  });
}

}  // namespace

bool SurvivorSave::MayBeDue(const Job& job) {
  if (!job.spec.in_place || !job.record.grant) return false;
  if (job.record.saves && !LostSomebody(job)) return false;   // it has been tried
  if (!job.checkpoint && job.location.empty()) return false;  // it saves nothing
  return job.record.faults.empty() || job.record.faults.back().kind != FaultKind::kStorage;
}

bool SurvivorSave::IsDue(const Job& job) {
  if (!MayBeDue(job) || job.kept.empty()) return false;
  const std::optional<int64_t> step = StepOf(job);
  return step && (!job.checkpoint || job.checkpoint->step < *step) && RanksOf(job, WhoWaits(job)) > 0;
}

std::optional<NodeId> SurvivorSave::AwaitsMachine(const Job& job) const {
  if (!job.SurvivorsWait()) return std::nullopt;
  for (const auto& [id, there] : job.kept) {
    const auto node = model_.nodes.find(id);
    if (node == model_.nodes.end() || node->second.state == NodeState::kDead) continue;
    const auto ends_there = [&, &id = id](const auto& other) {
      return &other.second != &job && Placer::EndsOlderOn(other.second, id);
    };
    if (node->second.state != NodeState::kAlive || std::ranges::any_of(model_.jobs, ends_there)) return id;
  }
  return std::nullopt;
}

bool SurvivorSave::IsOne(const Job& job) { return job.Live() && job.record.saves; }

bool SurvivorSave::Begin(Job& job, Instant now) {
  if (!IsDue(job)) return false;
  std::vector<const RankPlace*> who = WhoWaits(job);
  std::erase_if(who, [&](const RankPlace* place) {
    const auto node = model_.nodes.find(place->node);
    return node == model_.nodes.end() || !node->second.UsableUntilItLeaves() ||
           std::ranges::count(job.record.avoided, place->node, &AvoidedNode::node) > 0;
  });
  const int ranks = RanksOf(job, who);
  if (ranks == 0) return false;
  // How many ranks it asks for is left aside meanwhile, and what each of them needs is not.
  const plan::Demand whole = job.demand;
  const bool asked = job.sizing.asked;
  job.demand.count_nodes = false;
  job.demand.min = job.demand.max = ranks;
  job.demand.asked = 0;
  job.demand.ranks_per_node.reset();  // a node may have lost one
  plan::Placement placement = placer_.PlacementFor(job, /*on_leaving=*/true);
  const bool goes_on = AllGoOn(job, placement, ranks);
  if (goes_on) {
    GT_PROBE("head.survivors_save");
    placement.reason = absl::StrCat(ranks, ranks == 1 ? " rank that is" : " ranks that are",
                                    " left, to save what only ", ranks == 1 ? "it knows" : "they know");
    grants_.Grant(job, placement, now, /*saves=*/true);
  }
  job.demand = whole;
  job.sizing.asked = asked;
  return goes_on;
}

// Who has not come by then hangs, and is found out by others.
bool SurvivorSave::MayTell(const Job& job, Instant now) const {
  if (job.record.state != JobState::kRunning || !job.running_since) return false;
  return AllJoined(job) || now >= *job.running_since + context_.config().return_timeout;
}

void SurvivorSave::Tell(const Job& job, const NodeId& node) {
  context_.Send(node, SendKind::kReply,
                NoticeRanks{model_.epoch(), job.record.id, job.record.generation, kSaveBy, job.notices});
}

void SurvivorSave::Step(Job& job, Instant now) {
  if (!IsOne(job)) return;
  if (!job.told_at) {
    if (!MayTell(job, now)) return;
    ++job.notices;
    job.told_at = now + kSaveBy;
    for (const NodePlace& place : job.record.grant->nodes) Tell(job, place.node);
    context_.Emit(job, "notice", "the ranks that are left are told to save");
    context_.Dirty(job);
  }
  if (!job.checkpointed && now < *job.told_at) return;
  if (job.checkpointed) GT_PROBE("head.survivors_saved");
  const std::string how =
      job.checkpointed
          ? absl::StrCat("the ranks that are left have saved step ", job.checkpoint->step)
          : "the ranks that are left have committed no checkpoint in time: the log of rank 0 says why";
  if (job.record.after_save == Ending::kNone)
    return life_.BeginEnding(job, Ending::kReplace, EndMode::kReform, context_.config().reform_grace, how,
                             now);
  const std::string why = job.record.after_save_reason;
  life_.BeginEnding(job, job.record.after_save, EndMode::kStop, job.spec.stop_grace, why, now);
}

std::optional<Instant> SurvivorSave::NextDeadline(const Job& job) const {
  if (!IsOne(job)) return std::nullopt;
  if (job.told_at) return job.checkpointed ? Instant() : *job.told_at;
  if (job.record.state != JobState::kRunning || !job.running_since) return std::nullopt;
  return AllJoined(job) ? Instant() : *job.running_since + context_.config().return_timeout;
}

}  // namespace gtrain::core
