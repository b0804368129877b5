#include "runtime/core/head/grants.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/core/head/copies.h"
#include "runtime/core/head/directories.h"
#include "runtime/core/head/faults.h"
#include "runtime/core/head/gang.h"
#include "runtime/core/head/job_life.h"
#include "runtime/core/values/rank_notes.h"

namespace gtrain::core {
namespace {

constexpr int kPortFirst = 20'000,
              kPortCount = 10'000;  // below Linux's ephemeral range, if an agent named none

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
    const auto there = waiting.find(place.node);
    const bool waits = there != waiting.end() && std::ranges::count(there->second, place.process) > 0 &&
                       !job.hung.contains(place.process);
    if (waits) before[place.node].push_back(place);
  }
  for (const bool same_rank : {true, false}) {
    for (RankPlace& place : places) {
      if (place.process.generation.value != 0) continue;
      std::vector<RankPlace>& here = before[place.node];
      const auto it = std::ranges::find_if(
          here, [&](const RankPlace& was) { return Fits(was, place, same_rank); });
      if (it == here.end()) continue;
      place.process = it->process;
      here.erase(it);
    }
  }
}

// Ranks, and of each machine those that are members and all.
struct Count {
  std::map<NodeId, std::pair<int, int>> of_node;
  int members = 0;

  int Nodes() const {  // that have any
    return static_cast<int>(
        std::ranges::count_if(of_node, [](const auto& node) { return node.second.first > 0; }));
  }
};

Count CountOf(const std::vector<RankPlace>& places, const std::vector<bool>& members) {
  Count count;
  for (size_t i = 0; i < places.size(); ++i) {
    auto& [here, all] = count.of_node[places[i].node];
    all += 1;
    if (!members[i]) continue;
    here += 1;
    ++count.members;
  }
  return count;
}

// Whether the members are a job of their own, until the others have come up.
bool MayGoAlone(const Job& job, const Count& count) {
  if (count.members == 0 || count.members % job.demand.unit != 0) return false;
  const int size = job.demand.count_nodes ? count.Nodes() : count.members;
  return size >= job.demand.min;
}

// Adds those of the places for which `may` holds, in their order, as far as the job may have as many.
template <class May>
void AddMembers(const Job& job, const std::vector<RankPlace>& places, const May& may,
                std::vector<bool>& members) {
  Count count = CountOf(places, members);
  int nodes = count.Nodes();
  for (size_t i = 0; i < places.size(); ++i) {
    if (members[i] || !may(places[i])) continue;
    int& here = count.of_node[places[i].node].first;
    const bool room = job.demand.count_nodes ? here > 0 || nodes < job.demand.max : count.members < job.demand.max;
    if (!room) continue;
    nodes += here == 0 ? 1 : 0;
    ++here;
    ++count.members;
    members[i] = true;
  }
}

// Which of the places are members: those that were, then those that wait and could be. Where these are not
// enough, also those where a process is to be started.
std::vector<bool> MembersOf(const Job& job, const std::vector<RankPlace>& places) {
  std::set<ProcessId> were;
  if (job.record.grant) {
    for (const RankPlace& place : job.record.grant->ranks) were.insert(ProcessOf(*job.record.grant, place.rank));
  }
  // A job that counts nodes has whole ones: what is left of another waits for the others there.
  std::set<NodeId> part;
  for (const RankPlace& place : places) {
    if (job.demand.count_nodes && place.process.generation.value == 0) part.insert(place.node);
  }
  const auto goes_on = [&](const RankPlace& place) {
    return place.process.generation.value != 0 && !part.contains(place.node);
  };
  std::vector<bool> members(places.size());
  AddMembers(job, places, [&](const RankPlace& place) { return goes_on(place) && were.contains(place.process); },
             members);
  AddMembers(job, places, goes_on, members);
  std::vector<bool> all = members;
  AddMembers(job, places, [](const RankPlace&) { return true; }, all);
  return MayGoAlone(job, CountOf(places, members)) ? members : all;
}

// Numbers ranks anew, and those of each machine.
void Number(std::vector<RankPlace>& places, int first, std::map<NodeId, int>& of_node) {
  for (RankPlace& place : places) {
    place.rank = first++;
    place.local_rank = of_node[place.node]++;
  }
}

// Which processes are the next generation, and which wait beside it: spares, and where some go on and are
// enough, those that are to be started, so that nobody waits for them.
void Divide(const Job& job, std::vector<RankPlace> places, GenerationGrant& grant) {
  NameProcesses(job, job.kept, places);
  const std::vector<bool> members = MembersOf(job, places);
  for (size_t i = 0; i < places.size(); ++i) (members[i] ? grant.ranks : grant.waiting).push_back(places[i]);
  NameProcesses(job, job.coming, grant.waiting);
  if (grant.waiting.empty()) return;
  std::map<NodeId, int> of_node;
  Number(grant.ranks, 0, of_node);
  Number(grant.waiting, static_cast<int>(grant.ranks.size()), of_node);
}

// Of those that wait, for whom it goes on.
std::map<ProcessId, Instant> WaitingSince(const Job& job) {
  std::map<ProcessId, Instant> since;
  for (size_t i = 0; i < job.waiting.size(); ++i)
    since[ProcessOf(*job.record.grant, static_cast<int>(job.ranks.size() + i))] = job.waiting[i].since;
  return since;
}

// Rank 0 is on the first of them.
std::vector<NodeId> NodesOf(const GenerationGrant& grant, std::vector<NodeId> nodes) {
  std::set<NodeId> of_ranks;
  for (const RankPlace& place : grant.ranks) of_ranks.insert(place.node);
  std::ranges::stable_partition(nodes, [&](const NodeId& node) { return of_ranks.contains(node); });
  return nodes;
}

}  // namespace

Grants::Grants(HeadContext& context, HeadModel& model, JobLife& life, Faults& faults,
               Directories& directories, Copies& copies)
    : context_(context),
      model_(model),
      config_(context.config()),
      life_(life),
      faults_(faults),
      directories_(directories),
      copies_(copies) {}

// Picks a port that rank 0's node found free, that no other live job there has and this job did not just use.
int Grants::PickPort(const Job& job, const NodeId& node) {
  std::set<int> taken;
  for (const auto& [id, other] : model_.jobs) {
    if (other.record.grant && (other.Live() || &other == &job)) taken.insert(other.record.grant->master_port);
  }
  for (const int port : model_.nodes.at(node).free_ports) {
    if (!taken.contains(port)) return port;
  }
  int port = 0;
  do {
    port = kPortFirst + static_cast<int>(context_.rng().Below(kPortCount));
  } while (taken.contains(port));
  return port;
}

// The keepers of the next generation's nodes end what has no place in it; other nodes would wait for ever.
void Grants::LetKeptGo(Job& job, const std::vector<NodeId>& but) {
  const auto stays = [&](const NodeId& node) { return std::ranges::count(but, node) > 0; };
  std::set<NodeId> left;
  for (auto* waiting : {&job.kept, &job.coming}) {
    for (const auto& [node, processes] : *waiting) {
      if (!stays(node)) left.insert(node);
    }
    std::erase_if(*waiting, [&](const auto& item) { return !stays(item.first); });
  }
  for (const NodeId& node : left) life_.EndKept(job, node);
  job.keep_until.reset();
}

void Grants::Grant(Job& job, const plan::Placement& placement, Instant now) {
  LetKeptGo(job, placement.nodes);
  JobRecord& record = job.record;
  if (record.grant) job.past[record.generation] = *record.grant;
  if (job.past.size() > 16) job.past.erase(job.past.begin());
  const bool resumes = record.generation.value > 0 && !record.faults.empty() &&
                       record.faults.back().kind != FaultKind::kAddressInUse;
  GenerationGrant grant;
  grant.job = record.id;
  grant.generation = record.generation.Next();
  grant.timeline = record.timeline.value == 0 || resumes ? record.timeline.Next() : record.timeline;
  grant.restart_count = record.restarts;
  // A program with the SDK finds what is its own by itself, whatever the user asked for at the launch.
  const bool by_hand = job.checkpoint && job.checkpoint->manifest.empty();
  grant.resume = by_hand ? "latest" : record.resume;
  if (job.checkpoint && !by_hand) {
    const CheckpointRecord& newest = *job.checkpoint;
    grant.newest =
        CheckpointReport{record.id, newest.generation, newest.timeline, newest.step, newest.manifest, ""};
  }
  grant.takeover = record.takeover;
  const std::map<ProcessId, Instant> since = WaitingSince(job);
  Divide(job, ToRankPlaces(placement), grant);
  grant.world_size = static_cast<int>(grant.ranks.size());
  for (const NodeId& id : NodesOf(grant, placement.nodes)) grant.nodes.push_back(PlaceOf(model_.nodes.at(id)));
  grant.holders = copies_.HoldersOutside(job, grant.nodes);
  Keep(record, grant);
  grant.master_address = grant.nodes[0].address;
  grant.master_port = PickPort(job, grant.nodes[0].node);
  record.generation = grant.generation;
  record.timeline = grant.timeline;
  record.grant = std::move(grant);
  record.exits.clear();
  record.waits_for_storage = false;
  job.blocked_by.clear();
  job.not_before.reset();
  job.granted_here = true;
  job.placement_reason = placement.reason;
  if (const size_t waiting = record.grant->waiting.size(); waiting > 0) {
    GT_PROBE("head.grants_beside");
    const int world = record.grant->world_size, whole = job.RanksOf(*record.grant);
    job.placement_reason =
        whole > world
            ? absl::StrCat(world, " of ", whole, " ranks go on, the others come up beside them (",
                           placement.reason, ")")
            : absl::StrCat(world, " ranks, ", waiting, waiting == 1 ? " spare" : " spares", " (",
                           placement.reason, ")");
    if (whole > world) job.sizing.planned = false;  // what was planned begins when they join
  }
  job.sizing.goes_back = false;
  if (job.Size() == job.demand.max) job.sizing.asked = false;  // done: what is lost later, nobody asked for
  ResetLive(job, now);
  for (WaitingRank& one : job.waiting) {
    const int number = static_cast<int>(job.ranks.size() + (&one - job.waiting.data()));
    const auto it = since.find(ProcessOf(*record.grant, number));
    if (it != since.end()) one.since = it->second;
  }
  if (!job.run_mark) {
    job.run_mark = now;
    job.record.started_at = context_.Wall(now);
  }
  for (const std::string& warning : placement.warnings) context_.Emit(job, "warning", warning);
  context_.Emit(job, "grant",
                absl::StrCat("generation ", record.generation.value, ", timeline ", record.timeline.value,
                             ": ", job.placement_reason));
  if (record.state == JobState::kReconfiguring) {
    life_.Move(job, JobState::kReconfiguring,
               absl::StrCat("generation ", record.generation.value, " starts: ", job.placement_reason));
  } else {
    life_.Move(job, JobState::kStarting, job.placement_reason);
  }
  for (const NodePlace& place : record.grant->holders) copies_.TellHolder(job, place.node);
  std::vector<NodeId> nodes;
  for (const NodePlace& place : record.grant->nodes) nodes.push_back(place.node);
  SendGrant(job, nodes);
}

// Packed and proved once for all nodes: it is as long as the job has ranks and nodes.
void Grants::SendGrant(const Job& job, const std::vector<NodeId>& nodes) {
  GenerationGrant grant = *job.record.grant;
  grant.spec_text = job.record.spec_text;
  grant.client_env = job.record.env;
  grant.run_dir = job.record.run_dir;
  grant.client_key = job.record.client_key;
  grant.request_id = job.record.request_id;
  grant.end_with_client = job.record.end_with_client;
  grant.owner = job.record.owner;
  if (config_.near_secret) grant.near_secret = config_.near_secret(job.record.id);
  grant.live_jobs = directories_.LiveJobsToTell(job);
  StartGeneration start{model_.epoch(), std::move(grant), {}};
  GrantSeal seal;
  if (config_.seal_grant) seal = config_.seal_grant(start.grant);
  for (const NodeId& id : nodes) {
    const auto node = model_.nodes.find(id);
    start.seal = node != model_.nodes.end() && node->second.keeps_seals ? seal : GrantSeal();
    context_.Send(id, SendKind::kGrant, start);
  }
}

void Grants::ResetLive(Job& job, Instant now) {
  job.kept.clear();
  job.coming.clear();
  job.hung.clear();
  job.join_at.reset();
  job.running_since.reset();
  job.waiting.assign(job.record.grant->waiting.size(), WaitingRank{{}, now});
  const GenerationGrant& grant = *job.record.grant;
  job.ranks.assign(grant.ranks.size(), RankLive{});
  for (size_t i = 0; i < job.ranks.size(); ++i) {
    job.ranks[i].status.job = grant.job;
    job.ranks[i].status.generation = grant.generation;
    job.ranks[i].status.rank = static_cast<int>(i);
  }
  for (size_t i = 0; i < job.record.exits.size(); ++i) {  // that an earlier head heard of
    const int rank = job.record.exits[i].rank;
    if (static_cast<size_t>(rank) < job.ranks.size()) job.ranks[rank].exit = static_cast<int>(i);
  }
  job.cause_at.reset();
  for (const RankExit& exit : job.record.exits) (void)faults_.AwaitsCause(job, exit, now);
  job.steps.clear();
  job.not_started = static_cast<int>(
      std::count_if(job.ranks.begin(), job.ranks.end(), [](const RankLive& rank) { return rank.exit < 0; }));
  job.exchange.emplace(grant.world_size, config_.exchange_bytes_max);
  job.any_started = job.checkpointed = job.saved_since_told = false;
  job.notices = 0;
  job.told_at.reset();
  job.excused_until.reset();
  job.stalled.reset();
  job.stuck.reset();
  job.idle = 0;
  job.idle_from = {};
  job.sizing.room_since.reset();
  // These notes hold until this generation writes others: it may take a while to find out again.
  for (const char* kind : {kOwnerNote, kStorageNote}) {
    if (const auto said = job.rank_notes.find(kind); said != job.rank_notes.end())
      job.notes_before[kind] = said->second;
  }
  job.rank_notes.clear();
  job.leave.reset();
  job.paces.clear();
  job.broken_links.clear();
  job.links_at.reset();
  life_.KeepProgress(job);
  job.return_deadline.reset();
  const bool go_on = std::ranges::any_of(
      grant.ranks, [](const RankPlace& place) { return place.process.generation.value != 0; });
  const absl::Duration steps =
      job.steps_per_second > 0 ? absl::Seconds(5 / job.steps_per_second) : absl::ZeroDuration();
  if (go_on) job.return_deadline = now + config_.return_timeout + steps;
  job.record.diverged = false;
  job.top_step.reset();
  job.low_step.reset();
  job.began_anew = 0;
  job.steps_per_second = 0;
  job.rate_over.clear();
  job.progress_at = now;
  // A setup script runs before the ranks and may install things.
  job.start_deadline = now + (job.spec.setup.empty() ? config_.start_timeout : job.spec.progress.startup);
  job.gone_deadline.reset();
  job.fenced_at.reset();
  job.left_at.reset();
}

}  // namespace gtrain::core
