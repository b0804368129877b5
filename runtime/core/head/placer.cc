#include "runtime/core/head/placer.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "absl/strings/str_cat.h"
#include "job/plan/by_topology.h"
#include "runtime/core/head/cells.h"
#include "runtime/core/head/gang.h"

namespace gtrain::core {
namespace {

// What the ranks of the job and those beside them take.
void OccupyAll(const Job& job, const std::map<NodeId, plan::NodeView*>& by_node) {
  for (const auto* ranks : {&job.record.grant->ranks, &job.record.grant->waiting}) {
    for (const RankPlace& rank : *ranks) {
      const auto it = by_node.find(rank.node);
      if (it != by_node.end() && job.HoldsRoomOn(rank.node)) Occupy(*it->second, rank, job.demand);
    }
  }
}

// A process that can go on where it is: a place elsewhere would end it and start another.
struct GoesOn {
  const RankPlace* place = nullptr;
  int number = 0;
  bool member = false;  // it has what was trained
};

// Those on nodes that may be used.
std::vector<GoesOn> WhoGoesOn(const Job& job, const std::vector<plan::NodeView>& views) {
  std::vector<GoesOn> all;
  if (!job.ProcessesWait() || !job.record.grant) return all;
  std::set<NodeId> usable;
  for (const plan::NodeView& view : views) {
    if (view.unusable.empty()) usable.insert(view.id);
  }
  std::set<ProcessId> wait;
  for (const auto* processes : {&job.kept, &job.coming}) {
    for (const auto& [node, there] : *processes) wait.insert(there.begin(), there.end());
  }
  const GenerationGrant& last = *job.record.grant;
  const int members = static_cast<int>(last.ranks.size()),
            count = members + static_cast<int>(last.waiting.size());
  for (int number = 0; number < count; ++number) {
    const RankPlace& place = PlaceOfRank(last, number);
    const ProcessId process = ProcessOf(last, number);
    if (wait.contains(process) && !job.hung.contains(process) && usable.contains(place.node))
      all.push_back({&place, number, number < members});
  }
  return all;
}

// Where a copy of the model lies on several ranks, members are of use as whole copies: of each cell as many,
// those of a copy of which nobody is missing first. The others count as processes without a state.
void KeepWholeCopies(const Job& job, std::vector<GoesOn>& all) {
  const int unit = job.demand.unit;
  if (unit == 1 || !job.spec.in_place || job.demand.count_nodes) return;
  std::map<int, int> of_copy;
  std::vector<std::optional<int>> cells;
  for (const GoesOn& one : all) {
    if (one.member) ++of_copy[one.number / unit];
    cells.push_back(CellOf(*job.record.grant, one.number, unit));
  }
  const int copies = CopiesOf(cells, unit, job.demand.max / unit);
  std::map<int, int> taken;  // of each cell
  for (const bool whole : {true, false}) {
    for (GoesOn& one : all) {
      if (!one.member || (of_copy[one.number / unit] == unit) != whole) continue;
      one.member = taken[one.number % unit]++ < copies;
    }
  }
}

std::map<NodeId, plan::Waiting> WaitingOf(const Job& job, const std::vector<plan::NodeView>& views) {
  std::vector<GoesOn> all = WhoGoesOn(job, views);
  KeepWholeCopies(job, all);
  std::map<NodeId, plan::Waiting> waiting;
  for (const bool members : {true, false}) {
    for (const GoesOn& one : all) {
      if (one.member != members) continue;
      plan::Waiting& there = waiting[one.place->node];
      ++(members ? there.members : there.others);
      there.gpus.insert(there.gpus.end(), one.place->gpus.begin(), one.place->gpus.end());
    }
  }
  return waiting;
}

// The generation whose places the next one keeps where it can; null: none.
const GenerationGrant* LastOf(const Job& job) {
  const GenerationGrant* worked = job.sizing.goes_back ? job.GrantOf(job.sizing.worked) : nullptr;
  if (worked != nullptr) return worked;
  return job.record.grant ? &*job.record.grant : nullptr;
}

}  // namespace

// Whether views_ is not what this job sees: it counts what the job itself still has, and nodes it avoids.
bool Placer::TakesPart(const Job& job) {
  return job.Occupies() || !job.record.unreleased.empty() || !job.record.avoided.empty();
}

Placer::ViewsKey Placer::CurrentViewsKey() const {
  ViewsKey key;
  key.nodes.reserve(model_.nodes.size());
  for (const auto& [id, node] : model_.nodes) {
    if (!node.welcomed || node.state == NodeState::kDead) continue;
    key.nodes.push_back({node.revision, node.WhyUnusable()});
  }
  for (const auto& [id, job] : model_.jobs) {
    const bool holds = job.Occupies();
    if (!holds && (!job.record.grant || job.record.unreleased.empty())) continue;
    key.jobs.push_back({job.record.number, job.record.generation, holds, job.record.unreleased});
  }
  return key;
}

void Placer::CheckViews() {
  ViewsKey key = CurrentViewsKey();
  if (key == views_key_) return;
  views_ = std::make_shared<const std::vector<plan::NodeView>>(ViewsWithout(Job()));
  empty_views_ = std::make_shared<const std::vector<plan::NodeView>>(plan::Emptied(*views_));
  views_key_ = std::move(key);
}

bool Placer::EndsOlderOn(const Job& job, const NodeId& node) {
  return job.record.grant && job.Unreleased(node) && !job.HoldsNode(node);
}

std::vector<plan::NodeView> Placer::ViewsWithout(const Job& wanting, bool on_leaving) const {
  std::vector<plan::NodeView> views;
  std::map<NodeId, plan::NodeView*> by_node;
  views.reserve(model_.nodes.size());
  for (const auto& [id, node] : model_.nodes) {
    if (!node.welcomed || node.state == NodeState::kDead) continue;
    plan::NodeView& view = views.emplace_back(ViewOf(node.record));
    if (!on_leaving || !node.UsableUntilItLeaves()) view.unusable = node.WhyUnusable();
    by_node[id] = &view;
  }
  for (const AvoidedNode& avoided : wanting.record.avoided) {
    if (const auto it = by_node.find(avoided.node); it != by_node.end()) it->second->unusable = avoided.why;
  }
  for (const NodeId& id : wanting.record.unreleased) {
    if (const auto it = by_node.find(id); it != by_node.end()) {
      it->second->unusable = "processes of the last generation are still being ended there";
    }
  }
  for (const auto& [job_id, job] : model_.jobs) {
    if (&job == &wanting || !job.record.grant) continue;
    const std::vector<NodeId>& unreleased = job.record.unreleased;
    if (!job.Occupies() && unreleased.empty()) continue;
    OccupyAll(job, by_node);
    for (const NodeId& id : unreleased) {  // EndsOlderOn would look for it in the list again
      const auto it = by_node.find(id);
      if (it == by_node.end() || job.HoldsNode(id) || !it->second->unusable.empty()) continue;
      it->second->unusable = absl::StrCat("processes of an ended generation of ", job_id.value, kMayStillRun);
    }
  }
  return views;
}

plan::Demand Placer::DemandNow(const Job& job) {
  plan::Demand demand = job.demand;
  const GenerationGrant* last = LastOf(job);
  // A program that does not stay gets none (members.cc).
  if (const int spares = job.Spares(); spares > 0 && (job.ProcessesStay() || !job.kept.empty())) {
    demand.spares = spares;
    // Who asks for a number of ranks and of spares shares CPUs for them.
    const bool exact = demand.min == demand.max || demand.asked == demand.max;
    demand.max += spares;
    if (exact) demand.asked = demand.max;
  }
  if (last == nullptr) return demand;
  std::vector<const RankPlace*> places;
  for (const auto* ranks : {&last->ranks, &last->waiting}) {
    for (const RankPlace& place : *ranks) places.push_back(&place);
  }
  if (!last->waiting.empty()) {
    // Those that wait are numbered behind the others; the ranks of a machine are to be neighbours.
    std::map<NodeId, size_t> index;
    for (size_t i = 0; i < last->nodes.size(); ++i) index[last->nodes[i].node] = i;
    std::ranges::stable_sort(places, {}, [&](const RankPlace* place) { return index[place->node]; });
  }
  for (const RankPlace* place : places) {
    demand.previous.push_back(place->node);
    demand.previous_gpus.push_back(place->gpus);
  }
  return demand;
}

plan::Placement Placer::PlacementFor(const Job& job, bool on_leaving) const {
  plan::Demand demand = DemandNow(job);
  if (!TakesPart(job) && !on_leaving) return plan::Place(*views_, demand);
  const std::vector<plan::NodeView> views = ViewsWithout(job, on_leaving);
  demand.waiting = WaitingOf(job, views);
  return plan::Place(views, demand);
}

const std::shared_ptr<const plan::KnownTopology>& Placer::Known() const {
  if (topology_ != nullptr) return known_;
  std::vector<Labelled> labelled;
  labelled.reserve(model_.nodes.size());
  for (const auto& [id, node] : model_.nodes) {
    if (node.state != NodeState::kDead) labelled.push_back({id, node.record.hostname, node.record.labels});
  }
  if (labelled == known_of_) return known_;
  std::vector<plan::NodeView> views(labelled.size());
  for (size_t i = 0; i < views.size(); ++i) {
    views[i].id = labelled[i].id;
    views[i].hostname = labelled[i].hostname;
    views[i].labels = labelled[i].labels;
  }
  known_ = std::make_shared<const plan::KnownTopology>(plan::TopologyOfLabels(views));
  known_of_ = std::move(labelled);
  return known_;
}

std::shared_ptr<PlacementPlan> Placer::PlanOf(const Job& job, plan::Placement packed) const {
  if (topology_ == nullptr && packed.nodes.size() == 1) return nullptr;  // labels say nothing of its inside
  if (Known()->empty()) return nullptr;
  auto plan = std::make_shared<PlacementPlan>();
  plan->job = job.record.id;
  plan->known = Known();
  plan->demand = DemandNow(job);
  plan->views = views_;
  if (TakesPart(job)) {
    plan->views = std::make_shared<const std::vector<plan::NodeView>>(ViewsWithout(job));
    plan->demand.waiting = WaitingOf(job, *plan->views);
  }
  if (const GenerationGrant* last = LastOf(job); last != nullptr) {
    for (const RankPlace& place : last->ranks)
      plan->before.push_back({place.rank, place.local_rank, place.node, place.cpus, place.gpus});
  }
  plan->packed = std::move(packed);
  plan->axes = job.spec.mesh;
  plan->traffic = job.spec.traffic;
  return plan;
}

bool Placer::StillHolds(const Job& job, const PlacementPlan& plan) const {
  return plan.StillHolds(TakesPart(job) ? ViewsWithout(job) : *views_);
}

void Placer::SetFabricOrder(GenerationGrant& grant) const {
  if (grant.nodes.size() < 2) return;
  const plan::KnownTopology& known = *Known();
  if (known.empty()) return;
  std::map<NodeId, size_t> index;
  for (size_t i = 0; i < grant.nodes.size(); ++i) index[grant.nodes[i].node] = i;
  // By their lowest ranks, which is how ranks go through machines that have no order.
  std::vector<size_t> nodes;
  std::vector<plan::NodeView> views;
  std::set<size_t> seen;
  for (const RankPlace& place : grant.ranks) {
    const size_t i = index.at(place.node);
    if (!seen.insert(i).second) continue;
    // The ranks of an older agent would go through the machines in another order than the others.
    if (!model_.nodes.at(place.node).knows_fabric_order) return;
    nodes.push_back(i);
    views.emplace_back();
    views.back().id = grant.nodes[i].node;
    views.back().hostname = grant.nodes[i].hostname;
  }
  const std::vector<int> order = plan::CollectiveOrder(known, views);
  for (size_t i = 0; i < order.size(); ++i) grant.nodes[nodes[i]].fabric_order = order[i];
}

plan::Placement Placer::PlacementAlone(const Job& job) const {
  return TakesPart(job) ? plan::Place(plan::Emptied(ViewsWithout(job)), job.demand)
                        : plan::Place(*empty_views_, job.demand);
}

}  // namespace gtrain::core
