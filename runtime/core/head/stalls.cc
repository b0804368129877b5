// Jobs that stand still. Two verdicts, each said once and taken back when it does not hold any more:
//
//   no step   the ranks report steps, and the slowest made none for `progress.stall`. It brings the stacks of
//             all ranks into events.jsonl, and ends the generation where `on_stall: kill` says so.
//   stuck     whatever the program is: for `progress.stall` no rank has written or used the processor
//             (agent/idleness.cc). A state for people, never a reason to end anything: a program may well
//             wait.
//
// Whom to look at first: steps tell it where all ranks report them. Else a rank that waits for something of
// its own (a sleep, a disk, a child) is likelier to be the cause than those that wait in a lock, a poll or a
// read of a socket, as ranks in a collective do.
#include "runtime/core/head/stalls.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/probe.h"
#include "base/units.h"
#include "runtime/core/head/faults.h"
#include "runtime/core/head/queries.h"

namespace gtrain::core {
namespace {

bool WaitsForOthers(absl::string_view function) {
  constexpr std::array kWaits = {"futex",      "poll", "select", "sk_wait",
                                 "wait_woken", "recv", "stream", "accept"};
  return std::ranges::any_of(kWaits, [&](const char* part) { return absl::StrContains(function, part); });
}

// Ranks that wait in the same function of the kernel.
struct Waiting {
  std::string function;
  std::vector<int> ranks;
};

// The likeliest cause first.
std::vector<Waiting> WaitingRanks(const Job& job) {
  std::map<std::string, std::vector<int>> by_function;
  for (size_t i = 0; i < job.ranks.size(); ++i) {
    const RankLive& rank = job.ranks[i];
    if (rank.exit < 0 && rank.idle_since && !rank.status.blocked_in.empty())
      by_function[rank.status.blocked_in].push_back(static_cast<int>(i));
  }
  std::vector<Waiting> all;
  for (auto& [function, ranks] : by_function) all.push_back({function, std::move(ranks)});
  std::ranges::stable_sort(
      all, {}, [](const Waiting& one) { return std::pair(WaitsForOthers(one.function), one.ranks.size()); });
  return all;
}

// Nobody, where all wait alike.
std::optional<int> Suspect(const std::vector<Waiting>& waiting) {
  if (waiting.size() < 2) return std::nullopt;
  const bool stands_out = WaitsForOthers(waiting[0].function) != WaitsForOthers(waiting[1].function) ||
                          waiting[0].ranks.size() < waiting[1].ranks.size();
  return stands_out ? std::optional(waiting[0].ranks[0]) : std::nullopt;
}

// "rank 0", "ranks 0-3, 7".
std::string RanksText(const std::vector<int>& ranks) {
  constexpr size_t kStretchesShown = 6;
  std::vector<std::string> stretches;
  for (size_t i = 0; i < ranks.size();) {
    size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    stretches.push_back(end == i + 1 ? absl::StrCat(ranks[i]) : absl::StrCat(ranks[i], "-", ranks[end - 1]));
    i = end;
  }
  const bool cut = stretches.size() > kStretchesShown;
  if (cut) stretches.resize(kStretchesShown);
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(stretches, ", "),
                      cut ? ", ..." : "");
}

// A generation in which processes go on begins with what they have: who is new to it has loaded before, and
// gets the state before its first step. So that is not what `startup` is for.
absl::Duration StallLimit(const Job& job) {
  constexpr int kHandOver = 10;  // limits, in place of one
  const spec::Progress& progress = job.spec.progress;
  if (job.low_step) return progress.stall;
  return job.going_on > 0 ? std::min(progress.startup, kHandOver * progress.stall) : progress.startup;
}

std::string WaitText(const Waiting& waiting) {
  const std::string verb = absl::StartsWith(waiting.function, "stopped ") ? "" : "blocked in ";
  return absl::StrCat(waiting.ranks.size() == 1 ? " is " : " are ", verb, waiting.function);
}

}  // namespace

Stalls::Stalls(HeadContext& context, HeadModel& model, Faults& faults, Queries& queries)
    : context_(context), model_(model), config_(context.config()), faults_(faults), queries_(queries) {}

// Ranks that step together are heard of within a heartbeat or two of each other: at the end of the limit,
// some may have stepped in time whose word is still on its way.
Instant Stalls::StallVerdictAt(const Job& job) const {
  return *job.progress_at + StallLimit(job) + 2 * config_.heartbeat_interval;
}

void Stalls::CheckStalls(Job& job, Instant now) {
  if (!job.Live() || job.record.state != JobState::kRunning || !job.progress_at) return;
  CheckStuck(job, now);
  CheckSource(job, now);
  CheckSteps(job, now);
}

std::optional<Instant> Stalls::NextDeadline(const Job& job) const {
  std::optional<Instant> next;
  const auto sooner = [&](Instant other) { next = std::min(next.value_or(other), other); };
  if (job.record.state != JobState::kRunning || !job.progress_at) return next;
  const spec::Progress& progress = job.spec.progress;
  if (!job.stalled && (job.low_step || !progress.step.empty() || progress.on_stall == spec::OnStall::kKill))
    sooner(StallVerdictAt(job));
  if (job.AllIdle() && !job.stuck) sooner(job.idle_from + progress.stall);
  if (const auto at = SourceVerdictAt(job)) sooner(*at);
  return next;
}

// ---------------------------------------------------------------- no output and no processor time

void Stalls::CountIdle(Job& job, RankLive& rank, Instant now) {
  const bool before = rank.idle_since.has_value(), idle = rank.status.idle > absl::ZeroDuration();
  job.idle += static_cast<int>(idle) - static_cast<int>(before);
  if (!idle) {
    rank.idle_since.reset();
    if (job.stuck) CheckStuck(job, now);
  } else if (!before) {
    rank.idle_since = now - rank.status.idle;
    job.idle_from = std::max(job.idle_from, *rank.idle_since);
  }
}

void Stalls::CheckStuck(Job& job, Instant now) {
  if (!job.AllIdle()) {
    if (!job.stuck) return;
    job.stuck.reset();
    if (!job.low_step) context_.Emit(job, "stall", "goes on: ranks write or use the processor again");
    return context_.Dirty(job);
  }
  if (job.stuck || now < job.idle_from + job.spec.progress.stall) return;
  GT_PROBE("head.job_stuck");
  job.stuck = StallVerdict{job.idle_from, WhoWaits(job)};
  if (job.low_step) return;  // the other verdict says it
  context_.Emit(job, "stall", StuckText(job, now));
  context_.Dirty(job);
}

// "rank 0 on gpu-1 is blocked in hrtimer_nanosleep, ranks 1-3 are blocked in do_poll".
std::string Stalls::WhoWaits(const Job& job) const {
  constexpr size_t kGroupsShown = 4;
  const std::vector<Waiting> waiting = WaitingRanks(job);
  if (waiting.empty()) return "where the ranks wait cannot be seen";
  std::vector<std::string> parts;
  for (const Waiting& one : waiting) {
    const std::string host =
        one.ranks.size() == 1
            ? absl::StrCat(" on ",
                           model_.Hostname(job.record.grant->ranks[static_cast<size_t>(one.ranks[0])].node))
            : "";
    const bool all = waiting.size() == 1 && one.ranks.size() == job.ranks.size() && one.ranks.size() > 1;
    parts.push_back(absl::StrCat(
        all ? absl::StrCat("all ", one.ranks.size(), " ranks") : RanksText(one.ranks), host, WaitText(one)));
    if (parts.size() == kGroupsShown) break;
  }
  std::string text = absl::StrJoin(parts, ", ");
  if (waiting.size() > kGroupsShown) text += ", others elsewhere";
  absl::StrAppend(&text, "; `gtrain stack ", job.record.id.value, " --rank ",
                  Suspect(waiting).value_or(waiting[0].ranks[0]), "` shows more");
  return text;
}

// Describes the stall of the job now; empty: it does not seem stuck.
std::string StuckText(const Job& job, Instant now) {
  const auto& verdict = job.stuck ? job.stuck : job.stalled;
  if (!verdict) return "";
  return absl::StrCat("seems stuck: ", job.stuck ? "no output and no CPU" : "no step", " for ",
                      PrintDuration(absl::Floor(now - verdict->since, absl::Seconds(1))), "; ",
                      verdict->text);
}

// ---------------------------------------------------------------- nothing tells steps

// A limit that a person wrote and that measures nothing. Whether a program uses $GTRAIN_REPORT only shows
// when it has; one that has joined with the SDK is given the time it has to its first step.
std::optional<Instant> Stalls::SourceVerdictAt(const Job& job) const {
  const spec::Progress& progress = job.spec.progress;
  if (progress.stall == spec::Progress().stall || !progress.step.empty() || job.top_step ||
      job.rank_notes.contains(kProgressNote)) {
    return std::nullopt;
  }
  return *job.progress_at + (job.record.sdk ? progress.startup : progress.stall);
}

void Stalls::CheckSource(Job& job, Instant now) {
  const auto at = SourceVerdictAt(job);
  if (!at || now < *at) return;
  const std::string text = absl::StrCat("progress.stall: ", PrintDuration(job.spec.progress.stall),
                                        " measures no steps, since no rank has reported one: give "
                                        "progress.step a pattern of the lines that tell "
                                        "the step, or write {\"step\": N} to $GTRAIN_REPORT, or use the SDK. "
                                        "Until then only a job that neither "
                                        "writes nor uses the processor for that long is said to be stuck");
  job.rank_notes[kProgressNote] = text;
  context_.Emit(job, "warning", text);
  context_.Dirty(job);
}

// ---------------------------------------------------------------- no step

// The rank to look at first, and why.
std::pair<int, std::string> Stalls::Culprit(const Job& job) const {
  int lowest = -1;
  bool differ = false, silent = false, reported = false;
  const auto order = [&](int r) {
    const RankStatus& status = job.ranks[static_cast<size_t>(r)].status;
    return std::pair(status.step.value_or(-1), status.collective_sequence);
  };
  const auto reports = [&](int r) { return job.ranks[static_cast<size_t>(r)].status.step.has_value(); };
  for (int i = 0; i < static_cast<int>(job.ranks.size()); ++i) {
    if (job.ExitOf(i) != nullptr) continue;
    (reports(i) ? reported : silent) = true;
    differ = differ || (lowest >= 0 && order(i) != order(lowest));
    // A rank that never says a step is not behind those that do: often one rank alone speaks.
    if (lowest < 0 || reports(i) > reports(lowest) ||
        (reports(i) == reports(lowest) && order(i) < order(lowest)))
      lowest = i;
  }
  if (lowest < 0) return {-1, ""};
  const auto named = [&](int rank) {
    return absl::StrCat("rank ", rank, " on ",
                        model_.Hostname(job.record.grant->ranks[static_cast<size_t>(rank)].node));
  };
  const std::optional<int64_t> step = job.ranks[static_cast<size_t>(lowest)].status.step;
  const bool some_silent = silent && reported;
  if (!differ || some_silent) {
    const std::vector<Waiting> waiting = WaitingRanks(job);
    if (const auto suspect = Suspect(waiting)) return {*suspect, WhoWaits(job)};
    if (some_silent) {
      return {lowest, absl::StrCat(named(lowest), " made the last known step, ", *step,
                                   "; which rank is behind cannot be told, since others report no steps")};
    }
  }
  return {lowest, absl::StrCat(named(lowest), " is furthest behind (step ",
                               step ? absl::StrCat(*step) : "none", ")")};
}

// Only programs that report steps can stall so; `startup` also covers those that said they would report. The
// verdict asks for the stacks of every rank (fault P16), of the culprit with debuggers; a kill waits for
// them, at most config_.query_timeout.
void Stalls::CheckSteps(Job& job, Instant now) {
  const spec::Progress& progress = job.spec.progress;
  if (!job.low_step && progress.step.empty() && progress.on_stall != spec::OnStall::kKill) return;
  const absl::Duration limit = StallLimit(job);
  if (now < StallVerdictAt(job)) return;
  const auto [culprit, who] = Culprit(job);
  if (culprit < 0) return;
  const std::string text =
      absl::StrCat("no ", job.low_step ? "step" : "first step", " for ", PrintDuration(limit), "; ", who);
  if (!job.stalled) {
    job.stalled = StallVerdict{*job.progress_at, who};
    context_.Emit(job, "stall", text);
    context_.Dirty(job);
    queries_.AskStacks(job, culprit, now);
  }
  if (progress.on_stall != spec::OnStall::kKill) return;
  if (queries_.AwaitsStacks(job.record.id)) return;
  GT_PROBE("head.stall_kill");
  FaultRecord fault;
  fault.kind = FaultKind::kCrash;
  fault.rank = culprit;
  fault.node = job.record.grant->ranks[static_cast<size_t>(culprit)].node;
  fault.hostname = model_.Hostname(fault.node);
  fault.cause = ExitCause::kStopped;
  fault.message = absl::StrCat(text, "; ended because of progress.on_stall: kill");
  faults_.Fail(job, std::move(fault), now);
}

}  // namespace gtrain::core
