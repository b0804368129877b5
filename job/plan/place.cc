// Policy "pack" in three steps. Room: how many ranks each node could take, with the resource that
// ran out first. Choice: nodes in order of preference (held ranks before, then the best single fit,
// then the largest room) give ranks until the world is full, in whole units. Numbering: ranks that
// sat on a chosen node before keep their number, the rest is filled in NodeId order.
//
// Rejected: spreading by default. It halves the bandwidth inside a node and takes whole nodes away
// from jobs that need them; `ranks_per_node` says it where it is wanted.
#include "job/plan/place.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/units.h"
#include "job/plan/room.h"
#include "job/spec/print.h"

namespace gtrain::plan {
namespace {

// A process goes on only with the GPUs that it has, so these are given first, those of members before others;
// then those that ranks had there before.
void ChooseGpus(const Demand& demand, Candidate& c) {
  std::vector<int> order = c.waiting.gpus;
  for (size_t rank = 0; rank < demand.previous_gpus.size(); ++rank) {
    const std::vector<int>& gpus = demand.previous_gpus[rank];
    if (demand.previous[rank] == c.view->id) order.insert(order.end(), gpus.begin(), gpus.end());
  }
  order.insert(order.end(), c.gpus.begin(), c.gpus.end());
  std::multiset<int> free(c.gpus.begin(), c.gpus.end());
  const size_t wanted = static_cast<size_t>(c.given) * static_cast<size_t>(c.gpus_per_rank);
  std::multiset<int> chosen;
  for (const int gpu : order) {
    if (const auto it = free.find(gpu); chosen.size() < wanted && it != free.end())
      chosen.insert(free.extract(it));
  }
  c.gpus.assign(chosen.begin(), chosen.end());
}

// Order in which nodes are asked: the one for rank 0, those where members wait, those of the last generation,
// then (if one alone suffices) the tightest such node, then larger room, then NodeId.
void SortByPreference(std::vector<Candidate>& candidates, const Demand& demand) {
  const int want_ranks = demand.max;
  std::sort(candidates.begin(), candidates.end(), [&](const Candidate& a, const Candidate& b) {
    if ((a.waiting.members > 0) != (b.waiting.members > 0)) return a.waiting.members > 0;
    if ((a.previous > 0) != (b.previous > 0)) return a.previous > 0;
    const bool a_alone = a.room >= want_ranks, b_alone = b.room >= want_ranks;
    if (a_alone != b_alone) return a_alone;
    if (a.room != b.room) return a_alone ? a.room < b.room : a.room > b.room;
    return a.view->id < b.view->id;
  });
  // Of those that may have rank 0 the one that had it before, else the first.
  const auto may = [](const Candidate& c) { return c.may_have_rank0; };
  auto first = std::ranges::find_if(candidates, [&](const Candidate& c) {
    return may(c) && !demand.previous.empty() && c.view->id == demand.previous[0];
  });
  if (first == candidates.end()) first = std::ranges::find_if(candidates, may);
  if (first == candidates.end()) return;
  std::rotate(candidates.begin(), first, first + 1);
  // So that the ranks of it come first, and no other one's.
  for (auto other = candidates.begin() + 1; other != candidates.end(); ++other) other->may_have_rank0 = false;
}

int Give(std::vector<Candidate>& candidates, const Demand& demand) {
  int world = 0, nodes = 0;
  if (demand.count_nodes) {
    for (Candidate& c : candidates) {
      if (nodes == demand.max) break;
      c.given = c.room;
      world += c.given;
      ++nodes;
    }
    return world;
  }
  int64_t room = 0;
  for (const Candidate& c : candidates) room += c.room;
  int left = static_cast<int>(std::min<int64_t>(room, demand.max));
  left -= left % demand.unit;
  // Members first, then who waits beside them, then what has to be started.
  for (const auto count : {&Waiting::members, &Waiting::others, static_cast<int Waiting::*>(nullptr)}) {
    for (Candidate& c : candidates) {
      int more = std::min(c.room - c.given, left);
      if (count != nullptr) more = std::min(more, c.waiting.*count);
      // An exact number a node is given whole or not at all.
      if (demand.ranks_per_node) more = more > 0 && left >= c.room && c.given == 0 ? c.room : 0;
      c.given += more;
      left -= more;
      world += more;
    }
  }
  return world;
}

// rank -> candidate index. Ranks on a node they held before stay; the others fill up in NodeId order.
std::vector<size_t> Number(std::vector<Candidate>& candidates, int world, const Demand& demand) {
  constexpr size_t kNone = std::numeric_limits<size_t>::max();
  std::vector<size_t> node_of(world, kNone);
  std::vector<int> left;
  std::map<NodeId, size_t> index;
  for (size_t i = 0; i < candidates.size(); ++i) {
    left.push_back(candidates[i].given);
    index[candidates[i].view->id] = i;
  }
  if (candidates[0].may_have_rank0) {
    node_of[0] = 0;
    --left[0];
  }
  for (int rank = 0; rank < world && rank < static_cast<int>(demand.previous.size()); ++rank) {
    if (node_of[rank] != kNone) continue;
    const auto it = index.find(demand.previous[rank]);
    if (it == index.end() || left[it->second] == 0) continue;
    node_of[rank] = it->second;
    --left[it->second];
  }
  size_t next = 0;
  for (size_t& slot : node_of) {
    if (slot != kNone) continue;
    while (left[next] == 0) ++next;
    slot = next;
    --left[next];
  }
  return node_of;
}

// Those of each rank: what it had there before, what a process that waits there has, or else the next ones of
// the node.
std::vector<std::vector<int>> GpusOf(const std::vector<Candidate>& candidates,
                                     const std::vector<size_t>& node_of, const Demand& demand) {
  std::vector<std::vector<int>> gpus(node_of.size());
  std::vector<std::multiset<int>> left;
  for (const Candidate& c : candidates) left.emplace_back(c.gpus.begin(), c.gpus.end());
  const auto take = [&](size_t rank, const std::vector<int>& wanted) {
    std::multiset<int>& there = left[node_of[rank]];
    const bool fits = !wanted.empty() && gpus[rank].empty() &&
                      static_cast<int>(wanted.size()) == candidates[node_of[rank]].gpus_per_rank &&
                      std::ranges::all_of(wanted, [&](int gpu) { return there.contains(gpu); });
    if (!fits) return;
    for (const int gpu : wanted) there.erase(there.find(gpu));
    gpus[rank] = wanted;
  };
  for (size_t rank = 0; rank < std::min(node_of.size(), demand.previous_gpus.size()); ++rank) {
    if (demand.previous[rank] == candidates[node_of[rank]].view->id) take(rank, demand.previous_gpus[rank]);
  }
  for (size_t rank = 0; rank < node_of.size(); ++rank) {
    const Candidate& c = candidates[node_of[rank]];
    const size_t each = static_cast<size_t>(c.gpus_per_rank);
    for (size_t at = 0; each > 1 && at + each <= c.waiting.gpus.size(); at += each) {
      const auto begin = c.waiting.gpus.begin() + static_cast<std::ptrdiff_t>(at);
      take(rank, {begin, begin + c.gpus_per_rank});
    }
  }
  for (size_t rank = 0; rank < node_of.size(); ++rank) {
    std::multiset<int>& there = left[node_of[rank]];
    const auto last =
        std::next(there.begin(), gpus[rank].empty() ? candidates[node_of[rank]].gpus_per_rank : 0);
    gpus[rank].insert(gpus[rank].end(), there.begin(), last);
    there.erase(there.begin(), last);
  }
  return gpus;
}

std::string Wanted(const Demand& demand) {
  const int most = demand.max - demand.spares;
  std::string text = demand.min == most ? absl::StrCat(demand.min) : absl::StrCat(demand.min, " to ", most);
  absl::StrAppend(&text, demand.count_nodes ? " node" : " rank", most == 1 ? "" : "s");
  if (demand.unit > 1) absl::StrAppend(&text, " in units of ", demand.unit);
  if (demand.ranks_per_node) absl::StrAppend(&text, ", ", *demand.ranks_per_node, " a node");
  if (demand.cpus) absl::StrAppend(&text, ", ", *demand.cpus, " cpus each");
  if (demand.memory_bytes > 0) absl::StrAppend(&text, ", ", PrintBytes(demand.memory_bytes), " each");
  if (demand.gpus.value_or(0) > 0) absl::StrAppend(&text, ", ", *demand.gpus, " GPUs each");
  if (demand.gpu_share > 0)
    absl::StrAppend(&text, ", ", spec::PrintGpuShare(demand.gpu_share), " of a GPU each");
  return text;
}

std::string WhyNot(const Placement& placement, const Demand& demand, int got) {
  if (placement.verdicts.empty()) return absl::StrCat("needs ", Wanted(demand), "; no node has joined");
  const auto room = [](const NodeVerdict& v) {
    return absl::StrCat(v.hostname, " takes ", v.room,
                        v.limit.empty() ? "" : absl::StrCat(" (", v.limit, ")"));
  };
  return absl::StrCat("needs ", Wanted(demand), "; there is room for ", got, ": ",
                      OfEach(placement.verdicts, "; ", room));
}

// `rank0`: the nodes that it may go on. `candidates`: in the order of preference.
void RefuseRank0(const std::vector<NodeView>& nodes, const Demand& demand, const std::set<NodeId>& rank0,
                 Placement& out) {
  const std::string names = PrintNames(demand.rank0);
  out.reason = absl::StrCat("rank 0 goes on ", names, " by where.rank0, and ");
  std::vector<const NodeVerdict*> named;
  for (const NodeVerdict& verdict : out.verdicts) {
    if (!rank0.contains(verdict.node)) continue;
    named.push_back(&verdict);
    out.named.push_back(verdict.node);
  }
  if (named.empty()) {
    const NoSuchNode no_such = WhyNoSuchNode(NodesByName(nodes), demand.rank0);
    absl::StrAppend(&out.reason, no_such.why);
    out.remedy = absl::StrCat(no_such.remedy, ", or another where.rank0");
    return;
  }
  const auto limit = [](const NodeVerdict* verdict) {
    return verdict->limit.empty() ? "it is given whole or not at all" : verdict->limit;
  };
  absl::StrAppend(&out.reason, named.size() == 1 ? absl::StrCat("that takes none: ", limit(named[0]))
                                                 : OfEach(named, "; ", [&](const NodeVerdict* verdict) {
                                                     return absl::StrCat(verdict->hostname,
                                                                         " takes none: ", limit(verdict));
                                                   }));
  out.remedy = absl::StrCat("room on ", names, ", or another where.rank0");
}

// The nodes with room, and a verdict for each node.
std::vector<Candidate> FindRoom(const std::vector<NodeView>& nodes, const Demand& demand,
                                const std::set<NodeId>& rank0, Placement& out) {
  std::vector<const NodeView*> by_id;
  by_id.reserve(nodes.size());
  for (const NodeView& node : nodes) by_id.push_back(&node);
  std::sort(by_id.begin(), by_id.end(), [](const NodeView* a, const NodeView* b) { return a->id < b->id; });
  std::map<NodeId, int> previous;
  for (const NodeId& node : demand.previous) ++previous[node];
  std::vector<Candidate> candidates;
  for (const NodeView* node : by_id) {
    Candidate candidate;
    out.verdicts.push_back(RoomOn(*node, demand, candidate));
    if (const auto it = previous.find(node->id); it != previous.end()) candidate.previous = it->second;
    if (const auto it = demand.waiting.find(node->id); it != demand.waiting.end())
      candidate.waiting = it->second;
    candidate.may_have_rank0 = rank0.contains(node->id);
    if (candidate.room > 0) candidates.push_back(std::move(candidate));
  }
  for (NodeVerdict& verdict : out.verdicts)
    verdict.room = std::min(verdict.room, demand.count_nodes ? kUnlimited : demand.max);
  return candidates;
}

Placement PlaceOnce(const std::vector<NodeView>& nodes, const Demand& demand) {
  const std::set<NodeId> rank0 = NodesCalled(nodes, demand.rank0);
  Placement out;
  std::vector<Candidate> candidates = FindRoom(nodes, demand, rank0, out);
  SortByPreference(candidates, demand);
  const int world = Give(candidates, demand);
  std::erase_if(candidates, [](const Candidate& c) { return c.given == 0; });
  for (Candidate& c : candidates) ChooseGpus(demand, c);
  const int got = demand.count_nodes ? static_cast<int>(candidates.size()) : world;
  const bool enough = got >= demand.min && world > 0 && world % demand.unit == 0;
  if (!enough) {
    out.reason = WhyNot(out, demand, got);
    return out;
  }
  if (!demand.rank0.empty() && !candidates[0].may_have_rank0) {
    RefuseRank0(nodes, demand, rank0, out);
    return out;
  }
  std::sort(candidates.begin(), candidates.end(), [&](const Candidate& a, const Candidate& b) {
    return a.may_have_rank0 != b.may_have_rank0 ? a.may_have_rank0 : a.view->id < b.view->id;
  });
  const std::vector<size_t> node_of = Number(candidates, world, demand);
  FillSlots(candidates, node_of, GpusOf(candidates, node_of, demand), demand, out);
  WarnOfSharing(candidates, demand, out);
  out.placed = true;
  const auto given = [](const Candidate& c) { return absl::StrCat(c.given, " on ", c.view->hostname); };
  const int most = demand.max - demand.spares;
  const char* things = got > most ? " processes" : world == 1 ? " rank" : " ranks";
  out.reason = absl::StrCat(world, things, " packed: ", OfEach(candidates, ", ", given));
  if (got < most) {
    absl::StrAppend(&out.reason, " (at most ", most, demand.count_nodes ? " nodes" : " ranks",
                    " were asked for)");
  }
  return out;
}

}  // namespace

Placement Place(const std::vector<NodeView>& nodes, const Demand& demand) {
  if (!demand.rank_hosts.empty()) return PlaceByRank(nodes, demand);
  if (!demand.oversubscribe_cpus || demand.min == demand.max) return PlaceOnce(nodes, demand);
  // CPUs are shared for the sake of the least that was asked for, never for more.
  Demand wanted = demand;
  wanted.oversubscribe_cpus = false;
  Placement roomy = PlaceOnce(nodes, wanted);
  const int least = std::max(demand.min, demand.asked);
  if (roomy.placed && (demand.count_nodes || static_cast<int>(roomy.ranks.size()) >= demand.asked))
    return roomy;
  wanted.oversubscribe_cpus = true;
  if (!demand.count_nodes)
    wanted.max = std::min(demand.max, (least + demand.unit - 1) / demand.unit * demand.unit);
  Placement shared = PlaceOnce(nodes, wanted);
  return shared.placed || !roomy.placed ? shared : roomy;
}

std::vector<NodeView> Emptied(std::vector<NodeView> nodes) {
  for (NodeView& node : nodes) {
    node.cpus_free = node.cpus;
    node.cpus_bound.clear();
    node.memory_free_bytes = node.memory_bytes;
    node.gpus_free.clear();
    node.gpu_shares.clear();
    for (size_t i = 0; i < node.gpu_models.size(); ++i) node.gpus_free.push_back(static_cast<int>(i));
  }
  return nodes;
}

std::string Print(const Placement& placement) {
  std::string text = absl::StrCat(placement.placed ? "placed: " : "not placed: ", placement.reason, "\n");
  std::map<NodeId, std::string> hostnames;
  std::map<NodeId, std::vector<const RankSlot*>> ranks;
  for (const NodeVerdict& v : placement.verdicts) hostnames[v.node] = v.hostname;
  for (const RankSlot& slot : placement.ranks) ranks[slot.node].push_back(&slot);
  for (const NodeId& node : placement.nodes) {
    absl::StrAppend(&text, "  ", hostnames[node], " (", node.value, ")\n");
    for (const RankSlot* of_node : ranks[node]) {
      const RankSlot& slot = *of_node;
      absl::StrAppend(&text, "    rank ", slot.rank);
      if (!slot.cpus.empty()) absl::StrAppend(&text, "  cpus ", absl::StrJoin(slot.cpus, ","));
      if (!slot.gpus.empty()) absl::StrAppend(&text, "  gpus ", absl::StrJoin(slot.gpus, ","));
      absl::StrAppend(&text, "\n");
    }
  }
  for (const std::string& warning : placement.warnings) absl::StrAppend(&text, "  warning: ", warning, "\n");
  return text;
}

}  // namespace gtrain::plan
