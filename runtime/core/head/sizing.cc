// Jobs of `ranks: {min, max}` with another number of ranks than they should have: less than max, or than a
// person asked for with `gtrain scale`, or more than that. They are re-formed right behind a checkpoint, so
// that nothing of the training is lost, and without a charge.
//
// A job whose processes go on (`elastic.mode: in-place`) loses nothing either way, so it waits for no
// checkpoint, and for a shorter time. It does not grow while processes come up beside it: when they join
// there is another generation in any case.
//
// Without a person's wish, the room must have been there for `grow_after`, and no other job may be waiting
// for it: a machine that comes and goes would re-form the job each time, and a waiting job needs the room
// more. With a person's wish the job gets the room there is, whoever waits. A look costs a placement, O(nodes
// + jobs + ranks). When the free room of nodes changes, each job whose size is not the wanted one is due for
// a look, and they take turns, kLooksAtOnce of them each kLookEvery.
//
// A generation of another size is on trial until all of its ranks have started and one has reported a step,
// or a checkpoint is committed. If it fails before that, the job goes back to the size and the places that
// worked, without charge: the cause may be the size, or a machine that has just come. A machine on which a
// rank could not be started is avoided for a while. Likewise where the job would end because of what came up
// beside ranks that go on, and failed as a member before its first step: these go on without it. After growth
// the job then stays at that size for
// `grow_again_after`, doubling, and takes up no machines in whose present life the same has failed; a person
// may ask at any time. The size it stays at is stored as the one that is wanted, so that it outlives the
// head, which forgets that it was not a person's wish.
#include "runtime/core/head/sizing.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/probe.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "nlohmann/json.hpp"
#include "runtime/core/head/faults.h"
#include "runtime/core/head/gang.h"
#include "runtime/core/head/job_life.h"
#include "runtime/core/head/links.h"
#include "runtime/core/head/members.h"
#include "runtime/core/head/newcomers.h"
#include "runtime/core/head/placer.h"
#include "runtime/core/head/restart_policy.h"
#include "runtime/core/values/authority.h"

namespace gtrain::core {
namespace {

// A program that has never reported a step or a checkpoint works when all its ranks have run for so long.
constexpr absl::Duration kWorksAfter = absl::Minutes(1);
constexpr int kDoublingsMax = 4;
constexpr int kLooksAtOnce = 8;
constexpr absl::Duration kLookEvery = absl::Milliseconds(100);

// Limits beyond which no agent starts ranks on one machine (runtime/agent/node.cc knows more about its own,
// and has the last word).
constexpr uint64_t kRanksOfKeeperMax = 4096;
constexpr uint64_t kBytesOfRankLeast = uint64_t{4} << 20;

std::string Counted(int64_t count, absl::string_view things) {  // "1 rank", "2 ranks"
  return absl::StrCat(count, " ", count == 1 ? things.substr(0, things.size() - 1) : things);
}

absl::string_view ThingsOf(const Job& job) { return job.demand.count_nodes ? "nodes" : "ranks"; }

// Of a placement with room for spares: the ranks alone.
size_t RanksIn(const Job& job, const plan::Placement& placement) {
  if (!placement.placed) return 0;
  if (!job.demand.count_nodes) return std::min(placement.ranks.size(), static_cast<size_t>(job.demand.max));
  const std::set<NodeId> nodes(
      placement.nodes.begin(),
      placement.nodes.begin() + std::min<ptrdiff_t>(std::ssize(placement.nodes), job.demand.max));
  return static_cast<size_t>(std::ranges::count_if(
      placement.ranks, [&](const plan::RankSlot& slot) { return nodes.contains(slot.node); }));
}

// The loss of a machine says nothing about the size. A fault with a signature, such as a keeper that cannot
// be started, does.
bool MayBeOfTheSize(const FaultRecord& fault) {
  if (!Charged(fault.kind) || (fault.cause == ExitCause::kExited && fault.exit_code == kExitNoRestart))
    return false;
  return fault.kind != FaultKind::kInfrastructure || fault.cause == ExitCause::kStartFailed ||
         !fault.signature.empty();
}

// In what the job file counts: the ranks alone, whatever was to join them.
int SizeOfRanks(const Job& job, const GenerationGrant& grant) {
  if (!job.demand.count_nodes) return static_cast<int>(grant.ranks.size());
  std::set<NodeId> nodes;
  for (const RankPlace& place : grant.ranks) nodes.insert(place.node);
  return static_cast<int>(nodes.size());
}

// Whether the rank's program was not found. In a generation that ended, ranks that were merely not started
// any more count as failed to start, too, so the exit code decides.
bool NotFound(const RankExit& exit) {
  return (exit.cause == ExitCause::kStartFailed || exit.cause == ExitCause::kExited) &&
         exit.exit_code == kExitNotFound;
}

}  // namespace

Sizing::Sizing(HeadContext& context, HeadModel& model, Placer& placer, JobLife& life, Faults& faults,
               Links& links)
    : context_(context),
      model_(model),
      config_(context.config()),
      placer_(placer),
      life_(life),
      faults_(faults),
      links_(links) {}

// Whether `other` waits for room that another job might take. A job that would wait also on these machines
// alone does not, nor one that is between two generations and keeps its place, unless a machine of it is
// gone.
bool Sizing::NeedsRoom(const Job& other) const {
  if (!other.Wanting()) return false;
  if (!other.KeepsPlace() || !other.record.grant) return !other.sizing.never_fits;
  return std::ranges::any_of(other.record.grant->nodes, [&](const NodePlace& place) {
    const auto node = model_.nodes.find(place.node);
    return node == model_.nodes.end() || !node->second.Usable();
  });
}

// Why a machine would refuse the ranks placed on it, as far as the head can know; empty: it would not.
std::string Sizing::TooManyFor(const plan::Placement& placement) const {
  std::map<NodeId, uint64_t> ranks;
  for (const plan::RankSlot& slot : placement.ranks) ++ranks[slot.node];
  for (const auto& [id, count] : ranks) {
    const uint64_t bytes = model_.nodes.at(id).record.inventory.memory_bytes;  // 0: not known
    const uint64_t of_memory = bytes == 0 ? kRanksOfKeeperMax : bytes / kBytesOfRankLeast;
    const uint64_t most = std::min(kRanksOfKeeperMax, of_memory);
    if (count <= most) continue;
    const std::string why =
        of_memory < kRanksOfKeeperMax
            ? absl::StrCat("it has ", PrintBytes(bytes), " of memory, and a rank needs at least ",
                           PrintBytes(kBytesOfRankLeast))
            : absl::StrCat("a keeper serves at most ", kRanksOfKeeperMax);
    return absl::StrCat(Counted(static_cast<int64_t>(count), "ranks"), " are more than ", model_.Hostname(id),
                        " can hold, which is ", most, ": ", why);
  }
  return "";
}

// How many ranks it would have, re-formed now; 0: none that are a reason to.
int Sizing::RanksItWouldHave(const Job& job) {
  if (job.record.after_save != Ending::kNone) return 0;
  if (job.record.state != JobState::kRunning || !job.Live() || job.leave || job.Size() == job.demand.max)
    return 0;
  const bool grows = job.Size() < job.demand.max;
  if (grows && !job.sizing.asked) {
    for (const Job* other : model_.LiveJobs()) {
      if (NeedsRoom(*other)) return 0;
    }
  }
  placer_.CheckViews();
  const plan::Placement placement = placer_.PlacementFor(job);
  const size_t ranks = RanksIn(job, placement);
  const size_t now = static_cast<size_t>(job.RanksOf(*job.record.grant));
  if (grows ? ranks <= now : ranks >= now) return 0;
  return TooManyFor(placement).empty() ? static_cast<int>(ranks) : 0;
}

// With a thousand such jobs a pass over all of them would hold up heartbeats for a second, and healthy nodes
// would be called dead.
void Sizing::LookAround(Instant now) {
  int looks = 0;
  for (; looks_owed_ > 0 && looks < kLooksAtOnce && !model_.live_jobs.empty(); --looks_owed_) {
    auto next = model_.live_jobs.upper_bound(looked_at_);
    if (next == model_.live_jobs.end()) next = model_.live_jobs.begin();
    looked_at_ = next->first;
    Job& job = *next->second;
    const bool running = job.record.state == JobState::kRunning && job.Live();
    if (running && (job.sizing.failed || job.Size() != job.demand.max)) ++looks;
    LookForRoom(job, now);
  }
  if (model_.live_jobs.empty()) looks_owed_ = 0;
  next_look_ = looks_owed_ > 0 ? std::optional(now + kLookEvery) : std::nullopt;
}

void Sizing::LookForRoom(Job& job, Instant now) {
  MayGrowAgain(job, now);
  if (RanksItWouldHave(job) == 0) return job.sizing.room_since.reset();
  if (job.sizing.room_since) return;
  job.sizing.room_since = now;
  if (job.Size() > job.demand.max) return;
  GT_PROBE("head.room_to_grow");
  context_.Emit(job, "room",
                absl::StrCat("there is room for more ranks: it grows ",
                             job.ProcessesStay() ? "in place" : "behind a checkpoint"));
}

// Not while others come up: with them it is re-formed in any case, and takes all the room there is then.
// Each generation makes a step before the next, as in newcomers.cc.
std::optional<Instant> Sizing::GrowsInPlaceAt(const Job& job) const {
  if (!job.sizing.room_since || !job.Live() || job.record.state != JobState::kRunning || !job.low_step ||
      job.Size() >= job.demand.max || job.leave || !job.ProcessesStay())
    return std::nullopt;
  if (job.coming_up > 0 && std::ranges::any_of(job.waiting, [](const WaitingRank& one) { return !one.over; }))
    return std::nullopt;
  return std::max(*job.sizing.room_since + config_.grow_in_place_after, job.sizing.look_again_at);
}

void Sizing::GrowInPlace(Job& job, Instant now) {
  const std::optional<Instant> at = GrowsInPlaceAt(job);
  if (!at || now < *at) return;
  job.sizing.look_again_at = now + config_.heartbeat_interval;
  if (!model_.AllAreHeard(job, config_.heartbeat_interval * 3, now)) return;
  if (RanksItWouldHave(job) == 0) return job.sizing.room_since.reset();
  GT_PROBE("head.grows_in_place");
  Resize(job, now);
}

// A checkpoint of this generation has just been committed.
void Sizing::ResizeBehindCheckpoint(Job& job, Instant now) {
  const bool asked = job.sizing.asked || job.Size() > job.demand.max;
  if (!asked && !job.sizing.room_since) {
    return OweLooks();  // it has just begun, and nothing has changed since
  }
  LookForRoom(job, now);
  if (!job.sizing.room_since) return;
  if (asked || now - *job.sizing.room_since >= config_.grow_after) Resize(job, now);
}

void Sizing::Resize(Job& job, Instant now) {
  job.sizing.at_once = false;
  const int ranks = RanksItWouldHave(job);
  if (ranks == 0) return;
  GT_PROBE("head.resizes");
  const size_t had = static_cast<size_t>(job.RanksOf(*job.record.grant));
  FaultRecord fault;
  fault.kind = FaultKind::kPreempted;
  fault.cause = ExitCause::kStopped;
  fault.message = absl::StrCat(static_cast<size_t>(ranks) > had ? kGrows : kShrinks, had, " to ",
                               Counted(ranks, "ranks"));
  if (job.checkpoint && !job.ProcessesStay())
    absl::StrAppend(&fault.message, ", from the checkpoint of step ", job.checkpoint->step);
  KeepWhatWorked(job, now);
  // All of its ranks run, and nothing is known that got further.
  if (job.GrantOf(job.sizing.worked) == nullptr && !job.record.saves)
    job.sizing.worked = job.record.generation;
  faults_.Fail(job, std::move(fault), now);
  // Of the generation that follows, whatever this one had come to; what had too few ranks is whole again.
  job.sizing.planned = !job.record.saves;
}

// ---------------------------------------------------------------- what does not work

void Sizing::KeepWhatWorked(Job& job, Instant now) {
  if (job.record.saves) return;  // with too few, which is nothing to go back to
  // Of what it should have some are on their way: it has the size that worked, less what was lost.
  if (job.RanksOf(*job.record.grant) > job.record.grant->world_size) return;
  const bool speaks = job.checkpoint || job.record.last_step;
  const bool runs = job.record.state == JobState::kRunning;
  const bool silent = !speaks && job.progress_at && now - *job.progress_at >= kWorksAfter;
  if (!job.checkpointed && !(runs && (job.top_step || silent))) return;
  job.sizing.worked = job.record.generation;
  job.sizing.planned = false;
}

// The generation that has just ended was on trial and failed: all of its exits are here.
bool Sizing::GoesBack(Job& job, Instant now) {
  const GenerationGrant* worked = job.GrantOf(job.sizing.worked);
  if (worked == nullptr || worked->generation == job.record.generation) return false;
  const size_t had = worked->ranks.size(), failed = job.record.grant->ranks.size();
  if (!(job.sizing.planned || failed > had) || !MayBeOfTheSize(job.record.faults.back())) return false;
  GT_PROBE("head.goes_back");
  GoBackTo(job, *worked, now);
  return true;
}

// Members of the generation before, which have in memory what was trained and wait for the next one.
std::vector<const RankPlace*> Sizing::SurvivorsOf(const Job& job, const GenerationGrant& before) {
  std::set<ProcessId> wait;
  for (const auto& [node, there] : job.kept) wait.insert(there.begin(), there.end());
  const std::set<ProcessId> were = MembersOfGrant(before);
  std::vector<const RankPlace*> survivors;
  for (const RankPlace& place : job.record.grant->ranks) {
    const ProcessId process = ProcessOf(*job.record.grant, place.rank);
    if (wait.contains(process) && were.contains(process) && !job.hung.contains(process))
      survivors.push_back(&place);
  }
  return survivors;
}

bool Sizing::MayGoOnAlone(const Job& job) {
  const GenerationGrant* before = job.GrantOf(Generation{job.record.generation.value - 1});
  // What is a whole copy of a mesh, or a whole node, is not known here.
  return before != nullptr && job.record.last_step && job.demand.unit == 1 && !job.demand.count_nodes &&
         std::ssize(SurvivorsOf(job, *before)) >= job.demand.min;
}

// The others have in memory what was trained, and have shown that they can go on without it. Each time there
// are fewer of them, so that this ends.
bool Sizing::GoesOnWithoutNewcomer(Job& job, Instant now) {
  const JobRecord& record = job.record;
  const FaultRecord& fault = record.faults.back();
  const GenerationGrant* before = job.GrantOf(Generation{record.generation.value - 1});
  if (before == nullptr || fault.rank < 0 || job.top_step || !record.last_step) return false;
  if (!MayBeOfTheSize(fault) || fault.kind == FaultKind::kInfrastructure) return false;
  if (MembersOfGrant(*before).contains(ProcessOf(*record.grant, fault.rank))) return false;
  const std::vector<const RankPlace*> survivors = SurvivorsOf(job, *before);
  if (survivors.empty() || survivors.size() >= record.grant->ranks.size()) return false;
  if (MayGoOnAlone(job)) {
    GT_PROBE("head.goes_on_without_newcomer");
    GoBack(job, survivors, static_cast<int>(survivors.size()), now);
    return true;
  }
  // Nodes, or copies of a mesh: those that were there before, if they were fewer.
  if (before->ranks.size() >= record.grant->ranks.size() || SizeOfRanks(job, *before) < job.demand.min)
    return false;
  if (job.demand.unit == 1 && !job.demand.count_nodes) return false;
  GT_PROBE("head.goes_on_without_newcomer");
  GoBackTo(job, *before, now);
  return true;
}

void Sizing::GoBackTo(Job& job, const GenerationGrant& worked, Instant now) {
  std::vector<const RankPlace*> places;
  for (const RankPlace& place : worked.ranks) places.push_back(&place);
  const int size = SizeOfRanks(job, worked);
  job.sizing.worked = worked.generation;
  job.sizing.goes_back = true;
  GoBack(job, places, size, now);
}

// Goes back to this size, and to these places. The fault is that of the generation that has just ended.
void Sizing::GoBack(Job& job, const std::vector<const RankPlace*>& places, int size, Instant now) {
  JobSizing& sizing = job.sizing;
  FaultRecord& fault = job.record.faults.back();
  const size_t had = places.size(), failed = job.record.grant->ranks.size();
  std::set<NodeId> known;  // they stay, and those that are avoided now
  for (const RankPlace* place : places) known.insert(place->node);
  const auto avoid = [&](const NodeId& id, const FaultRecord& why) {
    links_.Avoid(job, id,
                 absl::StrCat("avoided by this job for ", PrintDuration(config_.avoid_for),
                              ", to which it was new: ", why.message),
                 now);
  };
  if ((fault.cause == ExitCause::kStartFailed || fault.kind == FaultKind::kInfrastructure) &&
      !fault.node.value.empty() && known.insert(fault.node).second) {
    avoid(fault.node, fault);
  }
  for (const RankExit& exit : job.record.exits) {
    const NodeId& id = job.record.grant->ranks[exit.rank].node;
    if (NotFound(exit) && known.insert(id).second) avoid(id, faults_.FaultOf(job, exit));
  }
  std::string after;
  if (failed > had) {
    std::vector<NodeId> nodes;
    for (const NodePlace& place : job.record.grant->nodes) nodes.push_back(place.node);
    // Where it goes back again before it has grown, `size_wanted` is what the first time made of it.
    if (!sizing.failed) sizing.wish = job.record.size_wanted;
    sizing.failed = Tried(failed, nodes);
    const absl::Duration wait = config_.grow_again_after * (1 << std::min(sizing.failures++, kDoublingsMax));
    sizing.again_at = now + wait;
    after = absl::StrCat("; for ", PrintDuration(wait), " it does not grow by itself");
  }
  Want(job, size);
  sizing.asked = sizing.at_once = sizing.planned = false;
  context_.Dirty(job);
  fault.message = Shortened(
      absl::StrCat(kGoesBack, Counted(static_cast<int64_t>(had), "ranks"), ": ", fault.message), 2 << 10);
  fault.kind = FaultKind::kPreempted;
  fault.node = NodeId();
  fault.signature.clear();
  life_.Move(job, JobState::kReconfiguring, absl::StrCat(fault.message, "; not charged", after));
}

void Sizing::Want(Job& job, int size) {
  job.record.size_wanted = size;
  life_.TakeSpec(job, job.spec);
}

SizeTried Sizing::Tried(size_t ranks, const std::vector<NodeId>& nodes) const {
  SizeTried tried{ranks, {}};
  for (const NodeId& id : nodes) {
    if (const auto node = model_.nodes.find(id); node != model_.nodes.end())
      tried.nodes[id] = node->second.record.incarnation;
  }
  return tried;
}

// The job never grows to a size that has failed: without another size or another machine it would fail again.
void Sizing::MayGrowAgain(Job& job, Instant now) {
  JobSizing& sizing = job.sizing;
  if (!sizing.failed || now < sizing.again_at || job.record.state != JobState::kRunning || !job.Live())
    return;
  const int size = job.record.size_wanted;
  Want(job, sizing.wish);
  placer_.CheckViews();
  const plan::Placement placement = placer_.PlacementFor(job);
  const size_t ranks = RanksIn(job, placement);
  const bool grows = ranks > job.record.grant->ranks.size();
  if (!grows || Tried(ranks, placement.nodes) == *sizing.failed) return Want(job, size);
  GT_PROBE("head.may_grow_again");
  sizing.failed.reset();
  context_.Dirty(job);
  context_.Emit(job, "room", "it may grow again: there is other room than that in which it failed");
  SayHowItRuns(job);
}

// ---------------------------------------------------------------- for people

// False: all machines of this cluster are here, and would not hold more ranks of it if nothing else ran.
bool Sizing::CouldGrow(const Job& job) {
  const auto usable =
      std::ranges::count_if(model_.nodes, [](const auto& node) { return node.second.Usable(); });
  if (!config_.expected_nodes || usable < *config_.expected_nodes) return true;
  const plan::Placement most = placer_.PlacementAlone(job);
  return most.placed && most.ranks.size() > job.record.grant->ranks.size();
}

// Describes the pending change of the job's size; empty: there is none.
std::string Sizing::PendingText(const Job& job) {
  const int size = job.Size(), wanted = job.demand.max;
  if (job.record.after_save != Ending::kNone)
    return absl::StrCat("; then it ends: ", job.record.after_save_reason);
  if (job.record.saves) return "";
  if (job.sizing.failed) {
    return absl::StrCat("; it does not grow by itself for now: with ",
                        Counted(static_cast<int64_t>(job.sizing.failed->ranks), "ranks"), " it failed");
  }
  if (size == wanted) return "";
  const bool stays = job.ProcessesStay();
  if (job.record.size_wanted > 0 && stays && size < wanted) {
    return absl::StrCat("; wants ", Counted(wanted, ThingsOf(job)), " once there has been room for ",
                        PrintDuration(config_.grow_in_place_after));
  }
  if (job.record.size_wanted > 0) {
    return absl::StrCat("; wants ", Counted(wanted, ThingsOf(job)), " behind its next checkpoint",
                        size < wanted ? ", if there is room" : "",
                        job.checkpoint ? "" : "; it has committed none so far",
                        stays ? " (`gtrain scale --now` waits for none, and loses nothing in place)"
                        : !job.checkpoint ? " (`gtrain scale --now` waits for none)"
                                          : "");
  }
  if (!CouldGrow(job)) return "";
  if (stays) return "; it grows once there is room";
  return job.checkpoint ? "; it grows behind a checkpoint once there is room"
                        : "; it grows once there is room, behind a checkpoint: it has committed none so far";
}

std::string Sizing::RunningReason(const Job& job) {
  const std::string where = !job.placement_reason.empty()
                                ? PlacesText(job)
                                : Counted(static_cast<int64_t>(job.record.grant->ranks.size()), "ranks");
  return where + PendingText(job);
}

void Sizing::SayHowItRuns(Job& job) {
  if (job.Live() && job.record.state == JobState::kRunning && !job.leave)
    life_.Move(job, JobState::kRunning, RunningReason(job));
}

absl::Status Sizing::MayHaveSize(const Job& job, const plan::Demand& whole, int size) const {
  const std::string& id = job.record.id.value;
  const absl::string_view things = whole.count_nodes ? "nodes" : "ranks";
  if (size < whole.min || size > whole.max) {
    return absl::InvalidArgumentError(whole.min == whole.max
                                          ? absl::StrCat("the job file of ", id, " says `", things, ": ",
                                                         whole.min, "`: only what says `", things,
                                                         ": {min: A, max: B}` can change while it runs")
                                          : absl::StrCat("the job file of ", id, " allows ", whole.min,
                                                         " to ", whole.max, " ", things, ", not ", size));
  }
  // Anything else would never be placed again: a mesh has whole units only.
  const int64_t ranks = int64_t{size} * (whole.count_nodes ? whole.ranks_per_node.value_or(0) : 1);
  if (ranks % whole.unit != 0) {
    return absl::InvalidArgumentError(absl::StrCat("the mesh of ", id, " takes ranks in units of ",
                                                   whole.unit, "; ", Counted(size, things),
                                                   " are no multiple of that: ask for another number"));
  }
  return absl::OkStatus();
}

// Tells the person who asked for a size how the job stands.
std::string Sizing::ScaleAnswer(const Job& job, const plan::Demand& whole, const plan::Placement& placement,
                                const ClientScale& scale, int size, bool starts) const {
  const JobRecord& record = job.record;
  const size_t room = !placement.placed ? 0
                      : whole.count_nodes
                          ? std::min(placement.nodes.size(), static_cast<size_t>(job.demand.max))
                          : RanksIn(job, placement);
  const bool in_place = job.ProcessesStay();
  const std::string when =
      size > 0 && !job.Live()        ? "at once"
      : !job.Live()                  ? in_place ? "with its next generation" : "at its next start"
      : job.Size() == job.demand.max ? job.RanksOf(*record.grant) > record.grant->world_size
                                           ? "when those that wait beside the ranks have joined them"
                                           : "has them"
      : scale.now && starts          ? "as soon as all its ranks run"
      : in_place && job.Size() < job.demand.max
          ? absl::StrCat("once there has been room for ", PrintDuration(config_.grow_in_place_after))
          : "behind its next checkpoint";
  return nlohmann::json(
             {{"job", record.id.value},
              {"counts", whole.count_nodes ? "nodes" : "ranks"},
              {"size", size},
              {"wanted", scale.size},
              {"room", room},
              {"checkpoint", job.checkpoint ? nlohmann::json(job.checkpoint->step) : nlohmann::json(nullptr)},
              {"in_place", in_place},
              {"when", when}})
      .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

absl::StatusOr<std::string> Sizing::Scale(const Peer& peer, const ClientScale& scale, Instant now) {
  Job* job = model_.FindJob(scale.job);
  if (job == nullptr) return absl::InvalidArgumentError("the request names no job");
  JobRecord& record = job->record;
  if (IsFinal(record.state) || (record.ending != Ending::kNone && record.ending != Ending::kReform &&
                                record.ending != Ending::kReplace)) {
    return absl::FailedPreconditionError(
        absl::StrCat(record.id.value, " is over or ending: ", Name(record.state), ", ", record.reason));
  }
  const plan::Demand whole = DemandOf(job->spec, config_.local);
  GT_RETURN_IF_ERROR(MayHaveSize(*job, whole, scale.size));
  const int before = record.size_wanted;
  Want(*job, scale.size);
  placer_.CheckViews();
  const plan::Placement placement = placer_.PlacementFor(*job);
  const std::string too_many = TooManyFor(placement);
  if (!too_many.empty()) {
    GT_PROBE("head.scale_refused");
    Want(*job, before);
    return absl::InvalidArgumentError(absl::StrCat(too_many, ". Ask for fewer, or use more machines"));
  }
  job->sizing.asked = !job->Live() || job->Size() != job->demand.max;
  job->sizing.at_once = scale.now;
  job->sizing.failed.reset();
  job->sizing.failures = 0;
  job->sizing.room_since.reset();
  model_.schedule = true;
  context_.Dirty(*job);
  const absl::string_view things = whole.count_nodes ? "nodes" : "ranks";
  context_.Emit(*job, "scale", absl::StrCat(OwnerName(peer), " asks for ", Counted(scale.size, things)));
  const int size = job->Live() ? SizeOfRanks(*job, *record.grant) : 0;
  const bool starts = job->Live() && record.state != JobState::kRunning;
  if (scale.now && job->Live() && !starts) Resize(*job, now);
  SayHowItRuns(*job);
  return ScaleAnswer(*job, whole, placement, scale, size, starts);
}

}  // namespace gtrain::core
