#include "job/plan/by_topology.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "job/plan/room.h"
#include "job/spec/mesh.h"
#include "topology/import.h"
#include "topology/place/plan.h"

namespace gtrain::plan {
namespace {

using topology::Fabric;
using topology::Mesh;
using topology::Topology;

constexpr int kUnknown = -1;

// The machine of each candidate in `topology`.
std::vector<int> MachinesOf(const std::vector<Candidate>& candidates, const Topology& topology) {
  absl::flat_hash_map<absl::string_view, int> by_name;
  for (size_t m = 0; m < topology.machines.size(); ++m)
    by_name[topology.machines[m].name] = static_cast<int>(m);
  std::vector<int> machines;
  for (const Candidate& c : candidates) {
    const absl::string_view host = c.view->hostname;
    auto it = by_name.find(c.view->id.value);
    if (it == by_name.end()) it = by_name.find(host);
    if (it == by_name.end()) it = by_name.find(host.substr(0, host.find('.')));
    machines.push_back(it == by_name.end() ? kUnknown : it->second);
  }
  return machines;
}

// What is known of the inside of a machine. What a file says is checked against what the agent found: where
// the number of GPUs differs, they are all alike; a machine that is plain has as many slots as ranks fit.
enum class Inside { kOfFile, kGpus, kPlain };

// Candidates as slots of a fabric.
class Seats {
 public:
  Seats(const std::vector<Candidate>& candidates, const Topology& topology)
      : candidates_(candidates), topology_(topology), file_machine_(MachinesOf(candidates, topology)) {
    for (const Candidate& c : candidates) gpus_per_rank_ = std::max(gpus_per_rank_, c.gpus_per_rank);
    for (size_t i = 0; i < candidates.size(); ++i) inside_.push_back(InsideOf(i));
  }

  // How many candidates the topology has.
  size_t known() const { return file_machine_.size() - std::ranges::count(file_machine_, kUnknown); }
  std::string UnknownHosts() const {
    std::vector<std::string> names;
    for (size_t i = 0; i < candidates_.size(); ++i) {
      if (file_machine_[i] == kUnknown && names.size() < 8) names.push_back(candidates_[i].view->hostname);
    }
    const size_t more = candidates_.size() - known() - names.size();
    return absl::StrCat(absl::StrJoin(names, ", "), more > 0 ? absl::StrCat(" and ", more, " more") : "");
  }

  // False: nothing can be planned.
  bool Compile() {
    for (int attempt = 0; attempt < 3; ++attempt) {
      absl::StatusOr<Fabric> fabric = topology::Compile(Sketch(), gpus_per_rank_);
      if (!fabric.ok()) {  // a rank has more GPUs than any island
        std::ranges::fill(inside_, Inside::kPlain);
        continue;
      }
      fabric_ = *std::move(fabric);
      if (FillUsable()) return true;
    }
    return false;
  }

  const Fabric& fabric() const { return fabric_; }
  const std::vector<int32_t>& usable() const { return usable_; }
  size_t CandidateOf(int32_t slot) const { return candidate_of_machine_.at(fabric_.slots[slot].machine); }

  // Of a rank there; where slots have none of their own, nothing is known.
  bool HasGpus(int32_t slot) const { return inside_[CandidateOf(slot)] != Inside::kPlain; }
  std::vector<int> GpusOf(int32_t slot) const {
    const auto first = fabric_.gpus.begin() + static_cast<std::ptrdiff_t>(slot) * fabric_.gpus_per_slot;
    return {first, first + fabric_.gpus_per_slot};
  }

 private:
  Inside InsideOf(size_t i) const {
    const Candidate& c = candidates_[i];
    if (c.gpus_per_rank == 0 || c.gpus_per_rank != gpus_per_rank_) return Inside::kPlain;
    const bool as_filed = file_machine_[i] != kUnknown && ShapeOf(i).gpus.size() == c.view->gpu_models.size();
    return as_filed ? Inside::kOfFile : Inside::kGpus;
  }
  const topology::Shape& ShapeOf(size_t i) const {
    return topology_.shapes[topology_.machines[file_machine_[i]].shape];
  }

  // The topology, with the candidates in the place of their machines. Two agents of one machine are two
  // machines on the same links; one that the file does not have hangs on nothing.
  Topology Sketch() {
    Topology sketch = topology_;
    for (topology::Machine& machine : sketch.machines)
      machine.broken_gpus.clear();                   // agents count what works
    std::map<std::tuple<int, bool, int>, int> made;  // shapes, by that of the file, and slots
    std::vector<std::vector<int>> more(topology_.machines.size());
    std::vector<bool> met(topology_.machines.size(), false);
    candidate_of_machine_.clear();
    machine_of_.clear();
    for (size_t i = 0; i < candidates_.size(); ++i) {
      int machine = file_machine_[i];
      if (machine == kUnknown || met[machine]) {
        if (machine != kUnknown) more[machine].push_back(static_cast<int>(sketch.machines.size()));
        sketch.machines.push_back({candidates_[i].view->id.value,
                                   machine == kUnknown ? 0 : topology_.machines[machine].shape,
                                   {},
                                   {},
                                   ""});
        machine = static_cast<int>(sketch.machines.size()) - 1;
      } else {
        met[machine] = true;
      }
      machine_of_.push_back(machine);
      candidate_of_machine_[machine] = i;
      if (inside_[i] == Inside::kOfFile) continue;
      const bool plain = inside_[i] == Inside::kPlain;
      const int slots =
          plain ? std::max(1, candidates_[i].room) : static_cast<int>(candidates_[i].view->gpu_models.size());
      const int filed = file_machine_[i] == kUnknown ? kUnknown : sketch.machines[machine].shape;
      const auto [it, fresh] =
          made.try_emplace({filed, plain, slots}, static_cast<int>(sketch.shapes.size()));
      if (fresh) {
        topology::Shape shape = topology::ShapeOfOneSlot();
        if (filed != kUnknown) shape.nics = topology_.shapes[filed].nics;
        shape.slots = plain ? slots : 0;
        shape.gpus.resize(plain ? 0 : static_cast<size_t>(slots));
        sketch.shapes.push_back(std::move(shape));
      }
      sketch.machines[machine].shape = it->second;
    }
    for (const topology::Link& link : topology_.links) {
      for (const auto end : {&topology::Link::from, &topology::Link::to}) {
        if ((link.*end).is_switch) continue;
        for (const int machine : more[(link.*end).index]) {
          topology::Link copy = link;
          (copy.*end).index = machine;
          if (sketch.shapes[sketch.machines[machine].shape].nics.empty()) (copy.*end).nic = -1;
          sketch.links.push_back(copy);
        }
      }
    }
    return sketch;
  }

  // False where islands have less room than the node as a whole: such a node becomes a plain one.
  bool FillUsable() {
    usable_.clear();
    bool all = true;
    for (size_t i = 0; i < candidates_.size(); ++i) {
      const Candidate& c = candidates_[i];
      const std::set<int> free(c.gpus.begin(), c.gpus.end());
      const auto [first, end] = fabric_.slots_of_machine[machine_of_[i]];
      int found = 0;
      for (int32_t slot = first; slot < end && found < c.room; ++slot) {
        bool fits = true;
        for (int g = 0; g < fabric_.gpus_per_slot && inside_[i] != Inside::kPlain; ++g)
          fits = fits && free.contains(fabric_.gpus[static_cast<size_t>(slot) * fabric_.gpus_per_slot + g]);
        if (!fits) continue;
        usable_.push_back(slot);
        ++found;
      }
      if (found == c.room) continue;
      inside_[i] = Inside::kPlain;
      all = false;
    }
    std::ranges::sort(usable_);
    return all;
  }

  const std::vector<Candidate>& candidates_;
  const Topology& topology_;
  std::vector<int> file_machine_;
  std::vector<Inside> inside_;
  int gpus_per_rank_ = 0;
  std::vector<int> machine_of_;  // of the sketch, by candidate
  absl::flat_hash_map<int, size_t> candidate_of_machine_;
  Fabric fabric_;
  std::vector<int32_t> usable_;  // ascending
};

bool GivesWholeNodes(const Demand& demand) { return demand.count_nodes || demand.ranks_per_node; }

// Slots for `mesh`: those that `kept` has, -1 for the others, which go where they add least.
std::vector<int32_t> Complete(const Fabric& fabric, const Mesh& mesh, const std::vector<int32_t>& usable,
                              std::vector<int32_t> kept) {
  std::vector<int32_t> free;
  const std::set<int32_t> taken(kept.begin(), kept.end());
  std::ranges::copy_if(usable, std::back_inserter(free), [&](int32_t slot) { return !taken.contains(slot); });
  const topology::Replacement moved = Replace(fabric, mesh, kept, free, {});
  if (!moved.done) return {};
  for (const topology::Move& move : moved.moves) kept[move.rank] = move.to;
  return kept;
}

// Each rank's slot of before where it is free: the same GPUs, or else any slot of the same node. -1: none.
std::vector<int32_t> Kept(const Seats& seats, const std::vector<Candidate>& candidates,
                          const std::vector<int32_t>& usable, const std::vector<RankSlot>& before,
                          int64_t ranks) {
  std::map<NodeId, std::vector<int32_t>> free;
  for (const int32_t slot : usable) free[candidates[seats.CandidateOf(slot)].view->id].push_back(slot);
  std::vector<int32_t> kept(static_cast<size_t>(ranks), -1);
  const size_t known = std::min(before.size(), kept.size());
  for (const bool same_gpus : {true, false}) {
    for (size_t rank = 0; rank < known; ++rank) {
      const auto there = free.find(before[rank].node);
      if (kept[rank] >= 0 || there == free.end() || there->second.empty()) continue;
      auto slot = there->second.begin();
      if (same_gpus) {
        slot = std::ranges::find_if(there->second, [&](int32_t free_slot) {
          return seats.HasGpus(free_slot) && seats.GpusOf(free_slot) == before[rank].gpus;
        });
        if (slot == there->second.end()) continue;
      }
      kept[rank] = *slot;
      there->second.erase(slot);
    }
  }
  return kept;
}

// Where nodes are given whole, which of them: as many as packed, near each other, those that had ranks first.
std::set<size_t> ChooseNodes(const Seats& seats, const std::vector<Candidate>& candidates,
                             const Placement& packed, const Mesh& mesh, const std::vector<int32_t>& usable,
                             const std::vector<RankSlot>& stay) {
  std::map<NodeId, size_t> index;
  for (size_t i = 0; i < candidates.size(); ++i) index[candidates[i].view->id] = i;
  std::set<size_t> as_packed;
  for (const NodeId& node : packed.nodes) as_packed.insert(index.at(node));
  const int room = candidates[*as_packed.begin()].room;
  const auto alike = [&](size_t i) { return candidates[i].room == room; };
  if (!std::ranges::all_of(as_packed, alike)) return as_packed;
  std::vector<int32_t> of_alike;
  std::map<size_t, int32_t> first;  // slot of each node
  for (const int32_t slot : usable) {
    const size_t i = seats.CandidateOf(slot);
    if (!alike(i)) continue;
    of_alike.push_back(slot);
    first.emplace(i, slot);
  }
  const auto nodes_of = [&](const std::vector<int32_t>& slots) {
    std::set<size_t> nodes;
    for (const int32_t slot : slots) nodes.insert(seats.CandidateOf(slot));
    return nodes;
  };
  std::vector<int32_t> kept = Kept(seats, candidates, of_alike, stay, mesh.ranks());
  if (std::ranges::count(kept, -1) < mesh.ranks()) {
    const std::set<size_t> whole = nodes_of(Complete(seats.fabric(), mesh, of_alike, std::move(kept)));
    return whole.size() == as_packed.size() ? whole : as_packed;
  }
  std::vector<int32_t> firsts;
  for (const auto& [i, slot] : first) firsts.push_back(slot);
  std::ranges::sort(firsts);
  const Mesh nodes{{topology::AxisNamed(spec::kDataAxis, static_cast<int>(as_packed.size()))}};
  return nodes_of(PlanOn(seats.fabric(), nodes, firsts, 0).slot_of_rank);
}

std::vector<int32_t> OfChosenNodes(const Seats& seats, const std::vector<Candidate>& candidates,
                                   const Placement& packed, const Mesh& mesh,
                                   const std::vector<RankSlot>& stay) {
  std::vector<int32_t> usable = seats.usable();
  const std::set<size_t> chosen = ChooseNodes(seats, candidates, packed, mesh, usable, stay);
  std::erase_if(usable, [&](int32_t slot) { return !chosen.contains(seats.CandidateOf(slot)); });
  return usable;
}

bool HasPlace(const RankSlot& slot) { return !slot.node.value.empty(); }

// The ranks of `packed`; those that are to be started have no node. Of each node as many go on as wait there,
// those first that had their number there.
std::vector<RankSlot> WhoGoesOn(const Placement& packed, const Demand& demand) {
  std::map<NodeId, int> left;
  for (const auto& [node, waiting] : demand.waiting) left[node] = waiting.members + waiting.others;
  std::vector<bool> goes_on(packed.ranks.size(), false);
  for (const bool same_number : {true, false}) {
    for (size_t rank = 0; rank < packed.ranks.size(); ++rank) {
      const NodeId& node = packed.ranks[rank].node;
      const bool had = rank < demand.previous.size() && demand.previous[rank] == node;
      const auto there = left.find(node);
      if (goes_on[rank] || (same_number && !had) || there == left.end() || there->second == 0) continue;
      --there->second;
      goes_on[rank] = true;
    }
  }
  std::vector<RankSlot> ranks = packed.ranks;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (!goes_on[rank]) ranks[rank].node = NodeId();
  }
  return ranks;
}

std::vector<Candidate> CandidatesOf(const std::vector<NodeView>& nodes, const Demand& demand) {
  const std::set<NodeId> previous(demand.previous.begin(), demand.previous.end());
  std::vector<Candidate> candidates;
  for (const NodeView& node : nodes) {
    Candidate candidate;
    if (RoomOn(node, demand, candidate).room == 0) continue;
    if (!demand.count_nodes) candidate.room = std::min(candidate.room, demand.max);
    candidate.previous =
        demand.waiting.empty() ? previous.contains(node.id) : demand.waiting.contains(node.id);
    candidates.push_back(std::move(candidate));
  }
  return candidates;
}

// Whether each process that goes on has a slot on its node, with the GPUs that it has where slots have some
// of their own.
bool AllHaveTheirs(const Seats& seats, const std::vector<Candidate>& candidates,
                   const std::vector<int32_t>& slots, const std::vector<RankSlot>& stay) {
  for (size_t rank = 0; rank < slots.size(); ++rank) {
    if (!HasPlace(stay[rank])) continue;
    if (slots[rank] < 0 || candidates[seats.CandidateOf(slots[rank])].view->id != stay[rank].node)
      return false;
    if (seats.HasGpus(slots[rank]) && seats.GpusOf(slots[rank]) != stay[rank].gpus) return false;
  }
  return true;
}

// The GPUs of each rank: those of who goes on, of the slot, or else the first that nobody has.
std::vector<std::vector<int>> GpusOf(const Seats& seats, const std::vector<Candidate>& candidates,
                                     const std::vector<int32_t>& slots, const std::vector<RankSlot>& stay) {
  std::vector<std::vector<int>> gpus(slots.size());
  std::vector<std::set<int>> taken(candidates.size());
  for (size_t rank = 0; rank < slots.size(); ++rank) {
    const size_t i = seats.CandidateOf(slots[rank]);
    if (rank < stay.size() && HasPlace(stay[rank])) {
      gpus[rank] = stay[rank].gpus;
    } else if (seats.HasGpus(slots[rank])) {
      gpus[rank] = seats.GpusOf(slots[rank]);
    }
    taken[i].insert(gpus[rank].begin(), gpus[rank].end());
  }
  for (size_t rank = 0; rank < slots.size(); ++rank) {
    const size_t i = seats.CandidateOf(slots[rank]);
    for (const int gpu : candidates[i].gpus) {
      if (static_cast<int>(gpus[rank].size()) == candidates[i].gpus_per_rank) break;
      if (taken[i].insert(gpu).second) gpus[rank].push_back(gpu);
    }
  }
  return gpus;
}

std::string PlacesText(const std::vector<Candidate>& candidates, const std::vector<size_t>& candidate_of) {
  std::map<size_t, int> given;
  for (const size_t i : candidate_of) ++given[i];
  const std::vector<std::pair<size_t, int>> on(given.begin(), given.end());
  return OfEach(on, ", ", [&](const std::pair<size_t, int>& node) {
    return absl::StrCat(node.second, " on ", candidates[node.first].view->hostname);
  });
}

// Slots of ranks, then of those that wait beside them.
struct Arranged {
  std::vector<int32_t> slots;
  size_t kept = 0;      // ranks
  topology::Plan plan;  // with the cost of `slots`
};

// `kept`: slots that stay, -1 for the others. nullopt: there is no room.
std::optional<Arranged> Arrange(const Fabric& fabric, const Mesh& mesh, std::vector<int32_t> usable,
                                std::vector<int32_t> kept) {
  std::vector<int32_t> spares(kept.begin() + mesh.ranks(), kept.end());
  kept.resize(static_cast<size_t>(mesh.ranks()));
  const std::set<int32_t> reserved(spares.begin(), spares.end());
  std::erase_if(usable, [&](int32_t slot) { return reserved.contains(slot); });
  Arranged out;
  out.kept = kept.size() - std::ranges::count(kept, -1);
  out.plan = PlanOn(fabric, mesh, usable, 0);
  out.slots = out.plan.slot_of_rank;
  if (out.kept > 0) {
    out.slots = Complete(fabric, mesh, usable, std::move(kept));
    if (out.slots.empty()) return std::nullopt;
    out.plan.rejected = {{absl::StrCat(out.plan.policy, " from scratch"), out.plan.cost}};
    out.plan.cost = Evaluate(fabric, mesh, out.slots);
  }
  std::vector<int32_t> found =
      SpareSlots(fabric, usable, out.slots, static_cast<int>(std::ranges::count(spares, -1)));
  std::ranges::reverse(found);
  for (int32_t& spare : spares) {
    if (spare >= 0) continue;
    spare = found.back();
    found.pop_back();
  }
  out.slots.insert(out.slots.end(), spares.begin(), spares.end());
  return out;
}

// What packing would have cost.
void RejectPacked(const Seats& seats, const std::vector<Candidate>& candidates, const Placement& packed,
                  const Mesh& mesh, topology::Plan& plan) {
  const std::vector<int32_t> slots = Kept(seats, candidates, seats.usable(), packed.ranks, mesh.ranks());
  if (std::ranges::count(slots, -1) == 0)
    plan.rejected.push_back({"packed", Evaluate(seats.fabric(), mesh, slots)});
}

void WarnOfStrangers(const Seats& seats, size_t candidates, Placement& out) {
  if (seats.known() == candidates) return;
  out.warnings.push_back(absl::StrCat("the topology does not have ", seats.UnknownHosts(), ": ",
                                      candidates - seats.known() == 1 ? "it counts" : "they count",
                                      " as far from everything"));
}

// Where the node hangs, as its labels say; empty: they do not.
std::string PathOf(const NodeView& node) {
  const auto of = [&](const char* key) {
    const auto label = node.labels.find(key);
    return label == node.labels.end() ? std::string() : label->second;
  };
  if (const std::string fabric = of(kFabricLabel); !fabric.empty()) return fabric;
  std::string path;
  for (const char* key : {"zone", "rack"}) {
    if (const std::string place = of(key); !place.empty()) absl::StrAppend(&path, "/", place);
  }
  return path;
}

std::string Milliseconds(double seconds) { return absl::StrFormat("%.3g ms", seconds * 1e3); }

std::string MeshText(const Mesh& mesh) {
  const auto axis = [](std::string* out, const topology::Axis& a) {
    absl::StrAppend(out, a.name, ": ", a.size);
  };
  return absl::StrCat("{", absl::StrJoin(mesh.axes, ", ", axis), "}");
}

// As much as a step spends on the wires when nothing overlaps, beside what no placement beats and what was
// rejected.
std::string Reason(const topology::Plan& plan, const Mesh& mesh, size_t kept, const std::string& where) {
  std::string text =
      absl::StrCat(mesh.ranks(), mesh.ranks() == 1 ? " rank" : " ranks", " of mesh ", MeshText(mesh),
                   " by the topology: ", where, "; a step communicates ", Milliseconds(plan.cost.seconds),
                   " (predicted; no placement less than ", Milliseconds(plan.bound.seconds), ")");
  if (kept > 0)
    absl::StrAppend(&text, "; ", kept,
                    kept == 1 ? " rank stays where it was" : " ranks stay where they were");
  for (const topology::Candidate& c : plan.rejected) {
    if (std::abs(c.cost.seconds - plan.cost.seconds) > 1e-3 * plan.cost.seconds)
      absl::StrAppend(&text, "; ", c.policy, " ", Milliseconds(c.cost.seconds));
  }
  return text;
}

// `stay`: processes that go on, by rank; empty where none does.
Placement Filled(const Seats& seats, const std::vector<Candidate>& candidates, const Demand& demand,
                 const Placement& packed, const Mesh& mesh, const Arranged& arranged,
                 const std::vector<RankSlot>& stay) {
  Placement out;
  out.placed = true;
  out.verdicts = packed.verdicts;
  out.warnings = packed.warnings;
  std::vector<size_t> candidate_of;
  for (const int32_t slot : arranged.slots) candidate_of.push_back(seats.CandidateOf(slot));
  FillSlots(candidates, candidate_of, GpusOf(seats, candidates, arranged.slots, stay), demand, out);
  out.reason = Reason(arranged.plan, mesh, arranged.kept, PlacesText(candidates, candidate_of));
  WarnOfStrangers(seats, candidates.size(), out);
  return out;
}

}  // namespace

Mesh MeshOf(const std::vector<spec::MeshAxis>& axes, int64_t ranks) {
  Mesh mesh;
  const spec::MeshShape shape = spec::ShapeOf(axes);
  for (const spec::MeshAxis& axis : axes) {
    const int64_t size = axis.size ? *axis.size : std::max<int64_t>(1, ranks / shape.ranks);
    mesh.axes.push_back(topology::AxisNamed(axis.name, static_cast<int>(size)));
  }
  if (mesh.axes.empty()) mesh.axes.push_back(topology::AxisNamed(spec::kDataAxis, static_cast<int>(ranks)));
  return mesh;
}

Topology TopologyOfLabels(const std::vector<NodeView>& nodes) {
  std::string rows;
  for (const NodeView& node : nodes) {
    const std::string path = PathOf(node);
    if (path.empty()) continue;
    const std::string row = absl::StrCat(node.id.value, " ", path, "\n");
    // Each alone first: what one node says amiss is not to lose the others.
    if (topology::ImportPaths(row, kFabricLabel, topology::ShapeOfOneSlot()).ok())
      absl::StrAppend(&rows, row);
  }
  absl::StatusOr<Topology> topology = topology::ImportPaths(rows, kFabricLabel, topology::ShapeOfOneSlot());
  return topology.ok() ? *std::move(topology) : Topology();
}

Placement ByTopology(const std::vector<NodeView>& nodes, const Demand& demand, Placement packed,
                     const Topology& topology, const std::vector<spec::MeshAxis>& axes,
                     const std::vector<RankSlot>& before) {
  if (!packed.placed || demand.oversubscribe_cpus || topology.machines.empty()) return packed;
  const bool go_on = !demand.waiting.empty();
  std::vector<RankSlot> stay = go_on ? WhoGoesOn(packed, demand) : before;
  if (go_on && std::ranges::all_of(stay, HasPlace)) return packed;
  const std::vector<Candidate> candidates = CandidatesOf(nodes, demand);
  Seats seats(candidates, topology);
  if (seats.known() == 0 || !seats.Compile()) return packed;
  const int64_t world = static_cast<int64_t>(packed.ranks.size());
  const int64_t spares = demand.count_nodes ? 0 : std::max<int64_t>(0, world - (demand.max - demand.spares));
  const Mesh mesh = MeshOf(axes, world - spares);
  if (mesh.ranks() != world - spares) return packed;
  // Who waits beside the ranks keeps a place only if it goes on.
  if (!go_on) stay.resize(std::min(stay.size(), static_cast<size_t>(mesh.ranks())));
  const std::vector<int32_t> usable =
      GivesWholeNodes(demand) ? OfChosenNodes(seats, candidates, packed, mesh, stay) : seats.usable();
  if (static_cast<int64_t>(usable.size()) < world) return packed;
  std::vector<int32_t> kept = Kept(seats, candidates, usable, stay, world);
  if (go_on && !AllHaveTheirs(seats, candidates, kept, stay)) return packed;
  std::optional<Arranged> arranged = Arrange(seats.fabric(), mesh, usable, std::move(kept));
  if (!arranged) return packed;
  RejectPacked(seats, candidates, packed, mesh, arranged->plan);

  if (!go_on) stay.clear();
  const Placement out = Filled(seats, candidates, demand, packed, mesh, *arranged, stay);
  const bool no_link = packed.nodes.size() == 1 && out.ranks == packed.ranks;
  return no_link ? packed : out;
}

}  // namespace gtrain::plan
