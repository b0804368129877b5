#include "runtime/core/head/newcomers.h"

#include <algorithm>
#include <csignal>
#include <iterator>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/probe.h"
#include "base/units.h"
#include "runtime/core/head/cells.h"
#include "runtime/core/head/faults.h"
#include "runtime/core/head/gang.h"
#include "runtime/core/head/job_life.h"
#include "runtime/core/head/placer.h"
#include "runtime/core/head/survivor_save.h"

namespace gtrain::core {
namespace {

constexpr absl::Duration kJoinBatch = absl::Seconds(10);
constexpr absl::Duration kTryAgain = absl::Seconds(15);
constexpr int kDoublingsMax = 6;
// A generation is given so long to make a step before it is re-formed, or the time of a few steps that are
// longer; where it stands still for a member that has not come up, kStillBy.
constexpr absl::Duration kStepBy = absl::Minutes(1), kStillBy = absl::Seconds(5);
// And its ranks, to stand still behind a step.
constexpr absl::Duration kPauseBy = absl::Seconds(30), kFewStepsMost = absl::Minutes(10);
constexpr int kFewSteps = 3;

WaitingRank* Find(Job& job, int number) {
  const size_t index = static_cast<size_t>(number) - job.ranks.size();
  return index < job.waiting.size() ? &job.waiting[index] : nullptr;
}

bool IsReady(const WaitingRank& one) { return !one.over && one.status.state == RankState::kJoined; }

// Only of a generation whose ranks all run and none of which is about to end by itself.
bool MayReform(const Job& job) {
  return job.Live() && job.record.state == JobState::kRunning && job.record.exits.empty() && !job.leave &&
         !SurvivorSave::IsOne(job);
}

// Whether this is the newest generation, and its processes were asked whether they can go on in the next one.
bool MayGoOn(const Job& job, Generation generation) {
  const bool reforms = job.record.ending == Ending::kReform || job.record.ending == Ending::kReplace;
  return job.spec.in_place && reforms && !job.Live() && !IsFinal(job.record.state) &&
         generation == job.record.generation;
}

// How many of those that wait are to join: not the spares.
int WantedOf(const Job& job) { return job.RanksOf(*job.record.grant) - job.record.grant->world_size; }

int OpenOf(const Job& job) {
  return static_cast<int>(std::ranges::count(job.waiting, false, &WaitingRank::over));
}

// Members that were started and have not come up: those that go on stand still for them. Where nobody goes on
// all load alike, and nothing is won.
int AbsentOf(const Job& job) {
  if (job.demand.unit != 1) return 0;  // one that waits has a part of its own
  if (job.going_on == 0) return 0;  // and all ranks of a job that starts would be looked at for each of them
  int absent = 0;
  for (size_t i = 0; i < job.ranks.size(); ++i) {
    const bool started = job.record.grant->ranks[i].process.generation.value == 0;
    absent += started && job.ranks[i].status.state != RankState::kJoined ? 1 : 0;
  }
  return absent < static_cast<int>(job.ranks.size()) ? absent : 0;
}

// Members that go on and are still in the step that the generation before began: until the last has come
// nobody computes in this one, and there is nothing to interrupt. Once: else who hangs there was never found.
bool AwaitsWhoGoesOn(const Job& job) {
  for (size_t i = 0; i < job.ranks.size(); ++i) {
    const bool goes_on = job.record.grant->ranks[i].process.generation.value != 0;
    if (goes_on && job.ranks[i].status.state != RankState::kJoined) return true;
  }
  return false;
}

// How many ranks of spares it should have.
int SparesOf(const Job& job) {
  if (!job.demand.count_nodes || job.Spares() == 0) return job.Spares();
  std::set<NodeId> nodes;
  for (const RankPlace& place : job.record.grant->ranks) nodes.insert(place.node);
  return job.Spares() * static_cast<int>(job.record.grant->ranks.size() / nodes.size());
}

// "rank 1 on a, rank 2 on b and 7 more"
std::string WhoText(const GenerationGrant& grant, const std::vector<int>& ranks, size_t named) {
  std::string who;
  for (size_t i = 0; i < std::min(ranks.size(), named); ++i) {
    const NodeId& node = grant.ranks[static_cast<size_t>(ranks[i])].node;
    const auto place = std::ranges::find(grant.nodes, node, &NodePlace::node);
    absl::StrAppend(&who, i > 0 ? ", rank " : "rank ", ranks[i], " on ",
                    place != grant.nodes.end() ? place->hostname : node.value);
  }
  if (ranks.size() > named) absl::StrAppend(&who, " and ", ranks.size() - named, " more");
  return who;
}

// The first spares are started as soon as the program is known to stay.
absl::Duration TryAgain(Job& job) {
  if (job.waiting.empty() && job.join_failures == 0) {
    ++job.join_failures;
    return absl::ZeroDuration();
  }
  return kTryAgain * (1 << std::min(job.join_failures++, kDoublingsMax));
}

absl::Duration FewSteps(const Job& job, absl::Duration least) {
  return std::clamp(kFewSteps * job.step_time, least, kFewStepsMost);
}

// Each generation makes a step: else those that go on would stand still for as long as others come.
std::optional<Instant> DueAt(const Job& job) {
  std::optional<Instant> due = job.join_at;
  if (due && !job.low_step && job.running_since) {
    const bool begun = AbsentOf(job) == 0 && (job.interrupted || !AwaitsWhoGoesOn(job));
    due = std::max(*due, *job.running_since + (begun ? FewSteps(job, kStepBy) : kStillBy));
  }
  if (due && job.pause_asked && job.ranks[0].status.pause == RankPause::kMay)
    due = std::max(*due, *job.pause_asked + FewSteps(job, kPauseBy));
  return due;
}

}  // namespace

void Newcomers::OnStatus(Job& job, const RankStatus& status, Instant now) {
  WaitingRank* one = Find(job, status.rank);
  if (one == nullptr || one->ended) return;
  const bool was_over = std::exchange(one->over, false), was_ready = IsReady(*one);
  one->status = status;
  if (IsReady(*one)) {
    job.stays = true;
    job.join_failures = 0;
    job.newcomer_ended.clear();
    job.hung.erase(ProcessOf(*job.record.grant, status.rank));  // late, and here
  }
  if (was_over || IsReady(*one) != was_ready) Consider(job, now);
}

// Ranks that have stood still in vain go on, and are asked anew.
void Newcomers::OnPause(Job& job, Instant now) {
  if (job.ranks[0].status.pause != RankPause::kPaused) job.pause_asked.reset();
  Consider(job, now);
}

// Asks them where that was not done yet. False: they stand still, or are not waited for.
bool Newcomers::AwaitsPause(Job& job, Instant now) {
  if (job.ranks[0].status.pause != RankPause::kMay) return false;
  if (!job.pause_asked) {
    GT_PROBE("head.asks_to_pause");
    job.pause_asked = now;
    context_.Send(job.record.grant->ranks[0].node, SendKind::kReply,
                  PauseRanks{model_.epoch(), job.record.id, job.record.generation});
  }
  return now < *job.pause_asked + FewSteps(job, kPauseBy);
}

void Newcomers::OnExit(Job& job, const RankExit& exit, Instant now) {
  WaitingRank* one = Find(job, exit.rank);
  if (one == nullptr || one->ended || !job.Live()) return;
  GT_PROBE("head.newcomer_ends");
  one->over = one->ended = true;
  const std::string why = faults_.FaultOf(job, exit).message;
  SayWhyLast(job, why);
  context_.Emit(
      job, "newcomer",
      absl::StrCat(why,
                   WantedOf(job) > 0 ? "; it came up to join the others, which go on" : "; it was a spare",
                   ". Its log: gtrain logs ", job.record.id.value, " --generation ",
                   job.record.generation.value, " --rank ", exit.rank));
  context_.Dirty(job);
  PlanAnew(job, now);
}

// In short, for as long as none has come up since.
void Newcomers::SayWhyLast(Job& job, const std::string& why) {
  constexpr size_t kBytes = 200;
  job.newcomer_ended = Shortened(why.substr(0, why.find('\n')), kBytes);
}

// Of what was planned with one that is gone.
void Newcomers::PlanAnew(Job& job, Instant now) {
  job.join_at.reset();
  job.no_room = false;
  job.pause_asked.reset();
  Consider(job, now);
}

void Newcomers::OnNodeLost(Job& job, const NodeId& node, Instant now) {
  bool any = false;
  for (size_t i = 0; i < job.waiting.size(); ++i) {
    if (job.record.grant->waiting[i].node != node || job.waiting[i].over) continue;
    any = job.waiting[i].over = true;
  }
  if (any) PlanAnew(job, now);
}

// What the node does not hold any more has ended, and an earlier head was told so.
void Newcomers::OnHeld(Job& job, const NodeId& node, const HeldGeneration& held, Instant now) {
  bool any = false;
  for (size_t i = 0; i < job.waiting.size(); ++i) {
    const int number = static_cast<int>(job.ranks.size() + i);
    const auto is_it = [&](const RankStatus& status) { return status.rank == number; };
    if (job.record.grant->waiting[i].node != node || std::ranges::any_of(held.live, is_it)) continue;
    any = any || !job.waiting[i].over;
    job.waiting[i].over = job.waiting[i].ended = true;
  }
  if (any) PlanAnew(job, now);
}

// A process that stands still, or has ended in that moment, is not among those that can go on. Its keeper
// ends it, and the next generation starts another one: without a word nobody would know why.
void Newcomers::OnGone(Job& job, const NodeId& node, const GenerationGone& gone) {
  if (!MayGoOn(job, gone.generation)) return;
  const GenerationGrant& grant = *job.record.grant;
  const auto goes_on = [&](int number) {
    const ProcessId process = ProcessOf(grant, number);
    return std::ranges::count(gone.kept, process) > 0 || std::ranges::count(gone.coming, process) > 0;
  };
  for (const RankPlace& place : grant.ranks) {
    if (place.node == node) job.ranks[static_cast<size_t>(place.rank)].silent = !goes_on(place.rank);
  }
  for (size_t i = 0; i < job.waiting.size(); ++i) {
    WaitingRank& one = job.waiting[i];
    const int number = static_cast<int>(job.ranks.size() + i);
    if (one.over || grant.waiting[i].node != node || goes_on(number)) continue;
    GT_PROBE("head.newcomer_is_silent");
    one.over = one.ended = true;
    context_.Emit(
        job, "newcomer",
        absl::StrCat("rank ", number, " on ", model_.Hostname(node),
                     WantedOf(job) > 0 ? ", which came up to join the others," : ", a spare,",
                     " did not answer when generation ", gone.generation.value,
                     " ended (it stood still, or has ended): another one is started. Its log: "
                     "gtrain logs ",
                     job.record.id.value, " --generation ", gone.generation.value, " --rank ", number));
    context_.Dirty(job);
  }
}

// A process that does not come up holds its room for nothing.
void Newcomers::GiveUpLate(Job& job, Instant now) {
  for (size_t i = 0; i < job.waiting.size(); ++i) {
    WaitingRank& one = job.waiting[i];
    if (one.over || IsReady(one) || now - one.since < job.spec.progress.startup) continue;
    GT_PROBE("head.newcomer_is_late");
    one.over = true;
    const int number = static_cast<int>(job.ranks.size() + i);
    job.hung.insert(ProcessOf(*job.record.grant, number));
    SayWhyLast(job, absl::StrCat("rank ", number, " had not come up within ",
                                 PrintDuration(job.spec.progress.startup)));
    context_.Emit(job, "newcomer",
                  absl::StrCat("rank ", number, " on ", model_.Hostname(job.record.grant->waiting[i].node),
                               " has not come up within ", PrintDuration(job.spec.progress.startup),
                               " (progress.startup): it is started anew"));
  }
}

Newcomers::Count Newcomers::CountOf(const Job& job) {
  Count count;
  for (const WaitingRank& one : job.waiting) {
    count.open += one.over ? 0 : 1;
    count.ready += IsReady(one) ? 1 : 0;
  }
  count.wanted = WantedOf(job);
  count.all_ready = count.ready == count.open;
  const int unit = job.demand.unit;
  if (unit == 1 || count.wanted == 0) return count;
  // Ranks join as whole copies of the model: one that waits for its partner is of no use yet.
  const GenerationGrant& grant = *job.record.grant;
  std::vector<std::optional<int>> ready, open;
  for (int number = 0; number < grant.world_size; ++number) ready.push_back(number % unit);
  open = ready;
  for (size_t i = 0; i < job.waiting.size(); ++i) {
    const std::optional<int>& cell = grant.waiting[i].cell;
    if (!job.waiting[i].over) open.push_back(cell);
    if (IsReady(job.waiting[i])) ready.push_back(cell);
  }
  const int most = job.RanksOf(grant) / unit;
  count.ready = CopiesOf(ready, unit, most) * unit - grant.world_size;
  count.open = CopiesOf(open, unit, most) * unit - grant.world_size;
  return count;
}

// Somebody who is ready is a member in the next generation. What still loads is ended then, so spares take
// the places of all of it or of none.
bool Newcomers::Joins(const Job& job, const Count& count) {
  if (count.ready == 0 || count.wanted > 0) return count.ready > 0;
  const int absent = AbsentOf(job);
  return absent > 0 && count.ready >= absent;
}

// Sets when the generation is to be re-formed, if at all.
void Newcomers::Plan(Job& job, const Count& count, Instant now) {
  const auto& [open, ready, wanted, all_ready] = count;
  // What restarts would lose more by being re-formed than a spare is worth.
  const bool lacks = wanted > 0 ? open == 0 : open < SparesOf(job) && job.ProcessesStay();
  const bool joins = Joins(job, count);
  if (lacks && !job.join_at) job.join_at = now + TryAgain(job);
  if (joins && !job.join_at) job.join_at = now + kJoinBatch;
  if (joins && (all_ready || ready >= wanted)) job.join_at = now;
  if (!lacks && !joins) job.join_at.reset(), job.pause_asked.reset();
}

void Newcomers::Consider(Job& job, Instant now) {
  if ((job.waiting.empty() && job.Spares() == 0) || !MayReform(job)) return;
  GT_PROBE("head.considers_newcomers");
  GiveUpLate(job, now);
  const Count count = CountOf(job);
  Plan(job, count, now);
  const bool joins = Joins(job, count);
  const std::optional<Instant> due = DueAt(job);
  if (!due || *due > now) return;
  if (!model_.AllAreHeard(job, context_.config().heartbeat_interval * 3, now)) {
    job.join_at = now + context_.config().heartbeat_interval;
  } else if (joins || HasRoom(job, count.open)) {
    if (AwaitsPause(job, now)) return;
    Join(job, joins ? std::min(count.ready, count.wanted > 0 ? count.wanted : AbsentOf(job)) : 0, now);
  } else {
    job.no_room = true;
    job.join_at = now + TryAgain(job);
  }
}

// Whether more could be started than are on their way.
bool Newcomers::HasRoom(const Job& job, int open) {
  placer_.CheckViews();
  const plan::Placement placement = placer_.PlacementFor(job);
  return placement.placed && std::ssize(placement.ranks) > job.record.grant->world_size + open;
}

void Newcomers::Join(Job& job, int ready, Instant now) {
  if (ready > 0) GT_PROBE("head.newcomers_join");
  if (ready == 0) GT_PROBE("head.newcomers_again");
  job.join_at.reset();
  job.no_room = false;
  job.interrupted = !job.low_step && AwaitsWhoGoesOn(job);
  std::string what =
      WantedOf(job) > 0 ? "ranks that were to join are started anew" : "spares are started beside the ranks";
  if (ready > 0) {
    what = WantedOf(job) > 0
               ? absl::StrCat(ready, ready == 1 ? " rank joins" : " ranks join", " the ", job.ranks.size(),
                              " that run")
               : absl::StrCat(ready, ready == 1 ? " spare takes the place" : " spares take the places",
                              " of what still loads");
  }
  life_.BeginEnding(job, Ending::kReplace, EndMode::kReform, context_.config().reform_grace, what, now);
}

std::optional<Instant> Newcomers::NextDeadline(const Job& job) const {
  std::optional<Instant> next;
  if (!MayReform(job)) return next;
  next = DueAt(job);
  for (const WaitingRank& one : job.waiting) {
    if (one.over || IsReady(one)) continue;
    const Instant late = one.since + job.spec.progress.startup;
    next = std::min(next.value_or(late), late);
  }
  return next;
}

// ---------------------------------------------------------------- for people

std::string PlacesText(const Job& job) {
  const GenerationGrant& grant = *job.record.grant;
  const std::string& placement = job.placement_reason;
  if (grant.waiting.empty()) return placement;
  const int ranks = grant.world_size, whole = job.RanksOf(grant), open = OpenOf(job);
  const std::string in_parentheses = placement.empty() ? "" : absl::StrCat(" (", placement, ")");
  const std::string run = absl::StrCat(ranks, ranks == 1 ? " rank" : " ranks");
  if (whole > ranks) {
    return absl::StrCat(ranks, " of ", whole, " ranks go on, ",
                        open > 0 ? "the others come up beside them" : "the others are to be started again",
                        in_parentheses);
  }
  if (open == 0) return absl::StrCat(run, ", nothing waits beside them now", in_parentheses);
  return absl::StrCat(run, ", ", open, open == 1 ? " spare" : " spares", in_parentheses);
}

namespace {

// Whole seconds, and never "in 0s"; empty: nothing is planned.
std::string NextTryText(const Job& job, Instant now) {
  const std::optional<Instant> due = DueAt(job);
  if (!due) return "";
  const absl::Duration left = absl::Ceil(std::max(*due - now, absl::Seconds(1)), absl::Seconds(1));
  return job.no_room
             ? absl::StrCat("there is no room for more beside the ranks now; it is looked for again in ",
                            PrintDuration(left))
             : absl::StrCat("the next one is started in ", PrintDuration(left), ", where there is room");
}

std::string LastText(const Job& job) {
  return job.newcomer_ended.empty() ? "" : absl::StrCat("; the last one: ", job.newcomer_ended);
}

}  // namespace

std::string NewcomersText(const Job& job, Instant now) {
  if (!job.Live() || WantedOf(job) <= 0 || OpenOf(job) > 0) return "";
  const std::string next = NextTryText(job, now);
  const int wanted = WantedOf(job);
  if (next.empty()) return "";
  return absl::StrCat("none of the ", wanted == 1 ? "one" : absl::StrCat(wanted),
                      " to join the ranks is on its way: ", next, LastText(job));
}

std::string SparesText(const Job& job, Instant now) {
  if (!job.Live() || job.Spares() == 0) return "";
  const int wanted = SparesOf(job), there = std::max(0, OpenOf(job) - WantedOf(job));
  if (there >= wanted) return "";
  const std::string count = absl::StrCat(there, " of ", wanted, wanted == 1 ? " waits: " : " wait: ");
  if (!job.ProcessesStay()) {
    return absl::StrCat(count,
                        "spares come once a rank has joined to stay, and a program that does not gets none");
  }
  if (job.Size() < job.demand.max) {
    return absl::StrCat(count, "spares come once the job has its most ",
                        job.demand.count_nodes ? "nodes, " : "ranks, ", job.demand.max,
                        ", and there is room for more");
  }
  const std::string next = MayReform(job) && WantedOf(job) <= 0 ? NextTryText(job, now) : "";
  if (next.empty())
    return absl::StrCat(count, "spares come when there is room beside the ranks, and these have made a step");
  return absl::StrCat(count, next, LastText(job));
}

std::string SilentText(const Job& job) {
  constexpr size_t kNamed = 6;
  if (!job.spec.in_place || !job.stays || !job.record.grant) return "";
  std::vector<int> silent;
  for (size_t i = 0; i < job.ranks.size(); ++i) {
    const int rank = static_cast<int>(i);
    const RankExit* exit = job.ExitOf(rank);
    // Who ends when it is told to has answered: what stands still is killed for that.
    const bool killed = exit != nullptr && exit->cause == ExitCause::kStopped && exit->signal == SIGKILL;
    const bool heard = exit != nullptr && !killed;
    if (job.ranks[i].silent && job.ranks[i].started && !heard &&
        !job.hung.contains(ProcessOf(*job.record.grant, rank)))
      silent.push_back(rank);
  }
  if (silent.empty()) return "";
  GT_PROBE("head.member_is_silent");
  const GenerationGrant& grant = *job.record.grant;
  const bool one = silent.size() == 1;
  return absl::StrCat(
      WhoText(grant, silent, kNamed), " did not answer when generation ", grant.generation.value,
      one ? " ended (it stood still, or has ended) and does not go on: another process takes its place"
          : " ended (they stood still, or have ended) and do not go on: others take their places",
      ". The log of rank ", silent[0], ": gtrain logs ", job.record.id.value, " --generation ",
      grant.generation.value, " --rank ", silent[0]);
}

// Ranks that have joined wait for all others in their first exchange. Behind it those that go on are soon in
// a collective, and what was started with the generation has loaded nothing yet.
std::string AwaitedText(const Job& job) {
  constexpr size_t kNamed = 6;
  if (!job.Live() || job.record.state != JobState::kRunning || job.top_step) return "";
  std::vector<int> absent, fresh;
  for (size_t i = 0; i < job.ranks.size(); ++i) {
    if (job.ranks[i].exit >= 0) continue;
    const int rank = static_cast<int>(i);
    if (job.ranks[i].status.state != RankState::kJoined) absent.push_back(rank);
    if (job.record.grant->ranks[i].process.generation.value == 0) fresh.push_back(rank);
  }
  const bool some_joined = absent.size() + job.record.exits.size() < job.ranks.size();
  const std::vector<int>& awaited = absent.empty() ? fresh : absent;
  if (awaited.empty() || !some_joined || (absent.empty() && job.going_on == 0)) return "";
  const std::string who = WhoText(*job.record.grant, awaited, kNamed);
  return absl::StrCat("no step in this generation so far",
                      job.record.last_step ? absl::StrCat(", the last was ", *job.record.last_step) : "",
                      ": the others wait for ", who,
                      !absent.empty()     ? ", not joined yet"
                      : fresh.size() == 1 ? ", which was started and loads, or gets the state"
                                          : ", which were started and load, or get the state");
}

}  // namespace gtrain::core
