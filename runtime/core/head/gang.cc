#include "runtime/core/head/gang.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "job/spec/mesh.h"

namespace gtrain::core {

namespace {

void SetRankHosts(const spec::JobSpec& spec, plan::Demand& demand) {
  if (spec.where_ranks.empty() || !spec.ranks) return;
  demand.rank_hosts.resize(static_cast<size_t>(spec.ranks->max));
  std::map<std::string, int> index;
  for (const spec::RanksOn& place : spec.where_ranks) {
    const auto [it, is_new] = index.try_emplace(place.host, static_cast<int>(demand.host_names.size()));
    if (is_new) demand.host_names.push_back(place.host);
    for (size_t i = 0; i < place.ranks.size(); ++i)
      demand.rank_hosts[place.ranks[i]] = {it->second, place.slots.empty() ? -1 : place.slots[i]};
  }
}

}  // namespace

plan::Demand DemandOf(const spec::JobSpec& spec, bool may_oversubscribe) {
  plan::Demand demand;
  const spec::Range range = spec.nodes ? *spec.nodes : spec.ranks.value_or(spec::Range{});
  demand.count_nodes = spec.nodes.has_value();
  demand.min = range.min;
  demand.max = range.max;
  demand.unit = static_cast<int>(spec::ShapeOf(spec.mesh).model_ranks);
  demand.ranks_per_node = spec.ranks_per_node;
  if (spec.per == spec::Per::kNode) demand.ranks_per_node = 1;
  demand.cpus = spec.resources.cpus;
  demand.memory_bytes = spec.resources.memory.value_or(0);
  demand.gpus = spec.resources.gpus;
  demand.all_gpus = spec.per == spec::Per::kNode && !spec.resources.gpus;
  demand.gpu_types = spec.resources.gpu_type;
  demand.labels = spec.where_labels;
  demand.hosts = spec::NamesOf(spec.where_hosts);
  demand.exclude = spec::NamesOf(spec.where_exclude);
  demand.gpu_share = spec.resources.gpu_share;
  SetRankHosts(spec, demand);
  if (!spec.where_rank0.empty()) demand.rank0 = spec::NamesOf({spec.where_rank0});
  demand.oversubscribe_cpus = spec.resources.oversubscribe.value_or(may_oversubscribe);
  return demand;
}

plan::NodeView ViewOf(const NodeRecord& node) {
  plan::NodeView view;
  view.id = node.id;
  view.hostname = node.hostname;
  view.labels = node.labels;
  view.cpus = view.cpus_free = node.inventory.cpus;
  view.memory_bytes = view.memory_free_bytes = node.inventory.memory_bytes;
  for (const CpuInfo& cpu : node.inventory.cpu_infos) view.cpu_numa.push_back(cpu.numa);
  for (size_t i = 0; i < node.inventory.gpus.size(); ++i) {
    view.gpu_models.push_back(node.inventory.gpus[i].model);
    view.gpu_numa.push_back(node.inventory.gpus[i].numa);
    view.gpus_free.push_back(static_cast<int>(i));
  }
  return view;
}

void Occupy(plan::NodeView& view, const RankPlace& rank, const plan::Demand& demand) {
  view.cpus_free = std::max(0, view.cpus_free - demand.cpus.value_or(1));
  view.cpus_bound.insert(rank.cpus.begin(), rank.cpus.end());
  view.memory_free_bytes -= std::min(view.memory_free_bytes, demand.memory_bytes);
  for (const int gpu : rank.gpus) {
    std::erase(view.gpus_free, gpu);
    if (demand.gpu_share > 0) view.gpu_shares[gpu] += demand.gpu_share;
  }
}

std::vector<size_t> VerdictsThatMatter(const plan::Placement& now) {
  const std::set<NodeId> named(now.named.begin(), now.named.end());
  std::vector<size_t> that_matter;
  for (size_t i = 0; i < now.verdicts.size(); ++i) {
    if (now.remedy.empty() || named.contains(now.verdicts[i].node)) that_matter.push_back(i);
  }
  return that_matter;
}

std::vector<Blocker> Explain(const plan::Placement& now, const plan::Placement& when_empty,
                             const std::map<NodeId, std::vector<std::string>>& holders) {
  std::vector<Blocker> blockers;
  if (now.verdicts.empty()) {
    blockers.push_back({"", "no node has joined", 0, {}, "a node joins (gtrain agent --join)"});
  }
  const std::vector<size_t> that_matter = VerdictsThatMatter(now);
  const size_t shown = std::min(that_matter.size(), kBlockersMax);
  const std::string larger = now.remedy.empty() ? "a larger node, or a smaller demand" : now.remedy;
  for (size_t at = 0; at < shown; ++at) {
    const size_t i = that_matter[at];
    const plan::NodeVerdict& verdict = now.verdicts[i];
    Blocker blocker{verdict.hostname, verdict.limit, verdict.room, {}, ""};
    if (const auto it = holders.find(verdict.node); it != holders.end()) blocker.held_by = it->second;
    const int room_empty = i < when_empty.verdicts.size() ? when_empty.verdicts[i].room : 0;
    if (room_empty > verdict.room) {
      blocker.unblocked_by =
          absl::StrCat("when ", absl::StrJoin(blocker.held_by, ", "), " ends it takes ", room_empty);
    } else if (!verdict.limit.empty()) {
      blocker.unblocked_by = verdict.remedy.empty() ? larger : verdict.remedy;
    }
    blockers.push_back(std::move(blocker));
  }
  if (shown < that_matter.size()) {
    blockers.push_back(
        {"", absl::StrCat("likewise on ", that_matter.size() - shown, " more nodes"), 0, {}, ""});
  }
  if (!now.verdicts.empty() && !when_empty.placed) {
    blockers.push_back({"",
                        when_empty.reason,
                        0,
                        {},
                        when_empty.remedy.empty() ? "more nodes, or a smaller demand" : when_empty.remedy});
  }
  return blockers;
}

std::vector<RankPlace> ToRankPlaces(const plan::Placement& placement) {
  std::vector<RankPlace> places;
  for (const plan::RankSlot& slot : placement.ranks) {
    places.push_back({slot.rank, slot.local_rank, slot.node, slot.cpus, slot.gpus});
  }
  return places;
}

ProcessId ProcessOf(const GenerationGrant& grant, int rank) {
  const ProcessId& process = PlaceOfRank(grant, rank).process;
  return process.generation.value != 0 ? process : ProcessId{grant.generation, rank};
}

}  // namespace gtrain::core
