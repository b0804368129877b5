#include "comm/port/watch.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace gtrain::comm {
namespace {
constexpr absl::Duration kForever = absl::Hours(24 * 365);
}  // namespace

Instant Watch::Deadline() const {
  if (!deadline_) deadline_ = RealClock().Now() + std::min(timeout_, kForever);
  return *deadline_;
}

absl::Status Watch::Check() const {
  if (absl::Status alive = bootstrap_->Alive(); !alive.ok()) return alive;
  const Instant deadline = Deadline();
  if (timeout_ <= kForever && RealClock().Now() >= deadline) {
    return absl::DeadlineExceededError(absl::StrCat("not done within ", absl::FormatDuration(timeout_)));
  }
  return absl::OkStatus();
}

absl::Duration Watch::Waited() const {
  if (!deadline_) return absl::ZeroDuration();
  return RealClock().Now() - *deadline_ + std::min(timeout_, kForever);
}

absl::Duration Watch::Left() const { return std::max(absl::ZeroDuration(), Deadline() - RealClock().Now()); }

}  // namespace gtrain::comm
