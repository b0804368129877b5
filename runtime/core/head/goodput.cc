#include "runtime/core/head/goodput.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "runtime/core/head/job.h"

namespace gtrain::core {
namespace {

constexpr int64_t kStepMax = 9'000'000'000'000'000;  // what a double holds exactly
constexpr double kJoinedMax = 1e9, kLateMax = 1.1;   // seconds

bool IsStep(const std::optional<int64_t>& step) { return step && *step >= 0 && *step <= kStepMax; }

size_t IndexOf(TimeLabel label) { return static_cast<size_t>(label); }

// Takes as much as there is.
void TakeFrom(double& seconds, double& owed) {
  const double taken = std::clamp(owed, 0.0, std::max(0.0, seconds));
  seconds -= taken;
  owed -= taken;
}

// How long ago it measured, by its own clock. Its quickest report says when it joined; clocks drift, and no
// report is late by more than a heartbeat and the time for which a rank holds it back.
double LateBy(RankLive& rank, double joined_seconds, Instant now) {
  if (!(joined_seconds >= 0 && joined_seconds < kJoinedMax)) return 0;
  const Instant joined = now - absl::Seconds(joined_seconds);
  rank.joined_at = std::min(rank.joined_at.value_or(joined), joined);
  return std::min(absl::ToDoubleSeconds(joined - *rank.joined_at), kLateMax);
}

// The seconds of each step that it neither waited nor was held up. A rank may say what it measured between
// two steps as well, so it is told from step to step.
std::optional<double> StepSeconds(RankLive& rank, const RankStatus& status) {
  if (!status.step || (rank.worked && rank.worked->first == *status.step)) return std::nullopt;
  const double worked =
      *status.joined_seconds - status.waited_seconds.value_or(0) - status.stalled_seconds.value_or(0);
  const auto was = std::exchange(rank.worked, std::pair(*status.step, worked));
  if (!was || *status.step < was->first) return std::nullopt;
  const double steps = static_cast<double>(*status.step) - static_cast<double>(was->first);
  const double seconds = (worked - was->second) / steps;
  return seconds > 0 ? std::optional(seconds) : std::nullopt;  // what is no number is none
}

}  // namespace

GoodputLedger::GoodputLedger(const GoodputRecord& stored, Instant from) : record_(stored), counted_to_(from) {
  const GoodputRecord& r = record_;
  if (!IsStep(r.first) || !IsStep(r.top) || !IsStep(r.at_step)) record_.stepped = {};
  if (!IsStep(r.redone_to)) record_.redone_to.reset();
}

void GoodputLedger::Advance(Instant now) {
  const Instant from = std::exchange(counted_to_, now).value_or(now);
  const double seconds = std::max(0.0, absl::ToDoubleSeconds(now - from));
  record_.open += seconds * places_.running;
  if (places_[TimeLabel::kEnding] > 0) behind_exit_ += seconds * places_.running;
  for (size_t i = 0; i < kTimeLabels; ++i) record_.seconds[i] += seconds * places_.of[i];
  if (places_.going_on + places_.joining == 0) return;
  before_step_.wall += seconds;
  before_step_.reforming += seconds * places_.going_on;
  before_step_.starting += seconds * places_.joining;
}

void GoodputLedger::SetPlaces(const JobPlaces& places) {
  places_ = places;
  if (places.wanted > 0) {
    record_.wanted = places.wanted;
  } else if (before_step_.step) {  // the job is over
    TakeFirstStep(*before_step_.step);
  }
}

// Some may have finished a step of the generation before until now.
void GoodputLedger::AllJoined(Instant now) {
  Advance(now);
  if (!before_step_.step) before_step_ = {};
}

// Nobody measures when the ranks of a generation begin to compute, so the time of one step is taken to have
// gone into the first one, and never more than there was.
void GoodputLedger::TakeFirstStep(TimeLabel label) {
  const BeforeStep before = std::exchange(before_step_, {});
  if (!step_seconds_ || before.wall <= 0) return;
  if (label == TimeLabel::kRecomputed && record_.repeats) label = TimeLabel::kStep;  // nobody knows
  const double share = std::min(1.0, *step_seconds_ / before.wall);
  for (const auto& [from, seconds] : {std::pair(TimeLabel::kReforming, before.reforming),
                                      std::pair(TimeLabel::kStarting, before.starting)}) {
    Move(seconds * share, from, label);
  }
  if (label == TimeLabel::kStep) DivideBehind(before);
}

// As much as there is.
void GoodputLedger::Move(double seconds, TimeLabel from, TimeLabel to) {
  const double taken = std::clamp(seconds, 0.0, std::max(0.0, Of(from)));
  Of(from) -= taken;
  Of(to) += taken;
}

// Processes that go on have the whole steps that they had made. Where they needed less than a step's time for
// their first one, the rest of it had been computed before; else they computed it all again, and what they
// had of it was lost: of each rank no more than a step.
void GoodputLedger::DivideBehind(const BeforeStep& before) {
  if (before.reforming <= 0 || before.ran == 0 || before.behind <= 0) return;
  const double rest = std::max(0.0, *step_seconds_ - before.wall);
  const double share = std::min(1.0, before.reforming / before.wall / before.ran);  // of the ranks
  if (before.made == 0)
    return Move(std::min(rest * before.ran, before.behind) * share, TimeLabel::kLost, TimeLabel::kStep);
  const double whole = static_cast<double>(before.made) * *step_seconds_ * before.ran;
  const double begun = std::clamp(before.behind - whole, 0.0, *step_seconds_ * before.ran);
  Move(begun - std::min(rest * before.ran, begun) * share, TimeLabel::kStep, TimeLabel::kLost);
}

// Where a rank has ended and nobody has made a step since, the others waited for it: that is no training, and
// what was measured of it is counted already. Where nobody has reported a step the one under way is lost; of
// processes that were all started anew nobody knows whether they had begun one.
void GoodputLedger::EndGeneration(Instant now) {
  Advance(now);
  if (!before_step_.step && before_step_.reforming <= 0) before_step_ = {};
  TakeFirstStep(before_step_.step.value_or(TimeLabel::kLost));
  if (places_.running > 0) ran_ = places_.running;
  const double waited = std::clamp(std::exchange(behind_exit_, 0), 0.0, std::max(0.0, record_.open));
  record_.open -= waited;
  Of(TimeLabel::kReforming) += waited;
  record_.over = true;
}

// Ranks report waits at other moments than steps, so what they waited may come after the step was counted.
void GoodputLedger::Close(TimeLabel label) {
  double owed = -std::min(0.0, record_.open);
  Of(label) += std::max(0.0, std::exchange(record_.open, 0));
  TakeFrom(Of(label), owed);
  for (const TimeLabel other : {TimeLabel::kStep, TimeLabel::kRecomputed, TimeLabel::kLost})
    TakeFrom(Of(other), owed);
}

// A report of a generation that is over, or that comes with a wait of all of its time, tells nothing. One
// that comes with a heartbeat may be as late as that, which is much of a step that is long: the rank's own
// clock knows better, where it says it.
void GoodputLedger::MeasureStep(int64_t made) {
  const std::optional<double> paced = std::exchange(paced_, std::nullopt);
  if (places_.running > 0 && record_.open > 0) {
    const double seconds = record_.open / static_cast<double>(made) / places_.running;
    step_seconds_ = paced.value_or(seconds);
  }
  if (before_step_.step) TakeFirstStep(*before_step_.step);
}

bool GoodputLedger::Step(int64_t step, Generation generation, bool anew) {
  if (!IsStep(step)) return false;
  GoodputRecord& r = record_;
  if (r.stepped != generation || anew || step > *r.at_step) behind_exit_ = 0;  // they go on without it
  if (r.stepped != generation) {
    if (r.stepped == Generation()) Of(TimeLabel::kStarting) += std::exchange(Of(TimeLabel::kUnreported), 0);
    before_step_.behind = r.open;
    before_step_.ran = std::exchange(ran_, 0);
    before_step_.made = std::max<int64_t>(0, step - r.top.value_or(step) - 1);
    // Who goes on behind the step that was reported last had made more steps by then.
    Close(r.top && step <= *r.top + 1 ? TimeLabel::kLost : TimeLabel::kStep);
    const bool again = !r.repeats && r.top && step <= *r.top;
    before_step_.step = again ? TimeLabel::kRecomputed : TimeLabel::kStep;
    paced_.reset();
    late_ = 0;
    if (!r.first) r.first = step;
    r.redone_to = r.top;
    r.redone += static_cast<int64_t>(again);
    r.top = std::max(r.top.value_or(step), step);
    r.at_step = step;
    r.stepped = generation;
    r.over = false;
    stepped_at_ = counted_to_;
    return true;
  }
  if (!stepped_at_) stepped_at_ = counted_to_;  // an earlier head saw the first
  if (anew) {
    r.repeats = true;
    r.redone = 0;
    Close(TimeLabel::kStep);
    Of(TimeLabel::kStep) += std::exchange(Of(TimeLabel::kRecomputed), 0);
  } else if (step > *r.at_step) {
    const int64_t made = step - *r.at_step;
    const int64_t redone =
        r.redone_to && !r.repeats ? std::clamp<int64_t>(*r.redone_to - *r.at_step, 0, made) : 0;
    const double after = std::clamp(std::exchange(late_, 0) * places_.running, 0.0, std::max(0.0, r.open));
    r.open -= after;  // that is of the next step
    const double share = r.open * static_cast<double>(redone) / static_cast<double>(made);
    MeasureStep(made);
    r.redone += redone;
    Of(TimeLabel::kRecomputed) += std::max(0.0, share);
    r.open -= std::max(0.0, share);
    Close(redone < made ? TimeLabel::kStep : TimeLabel::kRecomputed);
    r.open += after;
  }
  r.top = std::max(r.top.value_or(step), step);
  r.at_step = anew ? step : std::max(*r.at_step, step);
  return false;
}

void GoodputLedger::Measured(std::optional<double> idle, std::optional<double> stall) {
  record_.idle_said = record_.idle_said || idle;
  record_.stall_said = record_.stall_said || stall;
  Of(TimeLabel::kIdle) += idle.value_or(0);
  Of(TimeLabel::kCheckpointStall) += stall.value_or(0);
  record_.open -= idle.value_or(0) + stall.value_or(0);
}

GoodputTotals GoodputLedger::Totals(Instant now) const {
  GoodputLedger copy = *this;
  if (counted_to_) copy.Advance(now);
  GoodputRecord& r = copy.record_;
  const bool behind = r.redone_to && r.at_step && *r.at_step < *r.redone_to && !r.repeats;
  if (copy.before_step_.step) copy.TakeFirstStep(*copy.before_step_.step);
  copy.Close(r.over ? TimeLabel::kLost : behind ? TimeLabel::kRecomputed : TimeLabel::kStep);
  GoodputTotals totals;
  for (size_t i = 0; i < kTimeLabels; ++i) totals.seconds[i] = r.seconds[i];
  const auto leave_out = [&](TimeLabel label, bool known) {
    if (!known) totals.seconds[IndexOf(label)].reset();
  };
  const bool steps = r.stepped != Generation();
  leave_out(TimeLabel::kStep, steps);
  leave_out(TimeLabel::kLost, steps);
  leave_out(TimeLabel::kRecomputed, steps && !r.repeats);
  leave_out(TimeLabel::kIdle, r.idle_said);
  leave_out(TimeLabel::kCheckpointStall, r.stall_said);
  leave_out(TimeLabel::kUnreported, !steps || copy.Of(TimeLabel::kUnreported) > 0);
  totals.all = std::accumulate(r.seconds.begin(), r.seconds.end(), 0.0);
  if (steps && totals.all > 0) totals.goodput = copy.Of(TimeLabel::kStep) / totals.all;
  totals.losses = r.losses;
  totals.wanted = r.wanted;
  totals.first = r.first;
  totals.top = r.top;
  if (steps && !r.repeats) {
    totals.applied = *r.top - *r.first + 1;
    totals.redone = r.redone;
  }
  return totals;
}

// ---------------------------------------------------------------- of a job

JobPlaces PlacesOf(const Job& job) {
  JobPlaces places;
  const JobRecord& record = job.record;
  if (IsFinal(record.state)) return places;
  const plan::Demand& demand = job.demand;
  places.wanted = demand.count_nodes ? demand.max * demand.ranks_per_node.value_or(job.per_node) : demand.max;
  const int ranks = record.grant ? record.grant->world_size : 0;
  const int all = std::max(ranks, places.wanted);
  const bool live = job.Live();
  if (record.ending == Ending::kCancel || record.ending == Ending::kFail) {
    places[TimeLabel::kEnding] = all;
  } else if (!live && record.waits_for_storage) {
    places[TimeLabel::kStorage] = all;
  } else if (!live && record.state != JobState::kReconfiguring) {
    places[TimeLabel::kWaiting] = all;
  } else if (!live) {
    places[TimeLabel::kReforming] = ranks;
    places[TimeLabel::kWaiting] = all - ranks;
  } else {
    const int ended = static_cast<int>(record.exits.size());
    const int come = std::min(all - ranks, job.coming_up);
    places[TimeLabel::kEnding] = ended;
    places[TimeLabel::kStarting] = come;
    places[TimeLabel::kWaiting] = all - ranks - come;
    const Generation stepped = job.goodput.record().stepped;
    if (stepped == record.generation) {
      places.running = ranks - ended;
    } else if (record.state == JobState::kRunning && stepped == Generation()) {
      places[TimeLabel::kUnreported] = places.joining = ranks - ended;
    } else {
      const int go_on = std::min(ranks - ended, job.going_on);
      places[TimeLabel::kReforming] = go_on;
      places[TimeLabel::kStarting] += ranks - ended - go_on;
      if (record.state == JobState::kRunning) {
        places.going_on = go_on;
        places.joining = ranks - ended - go_on;
      }
    }
  }
  return places;
}

// A rank counts from its beginning in the generation, and perhaps falsely: no more is taken than the time
// that it ran since it last said what it measured, so that all ranks together never take more than is
// counted. What it measured over the beginning of the steps was mostly before: ranks wait for each other in
// the first step above all. The time since it joined is that of the measurement: one that is equal comes
// again.
void MeasureGoodput(Job& job, RankLive& rank, const RankStatus& status, Instant now) {
  const bool joins = rank.status.state != RankState::kJoined && status.state == RankState::kJoined;
  if (joins && ++job.joined == static_cast<int>(job.ranks.size())) job.goodput.AllJoined(now);
  job.goodput.Late(0);
  if (!status.joined_seconds || status.joined_seconds == rank.status.joined_seconds) return;
  job.goodput.Late(LateBy(rank, *status.joined_seconds, now));
  if (const std::optional<double> seconds = StepSeconds(rank, status)) job.goodput.Paced(*seconds);
  const std::optional<Instant> before = std::exchange(rank.measured_at, now);
  const std::optional<Instant> began = job.goodput.stepped_at();
  if (!before || !began || *before < *began || rank.exit >= 0 || !job.Live() ||
      job.goodput.record().stepped != job.record.generation)
    return;
  double left = std::max(0.0, absl::ToDoubleSeconds(now - *before));
  const auto grown = [&](const std::optional<double>& was, const std::optional<double>& is) {
    std::optional<double> seconds;
    if (!is) return seconds;
    const double more = *is - was.value_or(0);
    seconds = more > 0 ? std::min(more, left) : 0;  // what is no number is 0
    left -= *seconds;
    return seconds;
  };
  const std::optional<double> stall = grown(rank.status.stalled_seconds, status.stalled_seconds);
  const std::optional<double> idle = grown(rank.status.waited_seconds, status.waited_seconds);
  job.goodput.Measured(idle, stall);
}

}  // namespace gtrain::core
