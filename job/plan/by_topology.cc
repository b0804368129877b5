#include "job/plan/by_topology.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "job/plan/room.h"
#include "job/spec/mesh.h"
#include "topology/hostlist.h"
#include "topology/import.h"
#include "topology/place/plan.h"

namespace gtrain::plan {
namespace {

using topology::Fabric;
using topology::Mesh;
using topology::Topology;

constexpr int kUnknown = -1;
constexpr size_t kPlacesMax = 8, kPlaceBytesMax = 64;  // of a label, and each of them

// What is known of the inside of a machine. What a file says is checked against what the agent found: where
// the number of GPUs differs, they are all alike; a machine that is plain has as many slots as ranks fit.
enum class Inside { kOfFile, kGpus, kPlain };

// Candidates as slots of a fabric.
class Seats {
 public:
  // `machines`: of each candidate in `topology`, kUnknown where it has none.
  // `share`: ranks share GPUs, so that a slot has none of its own.
  Seats(const std::vector<Candidate>& candidates, const Topology& topology, std::vector<int> machines,
        bool share)
      : candidates_(candidates), topology_(topology), file_machine_(std::move(machines)), share_(share) {
    for (const Candidate& c : candidates) gpus_per_rank_ = std::max(gpus_per_rank_, c.gpus_per_rank);
    for (size_t i = 0; i < candidates.size(); ++i) inside_.push_back(InsideOf(i));
  }

  // False: nothing can be planned. `stay`: by rank; their GPUs come first where a node has more free ones
  // than it takes ranks.
  bool Compile(const std::vector<RankSlot>& stay) {
    for (int attempt = 0; attempt < 3; ++attempt) {
      absl::StatusOr<Fabric> fabric = topology::Compile(Sketch(), gpus_per_rank_);
      if (!fabric.ok()) {  // a rank has more GPUs than any island
        std::ranges::fill(inside_, Inside::kPlain);
        continue;
      }
      fabric_ = *std::move(fabric);
      if (FillUsable(stay)) return true;
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
    if (share_ || c.gpus_per_rank == 0 || c.gpus_per_rank != gpus_per_rank_) return Inside::kPlain;
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
  bool FillUsable(const std::vector<RankSlot>& stay) {
    usable_.clear();
    std::map<NodeId, std::set<std::vector<int>>> had;
    for (const RankSlot& slot : stay) had[slot.node].insert(slot.gpus);
    bool all = true;
    for (size_t i = 0; i < candidates_.size(); ++i) {
      std::vector<int32_t> fitting = FittingSlots(i);
      const size_t room = static_cast<size_t>(candidates_[i].room);
      if (fitting.size() < room) {
        inside_[i] = Inside::kPlain;
        all = false;
        continue;
      }
      if (fitting.size() > room) Choose(room, had[candidates_[i].view->id], fitting);
      usable_.insert(usable_.end(), fitting.begin(), fitting.end());
    }
    std::ranges::sort(usable_);
    return all;
  }

  std::vector<int32_t> FittingSlots(size_t i) const {
    const std::set<int> free(candidates_[i].gpus.begin(), candidates_[i].gpus.end());
    const auto [first, end] = fabric_.slots_of_machine[machine_of_[i]];
    std::vector<int32_t> fitting;
    for (int32_t slot = first; slot < end; ++slot) {
      const std::vector<int> gpus = inside_[i] == Inside::kPlain ? std::vector<int>() : GpusOf(slot);
      if (std::ranges::all_of(gpus, [&](int gpu) { return free.contains(gpu); })) fitting.push_back(slot);
    }
    return fitting;
  }

  // `room` of the slots of a node: those with these GPUs, then of the smallest island that has enough, else
  // of the fullest ones.
  void Choose(size_t room, const std::set<std::vector<int>>& had, std::vector<int32_t>& slots) const {
    const auto island = [&](int32_t slot) { return fabric_.machine_level > 0 ? fabric_.domain[0][slot] : 0; };
    std::map<int32_t, size_t> count;
    for (const int32_t slot : slots) ++count[island(slot)];
    const auto key = [&](int32_t slot) {
      const bool known = HasGpus(slot) && had.contains(GpusOf(slot));
      const auto there = static_cast<std::ptrdiff_t>(count[island(slot)]);
      const bool enough = there >= static_cast<std::ptrdiff_t>(room);
      return std::tuple(!known, !enough, enough ? there : -there, slot);
    };
    std::ranges::sort(slots, {}, key);
    slots.resize(room);
  }

  const std::vector<Candidate>& candidates_;
  const Topology& topology_;
  std::vector<int> file_machine_;
  bool share_ = false;
  std::vector<Inside> inside_;
  int gpus_per_rank_ = 0;
  std::vector<int> machine_of_;  // of the sketch, by candidate
  absl::flat_hash_map<int, size_t> candidate_of_machine_;
  Fabric fabric_;
  std::vector<int32_t> usable_;  // ascending
};

bool GivesWholeNodes(const Demand& demand) { return demand.count_nodes || demand.ranks_per_node; }

// What a planner may take on the loop of a head: some tenths of a second.
constexpr int64_t kPlanWorkMax = 100'000, kRepairWorkMax = 5'000'000;

// To how many others a rank talks.
int64_t NeighboursOf(const Mesh& mesh) {
  int64_t others = 0;
  for (const topology::Axis& axis : mesh.axes)
    others += axis.pattern == topology::Pattern::kAllToAll ? axis.size : std::min(axis.size, 2);
  return std::max<int64_t>(1, others);
}

// Slots for `mesh`: those that `kept` has, -1 for the others, which go where they add least, those of one
// machine together. Empty: there is no room, or it would take too long.
std::vector<int32_t> Complete(const Fabric& fabric, const Mesh& mesh, const std::vector<int32_t>& usable,
                              const std::vector<NodeId>& was_on, std::vector<int32_t> kept) {
  std::vector<int32_t> free;
  const std::set<int32_t> taken(kept.begin(), kept.end());
  std::ranges::copy_if(usable, std::back_inserter(free), [&](int32_t slot) { return !taken.contains(slot); });
  std::map<NodeId, std::vector<int>> lost;
  int64_t count = 0;
  for (size_t rank = 0; rank < kept.size(); ++rank) {
    if (kept[rank] >= 0) continue;
    lost[rank < was_on.size() ? was_on[rank] : NodeId()].push_back(static_cast<int>(rank));
    ++count;
  }
  if (count * static_cast<int64_t>(free.size()) * NeighboursOf(mesh) > kRepairWorkMax) return {};
  std::vector<std::vector<int>> groups;
  for (auto& [node, ranks] : lost) groups.push_back(std::move(ranks));
  const topology::Replacement moved = ReplaceGroups(fabric, mesh, kept, free, groups);
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

// Moves a node that may have rank 0 to the front of (-room, candidate), where it is taken, and leaves it
// alone where one is all that is taken. False: there is none.
bool TakeFirst(const std::vector<Candidate>& candidates, size_t count,
               std::vector<std::pair<int, size_t>>& nodes) {
  const auto it =
      std::ranges::find_if(nodes, [&](const auto& node) { return candidates[node.second].may_have_rank0; });
  if (it == nodes.end()) return false;
  std::rotate(nodes.begin(), it, it + 1);
  if (count == 1) nodes.resize(1);
  return true;
}

// As many nodes as packing takes, near each other: those of the smallest domain in which so many have room
// for all ranks; of several such domains the one with the least room. Speeds that nobody knows decide nothing
// here, so a job is on no more machines than it needs. The one that rank 0 is to have is among them.
std::set<size_t> ChooseNodes(const KnownTopology& known, const std::vector<Candidate>& candidates,
                             const std::vector<int>& machines, bool rank0, size_t count, int64_t ranks) {
  size_t depth = 0;  // of the domains that are looked at: their paths have so many numbers
  for (const int machine : machines) depth = std::max(depth, known.PathOf(machine).size() + 1);
  for (;; --depth) {
    std::map<std::vector<int>, std::vector<std::pair<int, size_t>>> domains;  // room, and candidate
    for (size_t i = 0; i < candidates.size(); ++i) {
      std::vector<int> path = known.PathOf(machines[i]);
      if (path.size() + 1 == depth) path.push_back(static_cast<int>(i));  // a machine alone
      if (path.size() < depth) continue;                                  // the topology does not have it
      path.resize(depth);
      domains[std::move(path)].emplace_back(-candidates[i].room, i);
    }
    int64_t least = std::numeric_limits<int64_t>::max();
    std::set<size_t> chosen;
    for (auto& [domain, nodes] : domains) {
      if (nodes.size() < count) continue;
      std::ranges::sort(nodes);
      if (rank0 && !TakeFirst(candidates, count, nodes)) continue;
      int64_t room = 0, most = 0;
      for (size_t i = 0; i < nodes.size(); ++i) (i < count - 1 ? most : room) -= nodes[i].first;
      const int64_t whole = most + room;
      // The last is the smallest that is enough.
      size_t last = nodes.size();
      while (last > count - 1 && most - nodes[last - 1].first < ranks) --last;
      if (last < count || whole >= least) continue;
      least = whole;
      chosen = {nodes[last - 1].second};
      for (size_t i = 0; i + 1 < count; ++i) chosen.insert(nodes[i].second);
    }
    if (!chosen.empty() || depth == 0) return chosen;
  }
}

std::vector<int> MachinesOf(const KnownTopology& known, const std::vector<Candidate>& candidates) {
  std::vector<int> machines;
  for (const Candidate& c : candidates) machines.push_back(known.MachineOf(*c.view));
  return machines;
}

// What a plan of a job that is not there yet may have: the nodes that are chosen for it. `considered` gets
// those of packing, too, for a comparison.
std::set<NodeId> NodesFor(const KnownTopology& known, const std::vector<Candidate>& candidates,
                          const std::vector<int>& machines, const Demand& demand, const Placement& packed,
                          std::set<NodeId>& considered) {
  considered = {packed.nodes.begin(), packed.nodes.end()};
  std::set<NodeId> chosen;
  for (const size_t i : ChooseNodes(known, candidates, machines, !demand.rank0.empty(), packed.nodes.size(),
                                    std::ssize(packed.ranks)))
    chosen.insert(candidates[i].view->id);
  considered.insert(chosen.begin(), chosen.end());
  return chosen;
}

// Whether the nodes of the slots are as many as packing takes, and whole where they are given so.
bool MayHaveNodes(const Seats& seats, const std::vector<Candidate>& candidates, const Demand& demand,
                  const Placement& packed, const std::vector<int32_t>& slots) {
  std::map<size_t, int> given;
  for (const int32_t slot : slots) ++given[seats.CandidateOf(slot)];
  if (!GivesWholeNodes(demand)) return given.size() <= packed.nodes.size();
  const auto whole = [&](const std::pair<const size_t, int>& node) {
    return node.second == candidates[node.first].room;
  };
  return given.size() == packed.nodes.size() && std::ranges::all_of(given, whole);
}

bool HasPlace(const RankSlot& slot) { return !slot.node.value.empty(); }

// The ranks of `packed`; those that are to be started have no node. On each node as many go on as wait there,
// each with its GPUs, those first that had their number there.
std::vector<RankSlot> WhoGoesOn(const Placement& packed, const Demand& demand) {
  std::map<NodeId, int> left;
  std::map<NodeId, std::set<int>> gpus;
  for (const auto& [node, waiting] : demand.waiting) {
    left[node] = waiting.members + waiting.others;
    gpus[node].insert(waiting.gpus.begin(), waiting.gpus.end());
  }
  std::vector<bool> goes_on(packed.ranks.size(), false);
  for (const bool same_number : {true, false}) {
    for (size_t rank = 0; rank < packed.ranks.size(); ++rank) {
      const RankSlot& slot = packed.ranks[rank];
      const bool had = rank < demand.previous.size() && demand.previous[rank] == slot.node;
      const auto there = left.find(slot.node);
      if (goes_on[rank] || (same_number && !had) || there == left.end() || there->second == 0) continue;
      const std::set<int>& of_node = gpus[slot.node];
      if (!std::ranges::all_of(slot.gpus, [&](int gpu) { return of_node.contains(gpu); })) continue;
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
  std::vector<Candidate> candidates;
  const std::set<NodeId> rank0 = NodesCalled(nodes, demand.rank0);
  for (const NodeView& node : nodes) {
    Candidate candidate;
    candidate.may_have_rank0 = rank0.contains(node.id);
    if (RoomOn(node, demand, candidate).room == 0) continue;
    if (!demand.count_nodes) candidate.room = std::min(candidate.room, demand.max);
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

// The GPUs of each rank: those of the slot, those that it has or had there, or else the first that nobody
// has.
std::vector<std::vector<int>> GpusOf(const Seats& seats, const std::vector<Candidate>& candidates,
                                     const std::vector<int32_t>& slots, const std::vector<RankSlot>& stay) {
  std::vector<std::vector<int>> gpus(slots.size());
  std::vector<std::multiset<int>> left;
  for (const Candidate& c : candidates) left.emplace_back(c.gpus.begin(), c.gpus.end());
  for (size_t rank = 0; rank < slots.size(); ++rank) {
    const size_t i = seats.CandidateOf(slots[rank]);
    const bool stays = rank < stay.size() && stay[rank].node == candidates[i].view->id;
    const std::vector<int> wanted = seats.HasGpus(slots[rank]) ? seats.GpusOf(slots[rank])
                                    : stays                    ? stay[rank].gpus
                                                               : std::vector<int>();
    if (static_cast<int>(wanted.size()) != candidates[i].gpus_per_rank ||
        !std::ranges::all_of(wanted, [&](int gpu) { return left[i].contains(gpu); }))
      continue;
    for (const int gpu : wanted) left[i].erase(left[i].find(gpu));
    gpus[rank] = wanted;
  }
  for (size_t rank = 0; rank < slots.size(); ++rank) {
    const size_t i = seats.CandidateOf(slots[rank]);
    while (static_cast<int>(gpus[rank].size()) < candidates[i].gpus_per_rank)
      gpus[rank].push_back(left[i].extract(left[i].begin()).value());
  }
  return gpus;
}

// In the order of the ranks.
std::string PlacesText(const std::vector<Candidate>& candidates, const std::vector<size_t>& candidate_of) {
  std::vector<std::pair<size_t, int>> on;
  std::map<size_t, size_t> at;
  for (const size_t i : candidate_of) {
    const auto [it, first] = at.try_emplace(i, on.size());
    if (first) on.emplace_back(i, 0);
    ++on[it->second].second;
  }
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
                                const std::vector<NodeId>& was_on, std::vector<int32_t> kept) {
  std::vector<int32_t> spares(kept.begin() + mesh.ranks(), kept.end());
  kept.resize(static_cast<size_t>(mesh.ranks()));
  const std::set<int32_t> reserved(spares.begin(), spares.end());
  std::erase_if(usable, [&](int32_t slot) { return reserved.contains(slot); });
  Arranged out;
  out.kept = kept.size() - std::ranges::count(kept, -1);
  out.plan = PlanOn(fabric, mesh, usable, 0);
  out.slots = out.plan.slot_of_rank;
  if (out.kept > 0) {
    out.slots = Complete(fabric, mesh, usable, was_on, std::move(kept));
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

// The slots of `packed`, and what it costs; nullopt: it has no slots.
std::optional<Arranged> AsPacked(const Seats& seats, const std::vector<Candidate>& candidates,
                                 const Placement& packed, const Mesh& mesh) {
  Arranged out;
  out.slots = Kept(seats, candidates, seats.usable(), packed.ranks, mesh.ranks());
  if (!AllHaveTheirs(seats, candidates, out.slots, packed.ranks)) return std::nullopt;
  out.plan.cost = Evaluate(seats.fabric(), mesh, out.slots);
  return out;
}

// False: rank 0 cannot be where the job wants it.
bool MoveRank0(const Seats& seats, const std::vector<Candidate>& candidates, const Demand& demand,
               const Mesh& mesh, Arranged& arranged) {
  const auto fits = [&](int32_t slot) { return candidates[seats.CandidateOf(slot)].may_have_rank0; };
  if (demand.rank0.empty() || fits(arranged.slots[0])) return true;
  const auto ranks_end = arranged.slots.begin() + static_cast<std::ptrdiff_t>(mesh.ranks());
  const auto there = std::find_if(arranged.slots.begin(), ranks_end, fits);
  if (arranged.kept > 0 || there == ranks_end) return false;
  arranged.slots = Shifted(mesh, arranged.slots, there - arranged.slots.begin());
  arranged.plan.cost =
      Evaluate(seats.fabric(), mesh, {arranged.slots.begin(), arranged.slots.begin() + mesh.ranks()});
  return true;
}

void WarnOfStrangers(const std::vector<Candidate>& candidates, const std::vector<int>& machines,
                     Placement& out) {
  std::vector<std::string> names;
  size_t strangers = 0;
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (machines[i] != kUnknown) continue;
    if (strangers++ < 8) names.push_back(candidates[i].view->hostname);
  }
  if (strangers == 0) return;
  const size_t more = strangers - names.size();
  out.warnings.push_back(
      absl::StrCat("the topology does not have ", absl::StrJoin(names, ", "),
                   more > 0 ? absl::StrCat(" and ", more, " more") : "", ": ",
                   strangers == candidates.size()
                       ? "ranks are packed"
                       : absl::StrCat(strangers == 1 ? "it counts" : "they count", " as far from everything"),
                   "; correct the names in the file of `gtrain head --topology`, or start ",
                   strangers == 1 ? "its agent" : "their agents",
                   " with --label fabric=/spine/leaf (`gtrain topology show` has what is known)"));
}

// Where the node hangs, as its labels say; empty: they do not, or no place can have such a name. Places begin
// with a slash, so that none has the name of a machine.
std::vector<std::string> PathOf(const NodeView& node) {
  const auto of = [&](const char* key) {
    const auto label = node.labels.find(key);
    return label == node.labels.end() ? std::string() : label->second;
  };
  const std::string fabric = of(kFabricLabel);
  std::vector<std::string> path = absl::StrSplit(fabric, '/', absl::SkipEmpty());
  if (fabric.empty()) {
    for (const char* key : {"zone", "rack"}) {
      if (const std::string place = of(key); !place.empty()) path.push_back(place);
    }
  }
  const auto wrong = [](const std::string& place) {
    return place.size() > kPlaceBytesMax || !std::ranges::all_of(place, [](char c) {
             return absl::ascii_isgraph(static_cast<unsigned char>(c)) && c != '/' && c != '[' && c != ']' &&
                    c != ',';
           });
  };
  if (path.empty() || path.size() > kPlacesMax || std::ranges::any_of(path, wrong)) return {};
  path[0] = absl::StrCat("/", path[0]);
  return path;
}

// The time that a step spends on the wires when nothing overlaps, beside what no placement beats and what was
// rejected.
std::string Reason(const topology::Plan& plan, const Mesh& mesh, bool has_mesh, size_t kept,
                   const std::string& where) {
  std::string text = absl::StrCat(mesh.ranks(), mesh.ranks() == 1 ? " rank" : " ranks",
                                  has_mesh ? absl::StrCat(" of mesh ", topology::PrintMesh(mesh)) : "",
                                  " by the topology: ", where);
  if (kept > 0)
    absl::StrAppend(&text, "; ", kept, kept == 1 ? " stays where it was" : " stay where they were");
  absl::StrAppend(&text, "; a step communicates ", topology::PrintSeconds(plan.cost.seconds),
                  ", predicted; no placement needs less than ", topology::PrintSeconds(plan.bound.seconds));
  for (const topology::Candidate& c : plan.rejected) {
    if (std::abs(c.cost.seconds - plan.cost.seconds) > 1e-3 * plan.cost.seconds)
      absl::StrAppend(&text, ", ", c.policy, " ", topology::PrintSeconds(c.cost.seconds));
  }
  return text;
}

// `stay`: processes that go on, by rank; empty where none does.
Placement Filled(const Seats& seats, const std::vector<Candidate>& candidates, const Demand& demand,
                 const Placement& packed, const Mesh& mesh, bool has_mesh, const Arranged& arranged,
                 const std::vector<RankSlot>& stay) {
  Placement out;
  out.placed = true;
  out.verdicts = packed.verdicts;
  out.warnings = packed.warnings;
  std::vector<size_t> candidate_of;
  for (const int32_t slot : arranged.slots) candidate_of.push_back(seats.CandidateOf(slot));
  FillSlots(candidates, candidate_of, GpusOf(seats, candidates, arranged.slots, stay), demand, out);
  out.reason = Reason(arranged.plan, mesh, has_mesh, arranged.kept, PlacesText(candidates, candidate_of));
  return out;
}

// The one of the two that communicates less, as far as it is on no more nodes than packing takes.
Placement Better(const Seats& seats, const std::vector<Candidate>& candidates, const Demand& demand,
                 Placement packed, const Mesh& mesh, bool has_mesh, Arranged arranged,
                 const std::vector<RankSlot>& stay) {
  std::optional<Arranged> as_packed = AsPacked(seats, candidates, packed, mesh);
  const bool may = MayHaveNodes(seats, candidates, demand, packed, arranged.slots);
  if (may && (!as_packed || as_packed->plan.cost.seconds > arranged.plan.cost.seconds * (1 + 1e-9))) {
    if (as_packed) arranged.plan.rejected.push_back({"packed", as_packed->plan.cost});
    return Filled(seats, candidates, demand, packed, mesh, has_mesh, arranged, stay);
  }
  if (packed.nodes.size() == 1 || !as_packed) return packed;
  as_packed->plan.bound = arranged.plan.bound;
  std::vector<size_t> candidate_of;
  for (const int32_t slot : as_packed->slots) candidate_of.push_back(seats.CandidateOf(slot));
  packed.reason = Reason(as_packed->plan, mesh, has_mesh, 0, PlacesText(candidates, candidate_of));
  return packed;
}

// Whether no rank has a place that it could keep.
bool NoneStays(const std::vector<Candidate>& candidates, const std::vector<RankSlot>& stay) {
  std::set<NodeId> before;
  for (const RankSlot& slot : stay) before.insert(slot.node);
  return std::ranges::none_of(candidates, [&](const Candidate& c) { return before.contains(c.view->id); });
}

// The machines alone, numbered anew in `machines`.
Topology PartOf(const KnownTopology& known, std::vector<int>& machines) {
  Topology part = known.Part([&] {
    std::vector<int> there = machines;
    std::erase(there, kUnknown);
    return there;
  }());
  std::map<std::string, int> numbers;
  for (size_t m = 0; m < part.machines.size(); ++m) numbers[part.machines[m].name] = static_cast<int>(m);
  for (int& machine : machines) {
    if (machine != kUnknown) machine = numbers.at(known.topology().machines[machine].name);
  }
  return part;
}

// Of a job that is not there yet only the nodes count that are chosen for it, which are returned, and those
// of packing, for a comparison: the others leave `candidates` and `machines`, which become numbers of `part`.
// nullopt: some rank stays where it was, and the whole topology counts.
std::optional<std::set<NodeId>> Narrow(const KnownTopology& known, const Demand& demand,
                                       const Placement& packed, const std::vector<RankSlot>& stay,
                                       std::vector<Candidate>& candidates, std::vector<int>& machines,
                                       Topology& part) {
  if (!NoneStays(candidates, stay)) return std::nullopt;
  std::set<NodeId> considered;
  std::set<NodeId> allowed = NodesFor(known, candidates, machines, demand, packed, considered);
  std::erase_if(candidates, [&](const Candidate& c) { return !considered.contains(c.view->id); });
  machines = MachinesOf(known, candidates);
  part = PartOf(known, machines);
  return allowed;
}

std::vector<int32_t> UsableOf(const Seats& seats, const std::vector<Candidate>& candidates,
                              const std::optional<std::set<NodeId>>& allowed) {
  std::vector<int32_t> usable = seats.usable();
  std::erase_if(usable, [&](int32_t slot) {
    return allowed && !allowed->contains(candidates[seats.CandidateOf(slot)].view->id);
  });
  return usable;
}

// Of a domain none of whose uplinks has a speed each carries its part of what is assumed for all of them.
void FillSpeeds(const Fabric& fabric, Topology& topology) {
  struct Domain {
    size_t level = 0;
    double gb_s = 0;  // that leave it
    int links = 0;
    bool known = false;
  };
  std::map<std::string, Domain> domains;
  for (size_t level = fabric.machine_level + 1; level < fabric.levels.size(); ++level) {
    const topology::Level& of = fabric.levels[level];
    for (size_t d = 0; d < of.names.size(); ++d) domains[of.names[d]] = {level, of.up_gb_s[d]};
  }
  // Of the lower of the two switches that a link joins.
  const auto domain_of = [&](const topology::Link& link) -> Domain* {
    Domain* lower = nullptr;
    size_t levels[2] = {fabric.levels.size(), fabric.levels.size()};
    for (const bool second : {false, true}) {
      const topology::End& end = second ? link.to : link.from;
      const auto it = domains.find(topology.switches[end.index].name);
      if (it == domains.end()) continue;
      levels[second] = it->second.level;
      if (lower == nullptr || it->second.level < lower->level) lower = &it->second;
    }
    return levels[0] == levels[1] ? nullptr : lower;
  };
  const auto between_switches = [](const topology::Link& link) {
    return link.from.is_switch && link.to.is_switch;
  };
  for (const topology::Link& link : topology.links) {
    Domain* const domain = between_switches(link) ? domain_of(link) : nullptr;
    if (domain == nullptr) continue;
    ++domain->links;
    domain->known = domain->known || link.gb_s > 0;
  }
  for (topology::Link& link : topology.links) {
    const Domain* const domain = between_switches(link) && link.gb_s <= 0 ? domain_of(link) : nullptr;
    if (domain != nullptr && !domain->known) link.gb_s = domain->gb_s / domain->links;
  }
}

// On one machine no link is involved, and of its inside something is known only where the topology has GPUs.
// Most jobs of a busy cluster are such: they are to cost the head nothing. Who names the host of each rank
// has chosen.
bool NothingToChoose(const Placement& packed, const Demand& demand, const Topology& topology) {
  if (!demand.rank_hosts.empty()) return true;
  const bool has_gpus = !packed.ranks.empty() && !packed.ranks[0].gpus.empty();
  const bool knows =
      std::ranges::any_of(topology.shapes, [](const topology::Shape& s) { return !s.gpus.empty(); });
  return packed.nodes.size() == 1 && !(has_gpus && knows);
}

}  // namespace

Mesh MeshOf(const std::vector<spec::MeshAxis>& axes, int64_t ranks, const Traffic& traffic) {
  Mesh mesh;
  const spec::MeshShape shape = spec::ShapeOf(axes);
  for (const spec::MeshAxis& axis : axes) {
    const int64_t size = axis.size ? *axis.size : std::max<int64_t>(1, ranks / shape.ranks);
    mesh.axes.push_back(topology::AxisNamed(axis.name, static_cast<int>(size)));
  }
  if (mesh.axes.empty()) mesh.axes.push_back(topology::AxisNamed(spec::kDataAxis, static_cast<int>(ranks)));
  for (topology::Axis& axis : mesh.axes) {
    if (const auto said = traffic.find(axis.name); said != traffic.end())
      axis.gb = static_cast<double>(said->second) * 1e-9;
  }
  return mesh;
}

KnownTopology::KnownTopology(Topology topology) : topology_(std::move(topology)) {
  for (size_t m = 0; m < topology_.machines.size(); ++m) {
    const auto [it, is_new] = machines_.try_emplace(
        std::string(topology::ShortName(topology_.machines[m].name)), static_cast<int>(m));
    if (!is_new) it->second = kUnknown;  // of several machines
  }
  for (size_t m = 0; m < topology_.machines.size(); ++m)
    machines_[topology_.machines[m].name] = static_cast<int>(m);
  paths_.resize(topology_.machines.size());
  const absl::StatusOr<Fabric> fabric = topology::Compile(topology_);
  if (fabric.ok()) {
    for (size_t level = fabric->levels.size(); level-- > static_cast<size_t>(fabric->machine_level) + 1;) {
      for (size_t m = 0; m < paths_.size(); ++m) {
        const auto [first, end] = fabric->slots_of_machine[m];
        if (first != end) paths_[m].push_back(fabric->domain[level][first]);
      }
    }
    FillSpeeds(*fabric, topology_);
  }
  IndexLinks();
}

void KnownTopology::IndexLinks() {
  links_.resize(topology_.machines.size());
  without_machines_ = topology_;
  without_machines_.machines.clear();
  without_machines_.links.clear();
  for (size_t i = 0; i < topology_.links.size(); ++i) {
    const topology::Link& link = topology_.links[i];
    for (const topology::End& end : {link.from, link.to}) {
      if (!end.is_switch) links_[end.index].push_back(static_cast<int>(i));
    }
    if (link.from.is_switch != link.to.is_switch) {
      const int machine = (link.from.is_switch ? link.to : link.from).index;
      machine_of_switch_.try_emplace((link.from.is_switch ? link.from : link.to).index, machine);
    }
    if (link.from.is_switch && link.to.is_switch) without_machines_.links.push_back(link);
  }
}

int KnownTopology::MachineOf(const NodeView& node) const {
  auto it = machines_.find(node.id.value);
  if (it == machines_.end()) it = machines_.find(node.hostname);
  if (it == machines_.end()) it = machines_.find(topology::ShortName(node.hostname));
  return it == machines_.end() ? kUnknown : it->second;
}

const std::vector<int>& KnownTopology::PathOf(int machine) const {
  static const std::vector<int>* const none = new std::vector<int>;
  return machine == kUnknown ? *none : paths_[machine];
}

Topology KnownTopology::Part(const std::vector<int>& machines) const {
  Topology part = without_machines_;
  std::map<int, int> number;
  const auto add = [&](int machine) {
    if (number.emplace(machine, static_cast<int>(part.machines.size())).second)
      part.machines.push_back(topology_.machines[machine]);
  };
  for (const int machine : machines) add(machine);
  // A switch keeps its distance from the nearest machine, by which its level is known.
  for (const auto& [ignored, machine] : machine_of_switch_) add(machine);
  std::set<int> links;  // one may join two of them
  for (const auto& [machine, ignored] : number) links.insert(links_[machine].begin(), links_[machine].end());
  for (const int i : links) {
    topology::Link link = topology_.links[i];
    bool whole = true;
    for (topology::End* end : {&link.from, &link.to}) {
      if (end->is_switch) continue;
      const auto it = number.find(end->index);
      whole = whole && it != number.end();
      if (it != number.end()) end->index = it->second;
    }
    if (whole) part.links.push_back(link);
  }
  return part;
}

std::vector<int> CollectiveOrder(const KnownTopology& known, const std::vector<NodeView>& nodes) {
  // A node's key: for each domain that holds it the first node of that, then itself.
  std::map<std::vector<int>, int> first_of;
  std::vector<std::pair<std::vector<int>, int>> keyed;
  for (int node = 0; node < static_cast<int>(nodes.size()); ++node) {
    std::vector<int> key, prefix;
    for (const int domain : known.PathOf(known.MachineOf(nodes[node]))) {
      prefix.push_back(domain);
      key.push_back(first_of.emplace(prefix, node).first->second);
    }
    key.push_back(node);
    keyed.emplace_back(std::move(key), node);
  }
  if (std::ranges::is_sorted(keyed)) return {};
  std::ranges::sort(keyed);
  std::vector<int> order(nodes.size());
  for (size_t position = 0; position < keyed.size(); ++position)
    order[keyed[position].second] = static_cast<int>(position);
  return order;
}

Topology TopologyOfLabels(const std::vector<NodeView>& nodes) {
  const topology::Shape shape = topology::ShapeOfOneSlot();
  std::map<std::string, int> agents;  // of each machine
  for (const NodeView& node : nodes) ++agents[node.hostname];
  std::vector<topology::Located> located;
  for (const NodeView& node : nodes) {
    topology::Located one{agents[node.hostname] == 1 ? node.hostname : node.id.value, PathOf(node)};
    if (one.path.empty()) continue;
    // Each alone first: agents say their labels and names themselves, and one is not to lose the others.
    for (const std::string& name : {one.host, node.id.value}) {
      one.host = name;
      if (!topology::TopologyOfPaths({one}, kFabricLabel, shape).ok()) continue;
      located.push_back(one);
      break;
    }
  }
  absl::StatusOr<Topology> topology = topology::TopologyOfPaths(located, kFabricLabel, shape);
  return topology.ok() ? *std::move(topology) : Topology();
}

Placement ByTopology(const std::vector<NodeView>& nodes, const Demand& demand, Placement packed,
                     const KnownTopology& known, const std::vector<spec::MeshAxis>& axes,
                     const std::vector<RankSlot>& before, const Traffic& traffic) {
  if (!packed.placed || demand.oversubscribe_cpus || known.empty()) return packed;
  if (NothingToChoose(packed, demand, known.topology())) return packed;
  const bool go_on = !demand.waiting.empty();
  std::vector<RankSlot> stay = go_on ? WhoGoesOn(packed, demand) : before;
  if (go_on && std::ranges::all_of(stay, HasPlace)) return packed;
  const int64_t world = std::ssize(packed.ranks);
  const int64_t spares = demand.count_nodes ? 0 : std::max<int64_t>(0, world - (demand.max - demand.spares));
  const Mesh mesh = MeshOf(axes, world - spares, traffic);
  if (mesh.ranks() != world - spares || world * NeighboursOf(mesh) > kPlanWorkMax) return packed;
  // Who waits beside the ranks keeps a place only if it goes on.
  if (!go_on) stay.resize(std::min(stay.size(), static_cast<size_t>(mesh.ranks())));
  std::vector<Candidate> candidates = CandidatesOf(nodes, demand);
  std::vector<int> machines = MachinesOf(known, candidates);
  WarnOfStrangers(candidates, machines, packed);
  if (std::ranges::all_of(machines, [](int machine) { return machine == kUnknown; })) return packed;
  Topology part;
  const std::optional<std::set<NodeId>> allowed =
      Narrow(known, demand, packed, stay, candidates, machines, part);
  Seats seats(candidates, allowed ? part : known.topology(), std::move(machines), demand.gpu_share > 0);
  if (!seats.Compile(stay)) return packed;
  std::vector<int32_t> kept = Kept(seats, candidates, seats.usable(), stay, world);
  if (go_on && !AllHaveTheirs(seats, candidates, kept, stay)) return packed;
  const std::vector<int32_t> usable = UsableOf(seats, candidates, allowed);
  if (std::ssize(usable) < world) return packed;
  std::optional<Arranged> arranged = Arrange(seats.fabric(), mesh, usable, demand.previous, std::move(kept));
  if (!arranged || !MoveRank0(seats, candidates, demand, mesh, *arranged)) return packed;
  return Better(seats, candidates, demand, std::move(packed), mesh, !axes.empty(), *std::move(arranged),
                stay);
}

}  // namespace gtrain::plan
