// A job from submission to its end.
//
// A generation is granted by writing it into the JobRecord; StartGeneration leaves after that is durable.
// It is taken away by Revoke, which leaves at once; the record follows. Between the two, BeginEnding notes
// what shall become of the job (`ending`) and which nodes may still run its processes (`unreleased`); when
// the last of them has released it, is dead, or its time is up, FinishEnding acts on the note.
#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/probe.h"
#include "base/units.h"
#include "runtime/core/head/head_state.h"
#include "runtime/core/head/restart_policy.h"
#include "runtime/core/values/rank_notes.h"

namespace gtrain::core {
namespace {

constexpr char kMayStillRun[] = " may still run there";

constexpr size_t kReasonBytesMax = 8 << 10;
// A large cluster that comes back says hello node by node; looking at all waiting jobs after each hello would
// keep the head from hearing the next. So there at most one pass over all of them is made in this time.
constexpr size_t kManyNodes = 64;
constexpr absl::Duration kPassEvery = absl::Milliseconds(100);
constexpr int kPortFirst = 20'000,
              kPortCount = 10'000;  // below Linux's ephemeral range, if an agent named none

}  // namespace

void HeadState::Move(Job& job, JobState state, std::string reason) {
  reason = Shortened(std::move(reason), kReasonBytesMax);
  Dirty(job);
  if (state != job.record.state) {
    GT_CHECK(CanMove(job.record.state, state));
    job.record.state = state;
  } else if (reason == job.record.reason) {
    return;
  }
  job.record.reason = std::move(reason);
  Emit(job, "state", absl::StrCat(Name(state), ": ", job.record.reason));
  Say(absl::StrCat(job.record.id.value, " ", Name(state), ": ", job.record.reason));
}

absl::Duration HeadState::RunTime(const Job& job, Instant now) const {
  return job.run_mark ? job.record.run_time + (now - *job.run_mark) : job.record.run_time;
}

// ---------------------------------------------------------------- scheduling

// Highest priority first, then order of submission. A job that cannot be placed does not hold up later
// ones that can: the gang waits whole, the room it cannot use is used. A submit changes nothing for those
// that wait.
void HeadState::Schedule(Instant now) {
  const bool all = schedule_ && (!next_pass_ || now >= *next_pass_);
  if (all) {
    schedule_ = false;
    next_pass_.reset();
    if (nodes_.size() >= kManyNodes) next_pass_ = now + kPassEvery;
  }
  const std::vector<JobId> fresh = std::exchange(fresh_, {});
  std::vector<Job*> candidates;
  if (all) {
    candidates = LiveJobs();
  } else {
    for (const JobId& id : fresh) candidates.push_back(&jobs_.at(id));
  }
  std::vector<Job*> wanting;
  for (Job* job : candidates) {
    if (job->Wanting() && (!job->not_before || *job->not_before <= now) && !AwaitsWord(job->record.id))
      wanting.push_back(job);
  }
  std::stable_sort(wanting.begin(), wanting.end(),
                   [](const Job* a, const Job* b) { return a->spec.priority > b->spec.priority; });
  bool changed = true;
  for (Job* job : wanting) {
    if (changed) CheckViews();
    changed = TryPlace(*job, now);
  }
  if (all) looks_owed_ = live_jobs_.size();
}

// Why it takes no ranks; empty: it does.
std::string HeadState::Unusable(const Node& node) const {
  if (node.state == NodeState::kSuspect) return "suspect: it has fallen silent";
  if (node.rival) return "another agent has said hello with its key";
  if (node.Leaving()) return absl::StrCat("leaving: ", node.Parting().source);
  if (node.quarantined_until) return node.quarantine;
  return node.record.unclean ? "a process survived SIGKILL there" : "";
}

// A job between two generations keeps its place, also while it waits for its storage: other jobs would need
// the same storage, and what took the place might keep it for days.
bool HeadState::Occupies(const Job& job) const {
  return job.record.grant && (job.Live() || job.KeepsPlace());
}

// Also what a generation that is over may still run there.
bool HeadState::HoldsRoomOn(const Job& job, const NodeId& node) const {
  return Occupies(job) || std::ranges::count(job.record.unreleased, node) > 0;
}

// Whether views_ is not what this job sees: it counts what the job itself still has, and nodes it avoids.
bool HeadState::TakesPart(const Job& job) const {
  return Occupies(job) || !job.record.unreleased.empty() || !job.record.avoided.empty();
}

HeadState::ViewsKey HeadState::CurrentViewsKey() const {
  ViewsKey key;
  key.nodes.reserve(nodes_.size());
  for (const auto& [id, node] : nodes_) {
    if (!node.welcomed || node.state == NodeState::kDead) continue;
    key.nodes.push_back({node.revision, Unusable(node)});
  }
  for (const auto& [id, job] : jobs_) {
    const bool holds = Occupies(job);
    if (!holds && (!job.record.grant || job.record.unreleased.empty())) continue;
    key.jobs.push_back({job.record.number, job.record.generation, holds, job.record.unreleased});
  }
  return key;
}

void HeadState::CheckViews() {
  ViewsKey key = CurrentViewsKey();
  if (key == views_key_) return;
  views_ = ViewsWithout(Job());
  empty_views_ = plan::Emptied(views_);
  views_key_ = std::move(key);
}

std::vector<plan::NodeView> HeadState::ViewsWithout(const Job& wanting) const {
  std::vector<plan::NodeView> views;
  std::map<NodeId, plan::NodeView*> by_node;
  views.reserve(nodes_.size());
  for (const auto& [id, node] : nodes_) {
    if (!node.welcomed || node.state == NodeState::kDead) continue;
    plan::NodeView& view = views.emplace_back(ViewOf(node.record));
    view.unusable = Unusable(node);
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
  for (const auto& [job_id, job] : jobs_) {
    if (&job == &wanting || !job.record.grant) continue;
    const std::vector<NodeId>& unreleased = job.record.unreleased;
    if (!Occupies(job) && unreleased.empty()) continue;
    for (const RankPlace& rank : job.record.grant->ranks) {
      const auto it = by_node.find(rank.node);
      if (it != by_node.end() && HoldsRoomOn(job, rank.node)) Occupy(*it->second, rank, job.demand);
    }
    // Of an older generation than the newest grant, so how much it takes there is not known any more.
    for (const NodeId& id : unreleased) {
      const auto it = by_node.find(id);
      if (it == by_node.end() || job.HoldsNode(id) || !it->second->unusable.empty()) continue;
      it->second->unusable = absl::StrCat("processes of an ended generation of ", job_id.value, kMayStillRun);
    }
  }
  return views;
}

plan::Placement HeadState::PlacementFor(const Job& job) {
  plan::Demand demand = job.demand;
  const GenerationGrant* last = job.record.grant ? &*job.record.grant : nullptr;
  if (const GenerationGrant* worked = GrantOf(job, job.sizing.worked);
      job.sizing.goes_back && worked != nullptr)
    last = worked;
  if (last != nullptr) {
    for (const RankPlace& place : last->ranks) demand.previous.push_back(place.node);
  }
  return TakesPart(job) ? plan::Place(ViewsWithout(job), demand) : plan::Place(views_, demand);
}

// True when it may have changed what nodes have left.
bool HeadState::TryPlace(Job& job, Instant now) {
  if (EndIfItsTimeIsUp(job, now)) return true;
  const plan::Placement placement = PlacementFor(job);
  if (!placement.placed) {
    NotPlaced(job, placement);
    return false;
  }
  if (!DirectoryIsFree(job, now)) return true;  // asked only of who could start: that looks at all live jobs
  Grant(job, placement, now);
  return true;
}

void HeadState::NotPlaced(Job& job, const plan::Placement& placement) {
  job.record.waits_for_storage = false;
  const plan::Placement empty = TakesPart(job) ? plan::Place(plan::Emptied(ViewsWithout(job)), job.demand)
                                               : plan::Place(empty_views_, job.demand);
  job.sizing.never_fits = !empty.placed;
  std::map<NodeId, std::vector<std::string>> holders;
  for (size_t i = 0; i < std::min(placement.verdicts.size(), kBlockersMax); ++i)
    holders[placement.verdicts[i].node];
  for (const auto& [id, other] : jobs_) {
    if (&other == &job || !other.record.grant) continue;
    for (const NodePlace& place : other.record.grant->nodes) {
      const auto it = holders.find(place.node);
      if (it != holders.end() && HoldsRoomOn(other, place.node)) it->second.push_back(id.value);
    }
  }
  job.blocked_by = Explain(placement, empty, holders);
  constexpr char kWhenGone[] = "when its agent says that they are gone, or the machine restarts";
  for (Blocker& blocker : job.blocked_by) {
    if (absl::EndsWith(blocker.constraint, kMayStillRun)) blocker.unblocked_by = kWhenGone;
    const auto over = std::ranges::find_if(
        blocker.held_by, [&](const std::string& id) { return IsFinal(jobs_.at(JobId(id)).record.state); });
    if (over != blocker.held_by.end())
      blocker.unblocked_by =
          absl::StrCat("processes of ", *over, ", which is over,", kMayStillRun, "; ", kWhenGone);
  }
  for (const AvoidedNode& avoided : job.record.avoided) {
    for (Blocker& blocker : job.blocked_by) {
      if (blocker.node != Hostname(avoided.node)) continue;
      blocker.unblocked_by =
          absl::StrCat("`gtrain node undrain ", blocker.node, "` once that is mended; it is tried again ",
                       PrintDuration(config_.avoid_for), " after it was found");
    }
  }
  if (empty.placed && job.record.generation.value == 0) {
    return Move(job, JobState::kQueued, absl::StrCat("waits for room: ", placement.reason));
  }
  int alive = 0;
  for (const auto& [id, node] : nodes_) alive += node.Usable() ? 1 : 0;
  if (job.record.generation.value == 0 && config_.expected_nodes && alive >= *config_.expected_nodes) {
    return Finish(job, JobState::kFailed, absl::StrCat("can never fit this cluster: ", empty.reason));
  }
  const char* safe = job.record.generation.value > 0 ? "; its state is safe and it resumes by itself" : "";
  Move(job, JobState::kWaiting, absl::StrCat(placement.reason, safe));
}

// ---------------------------------------------------------------- grant

// From rank 0's node: a port it found free, that no other live job there has and this job did not just use.
int HeadState::PickPort(const Job& job, const NodeId& node) {
  std::set<int> taken;
  for (const auto& [id, other] : jobs_) {
    if (other.record.grant && (other.Live() || &other == &job)) taken.insert(other.record.grant->master_port);
  }
  for (const int port : nodes_.at(node).free_ports) {
    if (!taken.contains(port)) return port;
  }
  int port = 0;
  do {
    port = kPortFirst + static_cast<int>(rng_.Below(kPortCount));
  } while (taken.contains(port));
  return port;
}

void HeadState::Grant(Job& job, const plan::Placement& placement, Instant now) {
  JobRecord& record = job.record;
  if (record.grant) {
    job.past[record.generation] = *record.grant;
    if (job.past.size() > 16) job.past.erase(job.past.begin());
  }
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
  grant.ranks = ToRankPlaces(placement);
  grant.world_size = static_cast<int>(grant.ranks.size());
  for (const NodeId& id : placement.nodes) grant.nodes.push_back(PlaceOf(nodes_.at(id)));
  grant.holders = HoldersOutside(job, grant.nodes);
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
  job.sizing.goes_back = false;
  if (SizeOf(job) == job.demand.max) job.sizing.asked = false;  // done: what is lost later, nobody asked for
  ResetLive(job, now);
  if (!job.run_mark) {
    job.run_mark = now;
    job.record.started_at = Wall(now);
  }
  for (const std::string& warning : placement.warnings) Emit(job, "warning", warning);
  Emit(job, "grant",
       absl::StrCat("generation ", record.generation.value, ", timeline ", record.timeline.value, ": ",
                    placement.reason));
  if (record.state == JobState::kReconfiguring) {
    Move(job, JobState::kReconfiguring,
         absl::StrCat("generation ", record.generation.value, " starts: ", placement.reason));
  } else {
    Move(job, JobState::kStarting, placement.reason);
  }
  for (const NodePlace& place : record.grant->holders) TellHolder(job, place.node);
  std::vector<NodeId> nodes;
  for (const NodePlace& place : record.grant->nodes) nodes.push_back(place.node);
  SendGrant(job, nodes);
}

// Packed and proved once for all nodes: it is as long as the job has ranks and nodes.
void HeadState::SendGrant(const Job& job, const std::vector<NodeId>& nodes) {
  GenerationGrant grant = *job.record.grant;
  grant.spec_text = job.record.spec_text;
  grant.client_env = job.record.env;
  grant.run_dir = job.record.run_dir;
  grant.client_key = job.record.client_key;
  grant.request_id = job.record.request_id;
  grant.end_with_client = job.record.end_with_client;
  grant.owner = job.record.owner;
  if (config_.near_secret) grant.near_secret = config_.near_secret(job.record.id);
  grant.live_jobs = LiveJobsToTell(job);
  StartGeneration start{epoch(), std::move(grant), {}};
  GrantSeal seal;
  if (config_.seal_grant) seal = config_.seal_grant(start.grant);
  for (const NodeId& id : nodes) {
    const auto node = nodes_.find(id);
    start.seal = node != nodes_.end() && node->second.keeps_seals ? seal : GrantSeal();
    Send(id, SendKind::kGrant, start);
  }
}

// What is known of a generation only while it lives.
void HeadState::ResetLive(Job& job, Instant now) {
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
  for (const RankExit& exit : job.record.exits) (void)AwaitsCause(job, exit, now);
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
  // Until this generation says something else they hold: it may take a while to find out again.
  for (const char* kind : {kOwnerNote, kStorageNote}) {
    if (const auto said = job.rank_notes.find(kind); said != job.rank_notes.end())
      job.notes_before[kind] = said->second;
  }
  job.rank_notes.clear();
  job.leave.reset();
  job.paces.clear();
  job.broken_links.clear();
  job.links_at.reset();
  KeepProgress(job);
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

// ---------------------------------------------------------------- revoke

void HeadState::SendRevoke(const Job& job, const NodeId& node, EndMode mode, absl::Duration grace) {
  Send(node, SendKind::kNow,
       Revoke{epoch(), job.record.id, job.record.revoked, mode, grace, job.record.ending_reason});
}

void HeadState::BeginEnding(Job& job, Ending ending, EndMode mode, absl::Duration grace, std::string reason,
                            Instant now) {
  JobRecord& record = job.record;
  GT_CHECK(record.grant.has_value());
  record.revoked = record.generation;
  record.ending = ending;
  record.ending_reason = Shortened(reason, kReasonBytesMax);
  for (const NodePlace& place : record.grant->nodes) {
    if (std::find(record.unreleased.begin(), record.unreleased.end(), place.node) ==
        record.unreleased.end()) {
      record.unreleased.push_back(place.node);
    }
  }
  job.written.unreleased = false;
  for (const NodeId& node : record.unreleased) SendRevoke(job, node, mode, grace);
  job.start_deadline.reset();
  job.gone_deadline = now + grace + config_.gone_margin;
  Emit(job, "revoke", absl::StrCat("generation ", record.generation.value, " is over: ", reason));
  if (ending == Ending::kReform || ending == Ending::kReplace) {
    Move(job, JobState::kReconfiguring, std::move(reason));
  } else {
    Move(job, record.state, absl::StrCat("stopping: ", reason));
  }
  ContinueEnding(job, now);
}

// Until when ranks of the generation that ends may write there, of those that nothing but their lease stops:
// commits fence programs with the SDK.
Instant HeadState::MayWriteUntil(const Job& job, const Node& node) const {
  const bool another = job.record.ending == Ending::kReform || job.record.ending == Ending::kReplace;
  if (!another || job.record.sdk || job.spec.overlap == spec::Overlap::kAllow ||
      config_.fence_after <= absl::ZeroDuration()) {
    return Instant();
  }
  const auto& places = job.record.grant->ranks;
  const bool may = std::any_of(places.begin(), places.end(), [&](const RankPlace& place) {
    return place.node == node.record.id && job.ExitOf(place.rank) == nullptr;
  });
  if (!may) return Instant();
  if (node.state != NodeState::kDead)  // it answers, but not this: its lease goes on
    return job.gone_deadline ? *job.gone_deadline + config_.fence_after : Instant();
  const Instant lease = node.heard_at + config_.fence_after + config_.fence_margin;
  const bool taken_away = node.record.notice.kind == NoticeKind::kLeave && node.notice_at;
  return taken_away ? std::min(lease, *node.notice_at + config_.gone_margin) : lease;
}

// Waits for every node that can still answer. Dead ones cannot; one whose time is up is left out of the
// job's next generation and counted as occupied until it answers. Where ranks without the SDK may have been
// left behind, nothing begins before their lease is over.
void HeadState::ContinueEnding(Job& job, Instant now) {
  if (job.record.ending == Ending::kNone || IsFinal(job.record.state)) return;
  const bool time_up = job.gone_deadline && *job.gone_deadline <= now;
  std::optional<Instant> fenced_at;
  std::string hostnames;
  for (const NodeId& id : job.record.unreleased) {
    const auto it = nodes_.find(id);
    if (it == nodes_.end()) continue;
    if (it->second.state != NodeState::kDead && !time_up) {
      job.fenced_at.reset();  // the time of those that can still answer counts first
      return;
    }
    const Instant until = MayWriteUntil(job, it->second);
    if (until <= now) continue;
    fenced_at = std::max(fenced_at.value_or(until), until);
    absl::StrAppend(&hostnames, hostnames.empty() ? "" : ", ", it->second.record.hostname);
  }
  const bool waits = job.fenced_at.has_value();
  job.fenced_at = fenced_at;
  if (fenced_at && !waits) AwaitFence(job, hostnames, now);
  if (fenced_at) return;
  for (const NodeId& id : job.record.unreleased) {
    const auto it = nodes_.find(id);
    if (it == nodes_.end() || it->second.state == NodeState::kDead) continue;
    GT_PROBE("head.end_unconfirmed");
    Emit(job, "warning",
         absl::StrCat(it->second.record.hostname, " did not confirm that all processes of generation ",
                      job.record.revoked.value, " ended; it is not used meanwhile"));
  }
  FinishEnding(job, now);
}

void HeadState::AwaitFence(Job& job, const std::string& hostnames, Instant now) {
  GT_PROBE("head.awaits_fence");
  const std::string left = PrintDuration(absl::Ceil(*job.fenced_at - now, absl::Seconds(1)));
  const std::string where = Shortened(hostnames, 1 << 9);
  Move(job, job.record.state,
       absl::StrCat(job.record.ending_reason, "; for ", left, " at most ranks of generation ",
                    job.record.revoked.value, " may still run on ", where));
  job.blocked_by = {
      {.node = "",
       .constraint = absl::StrCat(
           where,
           " does not answer, and ranks that do not use gtrain's library may still write there until "
           "their lease is over"),
       .room = 0,
       .held_by = {},
       .unblocked_by =
           absl::StrCat("in at most ", left,
                        "; the node answering; or, once that machine is off, `gtrain node revoke`. "
                        "`overlap: allow` in the job file never waits")}};
}

void HeadState::FinishEnding(Job& job, Instant now) {
  const Ending ending = job.record.ending;
  const std::string reason = job.record.ending_reason;
  job.record.ending = Ending::kNone;
  job.gone_deadline.reset();
  job.fenced_at.reset();
  Dirty(job);
  schedule_ = schedule_ || job.record.grant.has_value();
  switch (ending) {
    case Ending::kNone:
      return;
    case Ending::kReform:
      return DecideAfterFault(job, now);
    case Ending::kReplace:
      GT_PROBE("head.replaced_free_of_charge");
      return;
    case Ending::kCancel:
      return Finish(job, JobState::kCancelled, reason);
    case Ending::kFail:
      return Finish(job, JobState::kFailed, reason);
  }
}

// The rank whose end the head heard first may have ended only because another one met a storage fault; by now
// all exits are here. Storage faults in a row share one record: however long the storage is away, the other
// faults of the job are remembered.
void HeadState::FindStorageFault(Job& job) {
  std::vector<FaultRecord>& faults = job.record.faults;
  FaultRecord& last = faults.back();
  const bool by_itself =
      last.kind == FaultKind::kCrash || last.kind == FaultKind::kOom || last.kind == FaultKind::kSaved;
  if (by_itself && !(last.cause == ExitCause::kExited && last.exit_code == kExitNoRestart)) {
    const auto met = std::find_if(job.record.exits.begin(), job.record.exits.end(), [](const RankExit& exit) {
      return MetStorageFault(exit) || (exit.cause == ExitCause::kStopped && !exit.storage.empty());
    });
    if (met != job.record.exits.end()) {
      GT_PROBE("head.storage_fault_of_another_rank");
      FaultRecord found = FaultOf(job, *met);
      found.kind = FaultKind::kStorage;
      found.generation = last.generation;
      found.step = last.step;
      found.at = last.at;
      found.committed = last.committed;
      found.progressed = last.step.has_value() || job.checkpointed;
      last = std::move(found);
      Emit(job, "fault", last.message);
    } else if (const auto note = job.rank_notes.find(kStorageNote);
               note != job.rank_notes.end() && !note->second.empty() &&
               job.record.exits.size() < job.ranks.size()) {
      // The node of the rank that said so does not answer any more: what it said while it lived counts.
      last.kind = FaultKind::kStorage;
      last.message = Shortened(note->second, 2 << 10);
      Emit(job, "fault", last.message);
    }
  }
  if (faults.size() < 2 || last.kind != FaultKind::kStorage || last.progressed) return;
  FaultRecord& before = faults[faults.size() - 2];
  if (before.kind != FaultKind::kStorage) return;
  last.tries = before.tries + 1;
  before = std::move(last);
  faults.pop_back();
  job.fault_times.erase(job.fault_times.end() - 2);
}

// Also after a restart of the head, which does not know any more how much of the time had passed.
void HeadState::WaitForStorage(Job& job, absl::Duration delay, Instant now) {
  GT_PROBE("head.waits_for_storage");
  const FaultRecord& fault = job.record.faults.back();
  job.record.waits_for_storage = true;
  job.not_before = now + delay;
  job.blocked_by = {
      {.node = "",
       .constraint = Shortened(absl::StrCat("storage: ", fault.message), 1 << 10),
       .room = 0,
       .held_by = {},
       .unblocked_by = absl::StrCat(
           "the storage of ", job.spec.checkpoint.uri.empty() ? "its checkpoints" : job.spec.checkpoint.uri,
           " answering again: the job tries at most ", PrintDuration(kBackoffMax), " apart, or `gtrain stop ",
           job.record.id.value, "`")}};
}

// A rank that cannot go on without another one says 75, and its end may be heard before that of the one whose
// error it was. By now all exits are here.
void HeadState::FindCauseOfExit75(Job& job) {
  FaultRecord& last = job.record.faults.back();
  if (last.kind != FaultKind::kSaved) return;
  for (const RankExit& exit : job.record.exits) {
    const bool well =
        exit.cause == ExitCause::kExited && (exit.exit_code == 0 || exit.exit_code == kExitSaved);
    if (well || exit.cause == ExitCause::kStopped) continue;
    GT_PROBE("head.cause_of_exit75");
    FaultRecord found = FaultOf(job, exit);
    found.generation = last.generation;
    found.step = last.step;
    found.at = last.at;
    found.committed = last.committed;
    found.progressed = last.progressed;
    Excuse(job, found, step_at_);
    last = std::move(found);
    return Emit(job, "fault", last.message);
  }
}

// Exit 75 says that the job goes on behind what it saved. A program that says so and has saved nothing, on
// machines that all stay, would come back for ever.
void HeadState::ChargeUnlessEarned(Job& job) {
  FaultRecord& last = job.record.faults.back();
  if (last.kind != FaultKind::kSaved || MayActOnNotice(job, step_at_) || SavedMore(job.record.faults)) return;
  if (!job.broken_links.empty()) return;
  for (const NodePlace& place : job.record.grant->nodes) {
    const auto node = nodes_.find(place.node);
    if (node == nodes_.end() || node->second.state == NodeState::kDead || node->second.Leaving()) return;
  }
  GT_PROBE("head.exit75_charged");
  last.kind = FaultKind::kCrash;
  last.signature.clear();  // it is no error; the budget ends it
  absl::StrAppend(&last.message, ", but no checkpoint of a higher step was committed since the last one");
  const auto left = std::ranges::find_if(job.record.exits, [](const RankExit& exit) {
    return exit.cause == ExitCause::kExited && exit.exit_code == 0;
  });
  if (left != job.record.exits.end()) {
    absl::StrAppend(&last.message, "; rank ", left->rank, " had ended with exit code 0 while it still ran");
  }
  Emit(job, "fault", last.message);
}

void HeadState::DecideAfterFault(Job& job, Instant now) {
  job.written.newest_fault = false;
  std::optional<int64_t>& committed = job.record.faults.back().committed;
  for (const FaultRecord& fault : job.record.faults) committed = std::max(committed, fault.committed);
  if (job.checkpoint) committed = std::max(committed.value_or(job.checkpoint->step), job.checkpoint->step);
  FindStorageFault(job);
  FindCauseOfExit75(job);
  ChargeUnlessEarned(job);
  if (GoesBack(job, now)) return;
  std::vector<PastFault> past;
  for (size_t i = 0; i < job.record.faults.size(); ++i)
    past.push_back({&job.record.faults[i], job.fault_times[i]});
  const FaultRecord& fault = job.record.faults.back();
  const RestartVerdict verdict = DecideRestart(job.spec.restart, past, now, rng_);
  if (!verdict.restart) {
    GT_PROBE("head.no_more_restarts");
    return Finish(job, JobState::kFailed, absl::StrCat(fault.message, "; ", verdict.reason));
  }
  if (fault.kind == FaultKind::kStorage) {
    WaitForStorage(job, verdict.delay, now);
    const absl::Duration shown = std::max(absl::Seconds(1), absl::Floor(verdict.delay, absl::Seconds(1)));
    return Move(job, JobState::kWaiting,
                absl::StrCat("storage: ", fault.message, "; ", verdict.reason, ", next try in ",
                             PrintDuration(shown)));
  }
  if (Charged(fault.kind)) ++job.record.restarts;
  std::string again;
  if (verdict.delay > absl::ZeroDuration()) {
    GT_PROBE("head.backoff");
    job.not_before = now + verdict.delay;
    again = absl::StrCat(", again in ",
                         absl::FormatDuration(absl::Trunc(verdict.delay, absl::Milliseconds(100))));
  }
  Move(job, JobState::kReconfiguring, absl::StrCat(fault.message, "; ", verdict.reason, again));
}

// ---------------------------------------------------------------- end and timers

// Before what the ranks said is forgotten.
void HeadState::KeepProgress(Job& job) {
  if (job.top_step) job.record.last_step = job.low_step ? job.low_step : job.top_step;
  for (const RankLive& rank : job.ranks) {
    if (!rank.status.loss && !rank.status.diverged) continue;
    job.record.last_loss = rank.status.loss;
    job.record.diverged = rank.status.diverged;
    return;
  }
}

void HeadState::Finish(Job& job, JobState state, std::string reason) {
  JobRecord& record = job.record;
  switch (state) {
    case JobState::kSucceeded:
      record.exit_code = 0;
      break;
    case JobState::kCancelled:
      record.exit_code = 130;
      break;
    default: {
      record.exit_code = 1;
      if (!record.faults.empty() && record.faults.back().cause == ExitCause::kExited) {
        record.exit_code = std::max(1, record.faults.back().exit_code);
      } else if (!record.faults.empty() && record.faults.back().signal > 0) {
        record.exit_code = 128 + record.faults.back().signal;
      }
    }
  }
  record.waits_for_storage = false;
  record.ended_at = Wall(step_at_);
  record.run_time = RunTime(job, step_at_);
  job.run_mark.reset();
  KeepProgress(job);
  Move(job, state, std::move(reason));
  for (const NodeId& node : record.kept) Send(node, SendKind::kReply, ForgetJob{epoch(), record.id});
  if (state == JobState::kFailed) out_.push_back(WriteFailure{record.id, record.run_dir, FailureOf(job)});
  out_.push_back(*ResultOf(record.id));
  job.exchange.reset();
  job.blocked_by.clear();
  active_at_ = step_at_;
  schedule_ = schedule_ || record.grant.has_value();  // without one it held nothing
  if (job.kept_bytes == 0) CountOver(job);
}

void HeadState::JobTimers(Job& job, Instant now) {
  const std::optional<Instant> ends_at = job.fenced_at ? job.fenced_at : job.gone_deadline;
  if (ends_at && *ends_at <= now) ContinueEnding(job, now);
  if (IsFinal(job.record.state)) return;
  LinkStep(job, now);
  LeaveStep(job, now);
  if (job.left_at && *job.left_at <= now) {
    job.left_at.reset();
    SayWhoLeft(job, nullptr);
  }
  if (job.Live() && job.cause_at && *job.cause_at <= now) return FailBy75(job, now);
  if (job.not_before && *job.not_before <= now && job.Wanting()) {
    job.not_before.reset();
    schedule_ = true;
  }
  if (job.Live() && job.start_deadline && *job.start_deadline <= now) {
    GT_PROBE("head.start_timeout");
    FaultRecord fault;
    fault.kind = FaultKind::kInfrastructure;
    fault.cause = ExitCause::kStartFailed;
    for (const RankPlace& place : job.record.grant->ranks) {
      if (job.ranks[place.rank].started || job.ExitOf(place.rank) != nullptr) continue;
      fault.rank = place.rank;
      fault.node = place.node;
      break;
    }
    fault.hostname = Hostname(fault.node);
    fault.message =
        absl::StrCat("rank ", fault.rank, " on ", fault.hostname, " had not started when its time was up");
    return Fail(job, std::move(fault), now);
  }
  if (EndIfItsTimeIsUp(job, now)) return;
  CheckStalls(job, now);
}

// Also between two generations: one that is granted only to be ended at once helps nobody.
bool HeadState::EndIfItsTimeIsUp(Job& job, Instant now) {
  if (!job.Live() && !job.Wanting()) return false;
  Ending ending = Ending::kNone;
  std::string reason;
  if (job.spec.time_limit && RunTime(job, now) >= *job.spec.time_limit) {
    ending = Ending::kFail;
    reason = absl::StrCat("limits.time of ", PrintDuration(*job.spec.time_limit), " is over");
  } else if (job.record.end_with_client && !ClientWaits(job) &&
             now - job.client_seen >= config_.client_lease) {
    ending = Ending::kCancel;
    reason = "the client it should end with has gone silent";
  } else {
    return false;
  }
  if (job.Live()) {
    BeginEnding(job, ending, EndMode::kStop, job.spec.stop_grace, std::move(reason), now);
  } else {
    GT_PROBE("head.time_up_between_generations");
    Finish(job, ending == Ending::kFail ? JobState::kFailed : JobState::kCancelled, std::move(reason));
  }
  return true;
}

std::optional<Instant> HeadState::JobDeadline(const Job& job) const {
  std::optional<Instant> next;
  const auto sooner = [&](std::optional<Instant> other) {
    if (other) next = std::min(next.value_or(*other), *other);
  };
  sooner(job.fenced_at ? job.fenced_at : job.gone_deadline);
  sooner(job.Wanting() ? job.not_before : std::nullopt);
  for (const Instant until : job.avoided_until) sooner(until);
  if (!job.Live() && !job.Wanting()) return next;
  if (job.spec.time_limit && job.run_mark)
    sooner(*job.run_mark + (*job.spec.time_limit - job.record.run_time));
  if (job.record.end_with_client && !ClientWaits(job)) sooner(job.client_seen + config_.client_lease);
  if (!job.Live()) return next;
  sooner(job.start_deadline);
  sooner(LeaveDeadline(job));
  sooner(job.links_at);
  sooner(job.left_at);
  sooner(job.cause_at);
  sooner(StallDeadline(job));
  return next;
}

}  // namespace gtrain::core
