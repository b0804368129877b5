#include "job/plan/room.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/units.h"
#include "job/spec/job_spec.h"
#include "job/spec/print.h"
#include "topology/hostlist.h"

namespace gtrain::plan {
namespace {

using spec::kWholeGpu;

// A part of a GPU that the driver has made a device of (NVIDIA MIG), by its name: "NVIDIA H100 MIG 1g.10gb".
bool IsInstance(const std::string& model) { return absl::StrContains(model, "MIG "); }

// A process can use one instance and no more.
bool WantedModel(const std::string& model, const Demand& demand) {
  if (demand.gpus.value_or(0) > 1 && IsInstance(model)) return false;
  if (demand.gpu_types.empty()) return true;
  const std::string lower = absl::AsciiStrToLower(model);
  return std::any_of(demand.gpu_types.begin(), demand.gpu_types.end(), [&](const std::string& type) {
    return absl::StrContains(lower, absl::AsciiStrToLower(type));
  });
}

// Why the node is no candidate at all, and what would make it one; empty when it is one.
struct Exclusion {
  std::string why, remedy;
};

Exclusion Excluded(const NodeView& node, const Demand& demand) {
  if (!node.unusable.empty())
    return {node.unusable,
            "that is over (`gtrain nodes`; `gtrain node undrain` takes a drain back), or another node joins"};
  if (IsAmong(node, demand.exclude))
    return {"excluded by where.exclude", "where.exclude without it, or another node"};
  if (!demand.hosts.empty() && !IsAmong(node, demand.hosts))
    return {"not in where.hosts", "where.hosts with it, or a node that is in it"};
  for (const auto& [key, value] : demand.labels) {
    const auto it = node.labels.find(key);
    if (it != node.labels.end() && it->second == value) continue;
    return {it == node.labels.end() ? absl::StrCat("has no label ", key, " (wanted ", value, ")")
                                    : absl::StrCat("label ", key, " is ", it->second, ", wanted ", value),
            absl::StrCat("a node with the label ", key, "=", value,
                         " (gtrain agent --label), or where.labels without it")};
  }
  return {};
}

int GpusPerRank(const NodeView& node, int wanted_models, const Demand& demand) {
  if (demand.gpu_share > 0) return 1;
  if (demand.all_gpus) return wanted_models;
  if (demand.gpus) return *demand.gpus;
  return node.gpu_models.empty() || wanted_models == 0 ? 0 : 1;
}

// Lowers `room` to what one resource allows and names that resource if it is now the scarcest.
void Limit(int allowed, const std::string& what, int& room, std::string& limit) {
  if (allowed < room) {
    room = allowed;
    limit = what;
  }
}

int NumaOf(const std::vector<int>& numa, int index) {
  return index < static_cast<int>(numa.size()) ? numa[index] : -1;
}

// `count` CPUs that no rank is bound to: of the NUMA node of the first GPU while there are some, else all of
// one node where one has enough, the one with the fewest; what is left over comes in their order.
std::vector<int> TakeCpus(const NodeView& node, const std::vector<int>& gpus, size_t count,
                          std::set<int>& bound) {
  std::map<int, std::vector<int>> free;  // by NUMA node; what is not known, or not there at all, comes last
  for (int cpu = 0; cpu < node.cpus; ++cpu) {
    const int numa = NumaOf(node.cpu_numa, cpu);
    if (!bound.contains(cpu)) free[numa < 0 ? kUnlimited : numa].push_back(cpu);
  }
  std::vector<int> order;
  const int wanted = gpus.empty() ? -1 : NumaOf(node.gpu_numa, gpus[0]);
  const std::vector<int>* first = nullptr;
  for (const auto& [numa, cpus] : free) {
    if (wanted >= 0 ? numa == wanted
                    : cpus.size() >= count && (first == nullptr || cpus.size() < first->size()))
      first = &cpus;
  }
  if (first != nullptr) order = *first;
  for (const auto& [numa, cpus] : free) {
    if (&cpus != first) order.insert(order.end(), cpus.begin(), cpus.end());
  }
  order.resize(std::min(order.size(), count));
  std::ranges::sort(order);
  bound.insert(order.begin(), order.end());
  return order;
}

std::vector<int> FreeGpus(const NodeView& node, const Demand& demand) {
  std::vector<int> free;
  for (const int gpu : node.gpus_free) {
    if (WantedModel(node.gpu_models.at(gpu), demand)) free.push_back(gpu);
  }
  return free;
}

// Ranks share as few GPUs as they can, so the fullest comes first.
std::vector<int> GpusToShare(const NodeView& node, const Demand& demand) {
  std::vector<std::pair<int, int>> left;  // thousandths, GPU
  for (const int gpu : node.gpus_free) left.emplace_back(kWholeGpu, gpu);
  for (const auto& [gpu, taken] : node.gpu_shares) left.emplace_back(kWholeGpu - taken, gpu);
  std::ranges::sort(left);
  std::vector<int> gpus;
  for (const auto& [thousandths, gpu] : left) {
    // An agent that starts anew may find fewer than its ranks were given.
    if (gpu >= static_cast<int>(node.gpu_models.size()) || !WantedModel(node.gpu_models[gpu], demand))
      continue;
    for (int room = thousandths / demand.gpu_share; room > 0; --room) gpus.push_back(gpu);
  }
  return gpus;
}

bool LooksLikeId(absl::string_view name) {
  return name.size() == 16 && name.find_first_not_of("0123456789abcdef") == absl::string_view::npos;
}

}  // namespace

bool IsAmong(const NodeView& node, const spec::HostNames& names) {
  if (names.empty()) return false;
  if (names.contains(node.id.value)) return true;
  for (const absl::string_view name :
       {absl::string_view(node.hostname), topology::ShortName(node.hostname)}) {
    if (!LooksLikeId(name) && names.contains(name)) return true;
  }
  return false;
}

NodesByName::NodesByName(const std::vector<NodeView>& nodes) {
  for (const NodeView& node : nodes) {
    by_name_[node.id.value].push_back(&node);
    if (!LooksLikeId(node.hostname) && node.hostname != node.id.value)
      by_name_[node.hostname].push_back(&node);
    const absl::string_view name = topology::ShortName(node.hostname);
    if (name != node.hostname && !LooksLikeId(name)) by_short_[name].push_back(&node);
  }
}

std::vector<const NodeView*> NodesByName::Find(absl::string_view name,
                                               std::vector<std::string>* several) const {
  if (const auto it = by_name_.find(name); it != by_name_.end()) return it->second;
  const auto it = by_short_.find(name);
  if (it == by_short_.end()) return {};
  std::set<std::string> hostnames;
  for (const NodeView* node : it->second) hostnames.insert(node->hostname);
  if (hostnames.size() == 1) return it->second;
  if (several != nullptr) several->assign(hostnames.begin(), hostnames.end());
  return {};
}

NoSuchNode WhyNoSuchNode(const NodesByName& nodes, const spec::HostNames& names) {
  for (const std::string& name : names) {
    std::vector<std::string> several;
    (void)nodes.Find(name, &several);
    if (several.empty()) continue;
    const auto as_it_is = [](const std::string& hostname) { return hostname; };
    return {absl::StrCat(several.size(),
                         " hosts are called so without their domain: ", OfEach(several, ", ", as_it_is)),
            "the whole name of one of them"};
  }
  return {"no node that is up is called so", "a node of that name joins"};
}

std::string PrintNames(const spec::HostNames& names) {
  constexpr size_t kBytesMax = 120;
  std::string text = topology::PrintHostlist(std::vector<std::string>(names.begin(), names.end()));
  if (text.size() <= kBytesMax) return text;
  size_t end = kBytesMax;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80)
    --end;  // not inside of a character
  return absl::StrCat(text.substr(0, end), "...");
}

std::set<NodeId> NodesCalled(const std::vector<NodeView>& nodes, const spec::HostNames& names) {
  std::set<NodeId> called;
  if (names.empty()) return called;
  const NodesByName by_name(nodes);
  for (const std::string& name : names) {
    for (const NodeView* node : by_name.Find(name)) called.insert(node->id);
  }
  return called;
}

NodeVerdict RoomOn(const NodeView& node, const Demand& demand, Candidate& out) {
  const Exclusion excluded = Excluded(node, demand);
  NodeVerdict verdict{node.id, node.hostname, 0, excluded.why, excluded.remedy};
  out.view = &node;
  if (!verdict.limit.empty()) return verdict;
  int wanted_models = 0;
  for (const std::string& model : node.gpu_models) wanted_models += WantedModel(model, demand) ? 1 : 0;
  out.gpus = demand.gpu_share > 0 ? GpusToShare(node, demand) : FreeGpus(node, demand);
  out.gpus_per_rank = GpusPerRank(node, wanted_models, demand);
  if (!demand.gpu_types.empty() && wanted_models == 0) {
    verdict.limit = absl::StrCat("no GPU of type ", absl::StrJoin(demand.gpu_types, " or "));
    verdict.remedy = "a node with such a GPU, or another resources.gpu_type";
    return verdict;
  }
  int room = kUnlimited;
  if (!demand.oversubscribe_cpus) {
    Limit(node.cpus_free / std::max(1, demand.cpus.value_or(1)),
          absl::StrCat("cpus: ", node.cpus_free, " of ", node.cpus, " free"), room, verdict.limit);
  }
  if (demand.memory_bytes > 0) {
    Limit(static_cast<int>(std::min<uint64_t>(node.memory_free_bytes / demand.memory_bytes, kUnlimited)),
          absl::StrCat("memory: ", PrintBytes(node.memory_free_bytes), " of ", PrintBytes(node.memory_bytes),
                       " free"),
          room, verdict.limit);
  }
  if (out.gpus_per_rank > 0) {
    Limit(static_cast<int>(out.gpus.size()) / out.gpus_per_rank,
          demand.gpu_share > 0
              ? absl::StrCat("gpus: ", wanted_models, wanted_models == 1 ? " has" : " have", " room for ",
                             out.gpus.size(), " times ", spec::PrintGpuShare(demand.gpu_share))
              : absl::StrCat("gpus: ", out.gpus.size(), " of ", wanted_models, " free"),
          room, verdict.limit);
  }
  int exact = demand.ranks_per_node.value_or(0);
  if (!demand.ranks_per_node && demand.count_nodes) {
    const int each = demand.gpu_share > 0 ? kWholeGpu / demand.gpu_share : 1;
    exact = demand.all_gpus ? 1 : std::max(1, wanted_models * each);
  }
  if (exact > 0) {
    if (room < exact) {
      verdict.limit = absl::StrCat(verdict.limit, ", room for ", room, " of ", exact, " ranks a node");
      room = 0;
    } else {
      room = exact;
      verdict.limit.clear();
    }
  }
  verdict.room = out.room = room;
  return verdict;
}

void WarnOfSharing(const std::vector<Candidate>& candidates, const Demand& demand, Placement& out) {
  if (!demand.oversubscribe_cpus) return;
  for (const Candidate& c : candidates) {
    const int need = c.given * demand.cpus.value_or(1);
    if (c.given > 0 && need > c.view->cpus_free) {
      out.warnings.push_back(absl::StrCat(
          c.view->hostname, ": ", c.given, demand.spares > 0 ? " processes need " : " ranks need ", need,
          " cpus, ", c.view->cpus_free, " of ", c.view->cpus, " are free; they share them (oversubscribed)"));
    }
  }
}

void FillSlots(const std::vector<Candidate>& candidates, const std::vector<size_t>& candidate_of,
               const std::vector<std::vector<int>>& gpus, const Demand& demand, Placement& out) {
  std::vector<int> local(candidates.size(), 0);
  std::vector<std::set<int>> bound;
  for (const Candidate& c : candidates) bound.push_back(c.view->cpus_bound);
  for (size_t rank = 0; rank < candidate_of.size(); ++rank) {
    const size_t i = candidate_of[rank];
    const NodeView& node = *candidates[i].view;
    RankSlot slot{static_cast<int>(rank), local[i]++, node.id, {}, gpus[rank]};
    if (demand.cpus && !demand.oversubscribe_cpus)
      slot.cpus = TakeCpus(node, slot.gpus, static_cast<size_t>(*demand.cpus), bound[i]);
    if (slot.local_rank == 0) out.nodes.push_back(node.id);
    out.ranks.push_back(std::move(slot));
  }
}

}  // namespace gtrain::plan
