#include "runtime/core/head/grants.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/probe.h"
#include "runtime/core/head/copies.h"
#include "runtime/core/head/directories.h"
#include "runtime/core/head/faults.h"
#include "runtime/core/head/gang.h"
#include "runtime/core/head/job_life.h"
#include "runtime/core/head/members.h"
#include "runtime/core/head/newcomers.h"
#include "runtime/core/head/placer.h"
#include "runtime/core/values/rank_notes.h"

namespace gtrain::core {
namespace {

constexpr int kPortFirst = 20'000,
              kPortCount = 10'000;  // below Linux's ephemeral range, if an agent named none

// The grant that follows the newest of the job, without its places.
GenerationGrant NextOf(const Job& job) {
  const JobRecord& record = job.record;
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
  return grant;
}

// Says when all that a job in place had trained is gone; empty: it is not, or the head cannot know. `stay`:
// of its ranks, how many were ranks of the generation before. A spare that takes a place has no state.
std::string BeginsAnewText(const Job& job, int stay) {
  const JobRecord& record = job.record;
  if (!job.spec.in_place || stay > 0 || job.checkpoint || !record.last_step) return "";
  GT_PROBE("head.begins_anew");
  return absl::StrCat(
      "generation ", record.generation.value, " begins anew from nothing: no ",
      job.going_on > 0 ? "rank" : "process", " of generation ", record.generation.value - 1, " goes on in it",
      job.going_on > 0 ? ", and who waited beside them has no state"
      : job.stays      ? ""
                       : ", since the program did not join to stay (docs/python.md)",
      ", and no checkpoint is committed. The last step that was reported was ", *record.last_step,
      ". A `checkpoint:` in the job file would keep it; what the program saves by itself "
      "gtrain does not see");
}

// What ranks said of themselves holds until this generation says something else: it may take a while to find
// out again.
void KeepNotes(Job& job) {
  for (const char* kind : {kOwnerNote, kStorageNote}) {
    if (const auto said = job.rank_notes.find(kind); said != job.rank_notes.end())
      job.notes_before[kind] = said->second;
  }
  job.rank_notes.clear();
}

// Counted once a generation, so that nothing else has to look at all ranks.
void CountPlaces(Job& job) {
  const GenerationGrant& grant = *job.record.grant;
  job.nodes_with_ranks = {};
  job.nodes_with_ranks = {grant.generation, job.NodesWithRanks(grant)};
  job.going_on = static_cast<int>(std::ranges::count_if(
      grant.ranks, [](const RankPlace& place) { return place.process.generation.value != 0; }));
  const int whole = job.RanksOf(grant);
  job.coming_up = whole - grant.world_size;
  job.joined = 0;
  if (job.demand.count_nodes) job.per_node = std::max(1, whole / std::max(1, job.SizeOf(grant)));
}

}  // namespace

Grants::Grants(HeadContext& context, HeadModel& model, JobLife& life, Faults& faults,
               Directories& directories, Copies& copies, const Placer& placer)
    : context_(context),
      model_(model),
      config_(context.config()),
      life_(life),
      faults_(faults),
      directories_(directories),
      copies_(copies),
      placer_(placer) {}

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

void Grants::Grant(Job& job, const plan::Placement& placement, Instant now, bool saves) {
  JobRecord& record = job.record;
  if (record.grant) job.past[record.generation] = *record.grant;
  if (job.past.size() > 16) job.past.erase(job.past.begin());
  GenerationGrant grant = NextOf(job);
  const std::map<ProcessId, Instant> since = WaitingSince(job);
  Divide(job, ToRankPlaces(placement), grant);
  record.saves = saves;
  if (saves) StartNothing(grant);
  const bool alone = std::exchange(job.sizing.alone, false) && StartNothing(grant);
  const std::vector<NodeId> nodes = NodesOf(grant, placement.nodes);
  for (const NodeId& id : nodes) grant.nodes.push_back(PlaceOf(model_.nodes.at(id)));
  placer_.SetFabricOrder(grant);
  LetKeptGo(job, nodes);  // some of the placement may have lost what was to be started there
  grant.holders = copies_.HoldersOutside(job, grant.nodes);
  Keep(record, grant);
  const int stay = MembersThatStay(job, grant);
  const std::string silent = SilentText(job);
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
  job.placement_reason =
      alone ? absl::StrCat(record.grant->world_size, " ranks that go on, alone at first") : placement.reason;
  // What was planned begins when they join.
  if (job.RanksOf(*record.grant) > record.grant->world_size) job.sizing.planned = false;
  job.sizing.goes_back = false;
  if (job.Size() == job.demand.max) job.sizing.asked = false;  // done: what is lost later, nobody asked for
  ResetLive(job, now);
  KeepWaitingSince(since, job);
  if (!job.run_mark) {
    job.run_mark = now;
    job.record.started_at = context_.Wall(now);
  }
  if (!record.grant->waiting.empty()) GT_PROBE("head.grants_beside");
  const std::string places = PlacesText(job), anew = BeginsAnewText(job, stay);
  for (const std::string& warning : placement.warnings) context_.Emit(job, "warning", warning);
  if (!silent.empty()) context_.Emit(job, "warning", silent);
  if (!anew.empty()) context_.Emit(job, "warning", anew);
  context_.Emit(job, "grant",
                absl::StrCat("generation ", record.generation.value, ", timeline ", record.timeline.value,
                             ": ", places));
  if (record.state == JobState::kReconfiguring) {
    life_.Move(job, JobState::kReconfiguring,
               absl::StrCat("generation ", record.generation.value, " starts: ", places));
  } else {
    life_.Move(job, JobState::kStarting, places);
  }
  for (const NodePlace& place : record.grant->holders) copies_.TellHolder(job, place.node);
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
  const auto keeps_seals = [&](const NodeId& id) {
    const auto node = model_.nodes.find(id);
    return node != model_.nodes.end() && node->second.keeps_seals;
  };
  std::optional<SharedMessage> plain, sealed;  // made where there is a node for it
  for (const NodeId& id : nodes) {
    std::optional<SharedMessage>& message = keeps_seals(id) ? sealed : plain;
    if (!message) {
      start.seal = &message == &sealed ? seal : GrantSeal();
      message = start;
    }
    context_.Send(id, SendKind::kGrant, *message);
  }
}

void Grants::ResetLive(Job& job, Instant now) {
  job.kept.clear();
  job.coming.clear();
  job.hung.clear();
  job.join_at.reset();
  job.no_room = false;
  job.pause_asked.reset();
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
  KeepNotes(job);
  job.leave.reset();
  job.paces.clear();
  job.busy_new = 0;
  job.broken_links.clear();
  job.links_at.reset();
  life_.KeepProgress(job);
  job.return_deadline.reset();
  CountPlaces(job);
  const absl::Duration steps =
      job.steps_per_second > 0 ? absl::Seconds(5 / job.steps_per_second) : 2 * job.step_time;
  if (job.going_on > 0) job.return_deadline = now + config_.return_timeout + steps;
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
