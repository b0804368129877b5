#include "checkpoint/engine/save_schedule.h"

#include "absl/time/clock.h"
#include "base/logging.h"

namespace gtrain::ckpt {
namespace {
// Before the first save nobody knows what one costs.
constexpr absl::Duration kFirstAfter = absl::Seconds(30);
}  // namespace

SaveSchedule::SaveSchedule(CheckpointContext* context) : context_(*context) {
  if (!settings_.last_save) return;
  last_save_ = clock_.Now() - settings_.last_save->ago;
  last_step_ = settings_.last_save->step;
}

void SaveSchedule::Opened() {
  if (!settings_.last_save) last_save_ = clock_.Now();
}

void SaveSchedule::Restored(int64_t step) { Tried(step); }

void SaveSchedule::Tried(int64_t step) {
  last_save_ = clock_.Now();
  if (last_step_) last_step_ = step;
}

absl::Duration SaveSchedule::Every(absl::Duration writing) const {
  if (settings_.every) return *settings_.every;
  return last_stall_ == absl::ZeroDuration() ? kFirstAfter : Chosen(writing).every;
}

Interval SaveSchedule::Chosen(absl::Duration writing) const {
  return ChooseInterval({.stall = last_stall_,
                         .writing = writing,
                         .interruptions = static_cast<int>(context_.generation) - 1,
                         .observed = absl::Now() - settings_.job_began});
}

std::string SaveSchedule::Reason(absl::Duration writing) {
  if (settings_.every || settings_.every_steps || last_stall_ == absl::ZeroDuration()) return "";
  const Interval chosen = Chosen(writing);
  const bool told = chosen.every < 1.25 * told_every_ && told_every_ < 1.25 * chosen.every;
  if (context_.agree.rank() == 0 && !told) {
    told_every_ = chosen.every;
    LogInfo("checkpoint: saves are due ", chosen.reason);
  }
  return chosen.reason;
}

bool SaveSchedule::Due(int64_t step, bool can, absl::Duration writing) const {
  // A machine is about to go: the others go on with a checkpoint that was committed after the notice (C13). A
  // save that began before the notice may finish.
  if (context_.session->PreemptionNotice() && !saved_for_notice_ && can) return true;
  if (context_.session->StopRequested() && !saved_for_stop_ && can) return true;
  if (settings_.every_steps) {
    const int64_t every = *settings_.every_steps;
    return (step > 0 && step % every == 0) || (last_step_ && step / every > *last_step_ / every);
  }
  return clock_.Now() - last_save_ >= Every(writing);
}

void SaveSchedule::LookAtNotice() {
  if (!context_.session->PreemptionNotice()) saved_for_notice_ = false;
}

void SaveSchedule::Saved(bool noticed, bool stopped) {
  saved_for_notice_ = saved_for_notice_ || noticed;
  saved_for_stop_ = saved_for_stop_ || stopped;
}

void SaveSchedule::GoesOn() {
  last_stall_ = absl::ZeroDuration();
  AddStall(clock_.Now() - last_save_);
}

void SaveSchedule::AddStall(absl::Duration more) {
  last_stall_ += more;
  context_.session->CountStall(more);
}

}  // namespace gtrain::ckpt
