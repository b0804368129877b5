#include "runtime/core/head/members.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "runtime/core/head/cells.h"
#include "runtime/core/head/gang.h"

namespace gtrain::core {
namespace {

// Whether its processes keep their parts of the model.
bool ByCell(const Job& job) { return job.spec.in_place && job.demand.unit > 1; }

// Whether the process may go on in the place: on its machine, with the GPUs that it was started with.
bool Fits(const RankPlace& was, const RankPlace& place, bool same_rank) {
  return was.gpus == place.gpus && (!same_rank || was.rank == place.rank);
}

// Names in `places` which of the processes that wait go on there: each as the rank that it was, where it can.
// For r ranks a node, each rank costs r steps here.
void NameProcesses(const Job& job, const std::map<NodeId, std::vector<ProcessId>>& waiting,
                   std::vector<RankPlace>& places) {
  if (waiting.empty() || !job.record.grant) return;
  const GenerationGrant& last = *job.record.grant;
  std::map<NodeId, std::vector<RankPlace>> before;  // of those that wait
  for (int number = 0; number < static_cast<int>(last.ranks.size() + last.waiting.size()); ++number) {
    RankPlace place = PlaceOfRank(last, number);
    place.process = ProcessOf(last, number);
    if (ByCell(job)) place.cell = CellOf(last, number, job.demand.unit);
    const auto there = waiting.find(place.node);
    const bool waits = there != waiting.end() && std::ranges::count(there->second, place.process) > 0 &&
                       !job.hung.contains(place.process);
    if (waits) before[place.node].push_back(place);
  }
  for (const bool same_rank : {true, false}) {
    for (RankPlace& place : places) {
      if (place.process.generation.value != 0) continue;
      std::vector<RankPlace>& here = before[place.node];
      const auto it =
          std::ranges::find_if(here, [&](const RankPlace& was) { return Fits(was, place, same_rank); });
      if (it == here.end()) continue;
      place.process = it->process;
      place.cell = it->cell;
      here.erase(it);
    }
  }
}

struct Count {
  int members = 0;
  std::set<NodeId> nodes;  // that have any
};

Count CountOf(const std::vector<RankPlace>& places, const std::vector<bool>& members) {
  Count count;
  for (size_t i = 0; i < places.size(); ++i) {
    if (!members[i]) continue;
    ++count.members;
    count.nodes.insert(places[i].node);
  }
  return count;
}

// Whether the members are a job of their own, until the others have come up.
bool MayGoAlone(const Job& job, const Count& count) {
  if (count.members == 0 || count.members % job.demand.unit != 0) return false;
  const int size = job.demand.count_nodes ? static_cast<int>(count.nodes.size()) : count.members;
  return size >= job.demand.min;
}

// Adds those of the places for which `may` holds, in their order, as far as the job may have as many.
template <class May>
void AddMembers(const Job& job, const std::vector<RankPlace>& places, const May& may,
                std::vector<bool>& members) {
  Count count = CountOf(places, members);
  for (size_t i = 0; i < places.size(); ++i) {
    if (members[i] || !may(places[i])) continue;
    const NodeId& node = places[i].node;
    const bool room = job.demand.count_nodes
                          ? count.nodes.contains(node) || std::ssize(count.nodes) < job.demand.max
                          : count.members < job.demand.max;
    if (!room) continue;
    ++count.members;
    count.nodes.insert(node);
    members[i] = true;
  }
}

std::set<ProcessId> MembersBefore(const Job& job) {
  return job.record.grant ? MembersOfGrant(*job.record.grant) : std::set<ProcessId>();
}

// Of which copy of the model each was a member.
std::map<ProcessId, int> CopiesBefore(const Job& job) {
  std::map<ProcessId, int> copies;
  if (!job.record.grant) return copies;
  for (const RankPlace& place : job.record.grant->ranks)
    copies[ProcessOf(*job.record.grant, place.rank)] = place.rank / job.demand.unit;
  return copies;
}

// The same where a copy of the model lies on several ranks: as many whole copies as can go on.
// Those of a copy of which nobody is missing come first, so that no loss takes another copy apart.
std::vector<bool> MembersByCell(const Job& job, std::vector<RankPlace>& places) {
  const std::map<ProcessId, int> copy_of = CopiesBefore(job);
  std::map<int, int> going_on_of;  // copy -> how many of it
  for (const RankPlace& place : places) {
    const auto was = copy_of.find(place.process);
    if (place.process.generation.value != 0 && was != copy_of.end()) ++going_on_of[was->second];
  }
  std::vector<size_t> order(places.size()), going_on;
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, {}, [&](size_t i) {
    const RankPlace& place = places[i];
    if (place.process.generation.value == 0) return 3;
    const auto was = copy_of.find(place.process);
    return was == copy_of.end() ? 2 : going_on_of[was->second] == job.demand.unit ? 0 : 1;
  });
  std::vector<std::optional<int>> cells;
  for (const size_t i : order) {
    if (places[i].process.generation.value == 0) break;
    going_on.push_back(i);
    cells.push_back(places[i].cell);
  }
  const int unit = job.demand.unit, most = job.demand.max / unit;
  const int alone = CopiesOf(cells, unit, most);
  if (alone > 0 && alone * unit >= job.demand.min) return ChooseByCell(places, going_on, unit, alone);
  const int whole = std::min(most, static_cast<int>(places.size()) / unit);
  FreeSurplus(order, unit, whole, places);
  return ChooseByCell(places, order, unit, whole);
}

// Which of the places are members: those that were, then those that wait and could be. Where these are not
// enough, also those where a process is to be started.
std::vector<bool> MembersOf(const Job& job, std::vector<RankPlace>& places) {
  if (ByCell(job) && !job.demand.count_nodes) return MembersByCell(job, places);
  const std::set<ProcessId> were = MembersBefore(job);
  // A job that counts nodes has whole ones: what is left of another waits for the others there.
  std::set<NodeId> part;
  for (const RankPlace& place : places) {
    if (job.demand.count_nodes && place.process.generation.value == 0) part.insert(place.node);
  }
  const auto goes_on = [&](const RankPlace& place) {
    return place.process.generation.value != 0 && !part.contains(place.node);
  };
  std::vector<bool> members(places.size());
  AddMembers(
      job, places, [&](const RankPlace& place) { return goes_on(place) && were.contains(place.process); },
      members);
  AddMembers(job, places, goes_on, members);
  std::vector<bool> all = members;
  AddMembers(
      job, places, [](const RankPlace&) { return true; }, all);
  return MayGoAlone(job, CountOf(places, members)) ? members : all;
}

// Numbers ranks anew, and those of each machine.
void Number(std::vector<RankPlace>& places, int first, std::map<NodeId, int>& of_node) {
  for (RankPlace& place : places) {
    place.rank = first++;
    place.local_rank = of_node[place.node]++;
  }
}

}  // namespace

void Divide(const Job& job, std::vector<RankPlace> places, GenerationGrant& grant) {
  NameProcesses(job, job.kept, places);
  const std::vector<bool> members = MembersOf(job, places);
  for (size_t i = 0; i < places.size(); ++i) (members[i] ? grant.ranks : grant.waiting).push_back(places[i]);
  // A program that does not stay would not wait.
  if (!job.stays && job.kept.empty()) grant.waiting.clear();
  NameProcesses(job, job.coming, grant.waiting);
  grant.world_size = static_cast<int>(grant.ranks.size());
  if (ByCell(job)) SortByCell(job.record.grant ? &*job.record.grant : nullptr, job.demand.unit, grant.ranks);
  if (grant.waiting.empty() && !ByCell(job)) return;
  std::map<NodeId, int> of_node;
  Number(grant.ranks, 0, of_node);
  Number(grant.waiting, static_cast<int>(grant.ranks.size()), of_node);
}

bool StartNothing(GenerationGrant& grant) {
  const auto is_new = [](const RankPlace& place) { return place.process.generation.value == 0; };
  if (std::erase_if(grant.waiting, is_new) == 0) return false;
  // The head knows those that are left by their numbers, and these follow one another.
  std::map<NodeId, int> of_node;
  Number(grant.ranks, 0, of_node);
  Number(grant.waiting, static_cast<int>(grant.ranks.size()), of_node);
  return true;
}

std::set<ProcessId> MembersOfGrant(const GenerationGrant& grant) {
  std::set<ProcessId> members;
  for (const RankPlace& place : grant.ranks) members.insert(ProcessOf(grant, place.rank));
  return members;
}

int MembersThatStay(const Job& job, const GenerationGrant& next) {
  const std::set<ProcessId> were = MembersBefore(job);
  return static_cast<int>(std::ranges::count_if(
      next.ranks, [&](const RankPlace& place) { return were.contains(place.process); }));
}

std::vector<NodeId> NodesOf(const GenerationGrant& grant, std::vector<NodeId> nodes) {
  std::set<NodeId> of_ranks, of_others;
  for (const RankPlace& place : grant.ranks) of_ranks.insert(place.node);
  for (const RankPlace& place : grant.waiting) of_others.insert(place.node);
  std::erase_if(nodes, [&](const NodeId& id) { return !of_ranks.contains(id) && !of_others.contains(id); });
  std::stable_partition(nodes.begin(), nodes.end(),
                        [&](const NodeId& node) { return of_ranks.contains(node); });
  std::stable_partition(nodes.begin(), nodes.end(),
                        [&](const NodeId& node) { return node == grant.ranks[0].node; });
  return nodes;
}

std::map<ProcessId, Instant> WaitingSince(const Job& job) {
  std::map<ProcessId, Instant> since;
  for (size_t i = 0; i < job.waiting.size(); ++i)
    since[ProcessOf(*job.record.grant, static_cast<int>(job.ranks.size() + i))] = job.waiting[i].since;
  return since;
}

void KeepWaitingSince(const std::map<ProcessId, Instant>& since, Job& job) {
  for (size_t i = 0; i < job.waiting.size(); ++i) {
    const auto it = since.find(ProcessOf(*job.record.grant, static_cast<int>(job.ranks.size() + i)));
    if (it != since.end()) job.waiting[i].since = it->second;
  }
}

}  // namespace gtrain::core
