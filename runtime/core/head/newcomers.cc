#include "runtime/core/head/newcomers.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/probe.h"
#include "base/units.h"
#include "runtime/core/head/faults.h"
#include "runtime/core/head/gang.h"
#include "runtime/core/head/job_life.h"

namespace gtrain::core {
namespace {

constexpr absl::Duration kJoinBatch = absl::Seconds(10);
constexpr absl::Duration kTryAgain = absl::Seconds(15);
constexpr int kDoublingsMax = 6;
// A generation of a program that reports no steps is given so long before it is re-formed.
constexpr absl::Duration kStepsBy = absl::Seconds(5);

WaitingRank* Find(Job& job, int number) {
  const size_t index = static_cast<size_t>(number) - job.ranks.size();
  return index < job.waiting.size() ? &job.waiting[index] : nullptr;
}

bool IsReady(const WaitingRank& one) { return !one.over && one.status.state == RankState::kJoined; }

// Only of a generation whose ranks all run and none of which is about to end by itself.
bool MayReform(const Job& job) {
  return job.Live() && job.record.state == JobState::kRunning && job.record.exits.empty() && !job.leave;
}

// How many of those that wait are to join: not the spares.
int WantedOf(const Job& job) { return job.RanksOf(*job.record.grant) - job.record.grant->world_size; }

// Each generation makes a step: else those that go on would stand still for as long as others come.
Instant MayReformFrom(const Job& job) {
  return job.low_step || !job.running_since ? Instant() : *job.running_since + kStepsBy;
}

}  // namespace

void Newcomers::OnStatus(Job& job, const RankStatus& status, Instant now) {
  WaitingRank* one = Find(job, status.rank);
  if (one == nullptr || one->ended) return;
  one->over = false;
  one->status = status;
  Consider(job, now);
}

void Newcomers::OnExit(Job& job, const RankExit& exit, Instant now) {
  WaitingRank* one = Find(job, exit.rank);
  if (one == nullptr || one->ended || !job.Live()) return;
  GT_PROBE("head.newcomer_ends");
  one->over = one->ended = true;
  context_.Emit(
      job, "newcomer",
      absl::StrCat(faults_.FaultOf(job, exit).message, "; it came up to join the others, which go on"));
  context_.Dirty(job);
  Consider(job, now);
}

void Newcomers::OnNodeLost(Job& job, const NodeId& node, Instant now) {
  bool any = false;
  for (size_t i = 0; i < job.waiting.size(); ++i) {
    if (job.record.grant->waiting[i].node != node || job.waiting[i].over) continue;
    any = job.waiting[i].over = true;
  }
  if (any) Consider(job, now);
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
    context_.Emit(job, "newcomer",
                  absl::StrCat("rank ", number, " on ", model_.Hostname(job.record.grant->waiting[i].node),
                               " has not come up within ", PrintDuration(job.spec.progress.startup),
                               " (progress.startup): it is started anew"));
  }
}

void Newcomers::Consider(Job& job, Instant now) {
  if (job.waiting.empty() || !MayReform(job)) return;
  GiveUpLate(job, now);
  int open = 0, ready = 0;
  for (const WaitingRank& one : job.waiting) {
    open += one.over ? 0 : 1;
    ready += IsReady(one) ? 1 : 0;
  }
  const int wanted = WantedOf(job);
  if (wanted > 0 && open == 0 && !job.join_at)
    job.join_at = now + kTryAgain * (1 << std::min(job.join_failures++, kDoublingsMax));
  if (wanted > 0 && ready > 0 && !job.join_at) job.join_at = now + kJoinBatch;
  if (wanted > 0 && ready > 0 && (ready == open || ready >= wanted)) job.join_at = now;
  if (job.join_at) job.join_at = std::max(*job.join_at, MayReformFrom(job));
  if (job.join_at && *job.join_at <= now) Join(job, std::min(ready, wanted), now);
}

void Newcomers::Join(Job& job, int ready, Instant now) {
  if (ready > 0) GT_PROBE("head.newcomers_join");
  if (ready == 0) GT_PROBE("head.newcomers_again");
  job.join_at.reset();
  if (ready > 0) job.join_failures = 0;
  const std::string what = ready == 0 ? "ranks that were to join are started anew"
                                      : absl::StrCat(ready, ready == 1 ? " rank joins" : " ranks join",
                                                     " the ", job.ranks.size(), " that run");
  life_.BeginEnding(job, Ending::kReplace, EndMode::kReform, context_.config().reform_grace, what, now);
}

std::optional<Instant> Newcomers::NextDeadline(const Job& job) const {
  std::optional<Instant> next;
  if (!MayReform(job)) return next;
  next = job.join_at;
  for (const WaitingRank& one : job.waiting) {
    if (one.over || IsReady(one)) continue;
    const Instant late = one.since + job.spec.progress.startup;
    next = std::min(next.value_or(late), late);
  }
  return next;
}

}  // namespace gtrain::core
