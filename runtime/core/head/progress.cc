// Slow nodes (fault N6): ranks of one job step together, so steps per second do not tell them apart: the slow
// one keeps all to its pace. The difference is in the waiting: a rank reports how much of its time went into
// collectives that had to wait for others, and the rest is its own part. A node whose ranks need twice the
// time of those on the other nodes for their own part, in three comparisons in a row, is reported as slow,
// with that ratio as score. Nothing is done about it: it may be the data, and a slow node is still worth more
// than none.
#include "runtime/core/head/progress.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/probe.h"

namespace gtrain::core {
// Programs that report every hundredth step change it seldom, however fast they are.
absl::Duration BetweenSteps(const Job& job) {
  const auto& over = job.rate_over;
  if (over.size() < 2) return absl::ZeroDuration();
  return (over.back().second - over.front().second) / static_cast<int64_t>(over.size() - 1);
}

namespace {

constexpr absl::Duration kRateStretch = absl::Seconds(30);
constexpr absl::Duration kRateFirst = absl::Seconds(2);
constexpr absl::Duration kRateEvery = absl::Seconds(1);

constexpr double kStretchSeconds = 10;
constexpr uint64_t kStretchCollectives = 20;  // the one under way may be missing
constexpr double kSlowScore = 2, kWellScore = 1.5;
constexpr double kSlowBusy = 0.5;  // who waits itself half of the time holds nobody up
constexpr double kBusyMin = 0.01;  // of the others: bounds the score
constexpr int kComparisons = 3;

// A checkpoint is committed when all ranks have saved it, also one of which nothing is heard meanwhile. Only
// there are its steps known to be those that ranks report.
int64_t CommittedStep(const Job& job) {
  const bool of_these = job.spec.in_place && job.record.sdk && job.checkpointed && job.checkpoint &&
                        job.checkpoint->generation == job.record.generation;
  return of_these ? job.checkpoint->step : std::numeric_limits<int64_t>::min();
}

// The median of all values but these, which are some of them; both are sorted. O(own log all).
double MedianWithout(const std::vector<double>& all, const std::vector<double>& own) {
  size_t at = (all.size() - own.size()) / 2, equal = 0;
  for (size_t i = 0; i < own.size(); ++i) {
    equal = i > 0 && own[i] == own[i - 1] ? equal + 1 : 0;
    const auto place = static_cast<size_t>(std::ranges::lower_bound(all, own[i]) - all.begin()) + equal;
    if (place <= at) ++at;
  }
  return all[at];
}

// Ranks report at different moments of a step, and their agents once a second, so only a stretch of many
// reports gives an honest rate: the end of a job that is foretold from it must not jump by a quarter from
// look to look.
void MeasureRate(Job& job, int64_t low, Instant now) {
  auto& over = job.rate_over;
  if (over.empty() || now - over.back().second >= kRateEvery) over.emplace_back(low, now);
  while (over.size() > 2 && now - over.front().second > kRateStretch) over.erase(over.begin());
  // The first of a generation may be of one rank alone, or of a first step that compiled something.
  const auto& [from, since] = over.size() > 2 ? over[1] : over[0];
  if (over.size() <= 1 || now - since < kRateFirst) return;
  job.steps_per_second = static_cast<double>(low - from) / absl::ToDoubleSeconds(now - since);
  if (job.steps_per_second > 0)
    job.step_time = std::max(absl::Seconds(1 / job.steps_per_second), BetweenSteps(job));
}

}  // namespace

// A program may count its steps within an epoch, or go back to a checkpoint by itself. It has begun anew once
// all ranks that tell steps have: one that stands still while another goes round and round is a stall.
bool Progress::AllBeganAnew(Job& job) {
  int tell = 0;
  for (const auto& [step, ranks] : job.steps) tell += ranks;
  if (job.began_anew < tell) return false;
  for (RankLive& rank : job.ranks) rank.began_anew = false;
  job.began_anew = 0;
  return true;
}

// The job is where its slowest running rank is.
void Progress::UpdateProgress(Job& job, Instant now) {
  if (job.steps.empty()) return;
  const int64_t low = std::max(job.steps.begin()->first, CommittedStep(job));
  if (job.low_step && low == *job.low_step) return;
  const bool fell = job.low_step && low < *job.low_step;
  if (fell && !AllBeganAnew(job)) return;
  if (fell) job.rate_over.clear();
  MeasureRate(job, low, now);
  if (!job.low_step) job.interrupted = false;
  if (!job.low_step && job.running_since) job.step_time = std::max(job.step_time, now - *job.running_since);
  job.low_step = low;
  job.goodput.Advance(now);
  // A head that restarts knows by the record that the ranks step.
  if (job.goodput.Step(low, job.record.generation, fell)) context_.Dirty(job);
  job.progress_at = now;
  job.rank_notes.erase(kProgressNote);
  if (job.stalled) {
    GT_PROBE("head.stall_over");
    job.stalled.reset();
    context_.Emit(job, "stall", absl::StrCat("steps again: ", low));
    context_.Dirty(job);
  }
}

void Progress::MeasurePace(Job& job, RankLive& rank) {
  const RankStatus& status = rank.status;
  if (!status.waited_seconds || !status.joined_seconds) return;
  const RankStatus* from = rank.pace_from ? &*rank.pace_from : nullptr;
  if (from == nullptr || *status.joined_seconds < *from->joined_seconds ||
      *status.waited_seconds < *from->waited_seconds) {
    rank.pace_from = status;
    return;
  }
  const double stretch = *status.joined_seconds - *from->joined_seconds;
  if (!(stretch >= kStretchSeconds) ||
      status.collective_sequence < from->collective_sequence + kStretchCollectives) {
    return;
  }
  const double waited = *status.waited_seconds - *from->waited_seconds;
  const double busy = 1 - waited / stretch;
  rank.busy = busy >= 0 ? std::min(busy, 1.0) : 0.0;  // what is no number is 0
  if (!std::exchange(rank.busy_new, true)) ++job.busy_new;
  rank.pace_from = status;
  // Else each of n ranks would look at all others.
  if (job.busy_new >= static_cast<int>(job.ranks.size() - job.record.exits.size())) ComparePaces(job);
}

// Once each rank that still runs has something new to say.
void Progress::ComparePaces(Job& job) {
  std::map<NodeId, std::vector<double>> busy;
  for (const RankPlace& place : job.record.grant->ranks) {
    if (job.ExitOf(place.rank) != nullptr) continue;
    if (!job.ranks[place.rank].busy_new) return;
    busy[place.node].push_back(*job.ranks[place.rank].busy);
  }
  for (RankLive& rank : job.ranks) rank.busy_new = false;
  job.busy_new = 0;
  if (busy.size() < 2) return;
  std::vector<double> all;
  for (auto& [node, own] : busy) {
    std::ranges::sort(own);
    all.insert(all.end(), own.begin(), own.end());
  }
  std::ranges::sort(all);
  for (const auto& [node, own] : busy) {
    NodePace& pace = job.paces[node];
    const double mine = own[own.size() / 2];
    pace.score = mine / std::max(kBusyMin, MedianWithout(all, own));
    const bool slow = pace.score >= (pace.slow ? kWellScore : kSlowScore) && mine >= kSlowBusy;
    pace.above = slow ? std::max(pace.above, 0) + 1 : std::min(pace.above, 0) - 1;
    if (pace.slow ? pace.above > -kComparisons : pace.above < kComparisons) continue;
    pace.slow = !pace.slow;
    context_.Emit(job, "warning",
                  pace.slow ? absl::StrFormat(
                                  "%s is slow: its ranks take %.1f times as long as the others for their own "
                                  "part of a step, and the others wait for them; nothing is done about it "
                                  "(`gtrain node drain %s` would)",
                                  model_.Hostname(node), pace.score, model_.Hostname(node))
                            : absl::StrCat(model_.Hostname(node), " keeps up with the others again"));
    context_.Dirty(job);
  }
}

}  // namespace gtrain::core
