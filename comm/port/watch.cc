#include "comm/port/watch.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace gtrain::comm {
namespace {
constexpr absl::Duration kForever = absl::Hours(24 * 365);
}  // namespace

Watch::Watch(const Bootstrap* bootstrap, absl::Duration timeout)
    : bootstrap_(bootstrap),
      timeout_(timeout),
      forever_(timeout > kForever),
      deadline_(RealClock().Now() + std::min(timeout, kForever)) {}

absl::Status Watch::Check() const {
  if (absl::Status alive = bootstrap_->Alive(); !alive.ok()) return alive;
  if (!forever_ && RealClock().Now() >= deadline_) {
    return absl::DeadlineExceededError(absl::StrCat("not done within ", absl::FormatDuration(timeout_)));
  }
  return absl::OkStatus();
}

absl::Duration Watch::Left() const { return std::max(absl::ZeroDuration(), deadline_ - RealClock().Now()); }

}  // namespace gtrain::comm
