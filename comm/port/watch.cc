#include "comm/port/watch.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace gtrain::comm {
namespace {
constexpr absl::Duration kForever = absl::Hours(24 * 365);
}  // namespace

absl::Status GaveUp(absl::string_view notice) { return absl::UnavailableError(notice); }

std::string NoticeIn(const absl::Status& status) {
  const absl::string_view text = status.message();
  const size_t verb = text.find(kGaveUp);
  if (!absl::IsUnavailable(status) || verb == text.npos) return "";
  const size_t name = text.rfind("rank ", verb);
  return name == text.npos ? "" : std::string(text.substr(name));
}

Instant Watch::Deadline() const {
  if (!deadline_) deadline_ = RealClock().Now() + std::min(timeout_, kForever);
  return *deadline_;
}

absl::Status Watch::Check() const {
  if (absl::Status alive = bootstrap_->Alive(); !alive.ok()) return alive;
  if (interrupt_ != nullptr) GT_RETURN_IF_ERROR(interrupt_->Check());
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
