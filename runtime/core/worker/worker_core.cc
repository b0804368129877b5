// Reports are merged, not queued: the newest step and loss win, samples add up, and at most one leaves
// every kReportEvery. So a program may report every step of a microsecond and the control
// plane never notices.
#include "runtime/core/worker/worker_core.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace gtrain::core {
namespace {
constexpr absl::Duration kReportEvery = absl::Milliseconds(100);
}  // namespace

WorkerStepResult WorkerCore::Step(const WorkerEvent& event, Instant now) {
  return std::visit([&](const auto& e) { return On(e, now); }, event);
}

std::optional<Instant> WorkerCore::NextDeadline() const {
  if (!held_ || !reported_at_) return std::nullopt;
  return *reported_at_ + kReportEvery;
}

std::optional<std::vector<std::string>> WorkerCore::TakeTable(uint64_t sequence) {
  auto it = open_.find(sequence);
  if (it == open_.end() || !it->second) return std::nullopt;
  std::vector<std::string> blobs = *std::move(it->second);
  open_.erase(it);
  return blobs;
}

WorkerStepResult WorkerCore::On(const WorkerJoin& e, Instant) {
  if (state_ != State::kNew) return {{}, "joined before"};
  state_ = State::kJoining;
  open_[exchanges_] = std::nullopt;
  return {{SendJoined{}, SendExchange{exchanges_++, e.blob}}, "the program joins"};
}

WorkerStepResult WorkerCore::On(const WorkerExchange& e, Instant) {
  open_[exchanges_] = std::nullopt;
  const uint64_t sequence = exchanges_++;
  if (state_ == State::kOver) return {{}, "the generation is over: nothing is sent"};
  return {{SendExchange{sequence, e.blob}}, absl::StrCat("exchange ", sequence)};
}

WorkerStepResult WorkerCore::On(const WorkerTable& e, Instant now) {
  auto it = open_.find(e.sequence);
  if (state_ == State::kOver || it == open_.end() || it->second ||
      e.blobs.size() != static_cast<size_t>(world_)) {
    ++tables_dropped_;
    return {{}, absl::StrCat("table ", e.sequence, " answers nothing that is open: dropped")};
  }
  it->second = e.blobs;
  if (e.sequence == 0) {
    state_ = State::kJoined;
    joined_at_ = now;
  }
  return {{}, absl::StrCat("table ", e.sequence, " is complete")};
}

WorkerStepResult WorkerCore::On(const WorkerOverdue& e, Instant) {
  const auto it = open_.find(e.sequence);
  if (state_ == State::kOver || it == open_.end() || it->second) return {{}, "nothing to wait for"};
  asked_ = e.sequence;
  missing_.clear();
  return {{SendOverdue{e.sequence}}, absl::StrCat("exchange ", e.sequence, " is overdue: who is missing?")};
}

WorkerStepResult WorkerCore::On(const WorkerMissing& e, Instant) {
  if (asked_ != e.sequence) return {{}, "not what was asked"};
  missing_ = e.ranks;
  return {{}, absl::StrCat("exchange ", e.sequence, " waits for ", e.ranks.size(), " ranks")};
}

WorkerStepResult WorkerCore::On(const WorkerLeft& e, Instant) {
  if (state_ == State::kOver) return {{}, "the generation is over: who left it does not matter"};
  left_ = e.ranks;
  return {{}, absl::StrCat(e.ranks.size(), " ranks have left")};
}

WorkerStepResult WorkerCore::On(const WorkerOver& e, Instant) {
  if (state_ == State::kOver) return {{}, "over already: the first reason stays"};
  state_ = State::kOver;
  over_reason_ = e.reason;
  held_.reset();
  return {{}, absl::StrCat("the generation is over: ", e.reason)};
}

WorkerStepResult WorkerCore::On(const WorkerStop& e, Instant) {
  if (!stop_reason_) stop_reason_ = e.reason;
  return {{}, absl::StrCat("asked to stop: ", e.reason)};
}

WorkerStepResult WorkerCore::On(const WorkerNotice& e, Instant now) {
  // The newest word counts: it comes nearer, or is another notice after one that was taken back.
  preempted_at_ = now + e.left;
  return {{}, absl::StrCat("preemption in ", absl::FormatDuration(e.left))};
}

WorkerStepResult WorkerCore::On(const WorkerProgress& e, Instant now) {
  if (state_ == State::kOver) return {{}, "the generation is over: nothing is reported"};
  if (!held_) held_.emplace();
  held_->step = std::max(e.step, held_->step.value_or(e.step));
  if (e.loss) held_->loss = e.loss;
  held_->samples += e.samples;
  if (e.counted.count > 0) TakePace(e.counted, now);
  return ReportIfDue(now);
}

WorkerStepResult WorkerCore::On(const WorkerCheckpoint& e, Instant) {
  if (state_ == State::kOver) return {{}, "the generation is over: the manifest itself is the truth"};
  return {{SendCheckpoint{e.step, e.manifest, e.policy}}, "a checkpoint is committed"};
}

WorkerStepResult WorkerCore::On(const WorkerLinkDown& e, Instant) {
  if (state_ == State::kOver) return {{}, "the generation is over: its links do not matter"};
  return {{SendLinkDown{e.peer, e.text}}, absl::StrCat("rank ", e.peer, " is not reached: ", e.text)};
}

WorkerStepResult WorkerCore::On(const WorkerNote& e, Instant) {
  if (state_ == State::kOver) return {{}, "the generation is over: the next one says its own"};
  return {{SendNote{e.kind, e.text}}, absl::StrCat(e.kind, ": ", e.text)};
}

WorkerStepResult WorkerCore::On(const WorkerPause&, Instant) {
  pause_requested_ = state_ != State::kOver;
  return {{}, "the ranks are to stand still behind a step"};
}

// What was asked for has come; the next request is another one.
WorkerStepResult WorkerCore::On(const WorkerPauses& e, Instant) {
  if (state_ == State::kOver) return {{}, "the generation is over: it is what they pause for"};
  pause_requested_ = false;
  return {{SendPause{e.paused}}, e.paused ? "the ranks stand still" : "the ranks may be asked to pause"};
}

WorkerStepResult WorkerCore::On(const WorkerCollectives& e, Instant now) {
  const bool stalled = e.stalled > (pace_ ? pace_->stalled : absl::ZeroDuration());
  if (state_ == State::kOver || (e.count <= collective_ && !stalled)) return {{}, "no new collective"};
  TakePace(e, now);
  if (!held_) held_.emplace();
  return ReportIfDue(now);
}

void WorkerCore::TakePace(const WorkerCollectives& counted, Instant now) {
  collective_ = std::max(collective_, counted.count);
  if (joined_at_) pace_ = RankPace{counted.waited, now - *joined_at_, counted.stalled};
}

WorkerStepResult WorkerCore::On(const WorkerTick&, Instant now) { return ReportIfDue(now); }

WorkerStepResult WorkerCore::ReportIfDue(Instant now) {
  if (!held_) return {{}, "nothing to report"};
  if (reported_at_ && now < *reported_at_ + kReportEvery)
    return {{}, "held back: the last report is too fresh"};
  reported_at_ = now;
  SendProgress progress = *std::exchange(held_, std::nullopt);
  progress.collective = collective_;
  progress.pace = pace_;
  return {{progress}, "progress"};
}

}  // namespace gtrain::core
