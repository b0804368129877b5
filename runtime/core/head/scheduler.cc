#include "runtime/core/head/scheduler.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/probe.h"
#include "base/units.h"
#include "runtime/core/head/directories.h"
#include "runtime/core/head/gang.h"
#include "runtime/core/head/grants.h"
#include "runtime/core/head/job_life.h"
#include "runtime/core/head/job_timers.h"
#include "runtime/core/head/members.h"
#include "runtime/core/head/placer.h"
#include "runtime/core/head/recovery.h"
#include "runtime/core/head/sizing.h"
#include "runtime/core/head/survivor_save.h"

namespace gtrain::core {
namespace {

// A large cluster that comes back says hello node by node; looking at all waiting jobs after each hello would
// keep the head from hearing the next. So there at most one pass over all of them is made in this time.
constexpr size_t kManyNodes = 64;
constexpr int kStaleMax = 2;
constexpr absl::Duration kPassEvery = absl::Milliseconds(100);

// All of its processes would be new ones.
bool NobodyGoesOn(const Job& job, const plan::Placement& placement) {
  GenerationGrant trial;
  Divide(job, ToRankPlaces(placement), trial);
  return std::ranges::none_of(trial.ranks,
                              [](const RankPlace& place) { return place.process.generation.value != 0; });
}

}  // namespace

Scheduler::Scheduler(HeadContext& context, HeadModel& model, Placer& placer, Grants& grants, JobLife& life,
                     JobTimers& timers, Directories& directories, Sizing& sizing, Recovery& recovery,
                     SurvivorSave& save)
    : context_(context),
      model_(model),
      config_(context.config()),
      placer_(placer),
      grants_(grants),
      life_(life),
      timers_(timers),
      directories_(directories),
      sizing_(sizing),
      recovery_(recovery),
      save_(save) {}

std::optional<Instant> Scheduler::NextDeadline() const { return model_.schedule ? next_pass_ : std::nullopt; }

// Highest priority first, then order of submission. A job that cannot be placed does not hold up later
// ones that can: the gang waits whole, the room it cannot use is used. A submit changes nothing for those
// that wait.
void Scheduler::Schedule(Instant now) {
  const bool all = model_.schedule && (!next_pass_ || now >= *next_pass_);
  if (all) {
    model_.schedule = false;
    next_pass_.reset();
    if (model_.nodes.size() >= kManyNodes) next_pass_ = now + kPassEvery;
  }
  const std::vector<JobId> fresh = std::exchange(model_.fresh, {});
  std::vector<Job*> candidates;
  if (all) {
    candidates = model_.LiveJobs();
  } else {
    for (const JobId& id : fresh) candidates.push_back(&model_.jobs.at(id));
  }
  std::vector<Job*> wanting;
  for (Job* job : candidates) {
    if (!job->Wanting() || (job->not_before && *job->not_before > now) ||
        recovery_.AwaitsWord(job->record.id))
      continue;
    if (const auto node = recovery_.AwaitsHello(*job)) {
      Await(*job, *node, "this head has not heard its agent yet");
    } else {
      wanting.push_back(job);
    }
  }
  std::stable_sort(wanting.begin(), wanting.end(),
                   [](const Job* a, const Job* b) { return a->spec.priority > b->spec.priority; });
  bool changed = true;
  for (Job* job : wanting) {
    if (changed) placer_.CheckViews();
    // What a plan beside the loop would take is free meanwhile: those behind it would get it first.
    others_wait_ = job != wanting.back();
    changed = TryPlace(*job, now);
  }
  if (all)
    std::erase_if(beside_, [&](const auto& item) {
      const Job* job = model_.FindJob(item.first);
      return job == nullptr || !job->Wanting();
    });
  if (all) sizing_.OweLooks();
}

// True when it may have changed what nodes have left.
bool Scheduler::TryPlace(Job& job, Instant now) {
  if (timers_.EndIfItsTimeIsUp(job, now)) return true;
  if (job.record.after_save != Ending::kNone) {
    if (save_.Begin(job, now)) return true;
    if (SurvivorSave::IsDue(job) && save_.AwaitsMachine(job)) return false;
    life_.FinishAfterSave(job);
    return true;
  }
  const plan::Placement placement = placer_.PlacementFor(job);
  if (!placement.placed) {
    if (save_.Begin(job, now)) return true;
    NotPlaced(job, placement, now);
    return false;
  }
  if (const auto node = save_.AwaitsMachine(job); node && NobodyGoesOn(job, placement)) {
    // What it has in memory is worth the few seconds until that machine can be used or is given up.
    GT_PROBE("head.awaits_who_has_the_state");
    Await(job, *node, "its agent is silent, or processes of another job are still being ended there");
    return false;
  }
  if (!directories_.DirectoryIsFree(job, now))
    return true;  // asked only of who could start: that looks at all live jobs
  return GrantPlanned(job, placement, now);
}

// True when it is granted now. Else the plan is on its way, and the job is tried again when it comes.
bool Scheduler::GrantPlanned(Job& job, const plan::Placement& packed, Instant now) {
  Beside& beside = beside_[job.record.id];
  if (beside.plan != nullptr) {
    if (!beside.made && !others_wait_) return false;
    const std::shared_ptr<const PlacementPlan> plan = std::exchange(beside.plan, nullptr);
    if (beside.made && plan->packed.ranks.size() == packed.ranks.size() && placer_.StillHolds(job, *plan)) {
      GT_PROBE("head.grants_as_planned_beside");
      beside_.erase(job.record.id);
      grants_.Grant(job, plan->made(), now);
      return true;
    }
    GT_PROBE("head.plan_came_too_late");
    ++beside.stale;
  }
  const bool large = static_cast<int>(packed.ranks.size()) >= config_.plan_beside_from;
  const std::shared_ptr<PlacementPlan> plan = placer_.PlanOf(job, packed);
  if (plan != nullptr && large && !others_wait_ && beside.stale < kStaleMax) {
    beside.plan = plan;
    beside.made = false;
    context_.Do(MakePlan{plan});
    return false;
  }
  beside_.erase(job.record.id);
  if (plan != nullptr) plan->Make();
  grants_.Grant(job, plan == nullptr ? packed : plan->made(), now);
  return true;
}

void Scheduler::OnPlanMade(const std::shared_ptr<PlanWork>& work) {
  const auto* plan = dynamic_cast<const PlacementPlan*>(work.get());
  const auto beside = plan == nullptr ? beside_.end() : beside_.find(plan->job);
  if (beside == beside_.end() || beside->second.plan.get() != plan) return;
  const Job* job = model_.FindJob(plan->job);
  if (job == nullptr || !job->Wanting()) {
    beside_.erase(beside);
    return;
  }
  beside->second.made = true;
  model_.fresh.push_back(plan->job);
}

// Whatever kept the job waiting before is not what it waits for now.
void Scheduler::Await(Job& job, const NodeId& node, const char* why) {
  if (job.record.after_save != Ending::kNone) return;  // its reason says that it is about to end
  life_.Move(job, job.record.state,
             absl::StrCat("waits for ", model_.Hostname(node), ", where processes of it may be that have ",
                          "what was trained: ", why));
}

// Which nodes keep the job waiting, and what would change that.
void Scheduler::ExplainBlockers(Job& job, const plan::Placement& placement, const plan::Placement& empty) {
  std::map<NodeId, std::vector<std::string>> holders;
  const std::vector<size_t> that_matter = VerdictsThatMatter(placement);
  for (size_t i = 0; i < std::min(that_matter.size(), kBlockersMax); ++i)
    holders[placement.verdicts[that_matter[i]].node];
  for (const auto& [id, other] : model_.jobs) {
    if (&other == &job || !other.record.grant) continue;
    for (const NodePlace& place : other.record.grant->nodes) {
      const auto it = holders.find(place.node);
      if (it != holders.end() && other.HoldsRoomOn(place.node)) it->second.push_back(id.value);
    }
  }
  job.blocked_by = Explain(placement, empty, holders);
  constexpr char kWhenGone[] = "when its agent says that they are gone, or the machine restarts";
  for (Blocker& blocker : job.blocked_by) {
    if (absl::EndsWith(blocker.constraint, kMayStillRun)) blocker.unblocked_by = kWhenGone;
    const auto over = std::ranges::find_if(blocker.held_by, [&](const std::string& id) {
      return IsFinal(model_.jobs.at(JobId(id)).record.state);
    });
    if (over != blocker.held_by.end())
      blocker.unblocked_by =
          absl::StrCat("processes of ", *over, ", which is over,", kMayStillRun, "; ", kWhenGone);
  }
  for (const AvoidedNode& avoided : job.record.avoided) {
    for (Blocker& blocker : job.blocked_by) {
      if (blocker.node != model_.Hostname(avoided.node)) continue;
      blocker.unblocked_by =
          absl::StrCat("`gtrain node undrain ", blocker.node, "` once that is mended; it is tried again ",
                       PrintDuration(config_.avoid_for), " after it was found");
    }
  }
}

void Scheduler::NotPlaced(Job& job, const plan::Placement& placement, Instant now) {
  beside_.erase(job.record.id);
  if (job.ProcessesWait() && !job.keep_until) job.keep_until = now + config_.keep_wait;
  job.record.waits_for_storage = false;
  const plan::Placement empty = placer_.PlacementAlone(job);
  job.sizing.never_fits = !empty.placed;
  ExplainBlockers(job, placement, empty);
  if (empty.placed && job.record.generation.value == 0) {
    return life_.Move(job, JobState::kQueued, absl::StrCat("waits for room: ", placement.reason));
  }
  int alive = 0;
  for (const auto& [id, node] : model_.nodes) alive += node.Usable() ? 1 : 0;
  if (job.record.generation.value == 0 && config_.expected_nodes && alive >= *config_.expected_nodes) {
    return life_.Finish(job, JobState::kFailed, absl::StrCat("can never fit this cluster: ", empty.reason));
  }
  std::string safe = job.record.generation.value > 0 ? "; its state is safe and it resumes by itself" : "";
  if (!job.kept.empty()) {
    size_t processes = 0;
    for (const auto& [node, kept] : job.kept) processes += kept.size();
    safe = absl::StrCat("; ", processes, processes == 1 ? " process keeps" : " processes keep",
                        " its state for ", PrintDuration(config_.keep_wait),
                        " at most, and it resumes by itself");
  }
  life_.Move(job, JobState::kWaiting, absl::StrCat(placement.reason, safe));
}

}  // namespace gtrain::core
