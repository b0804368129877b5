#include "comm/port/watch.h"

#include <algorithm>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace gtrain::comm {
namespace {
constexpr absl::Duration kForever = absl::Hours(24 * 365);
// A payload marks a notice, not its words: a program may say anything when it gives up.
constexpr char kNoticePayload[] = "gtrain/notice";
constexpr char kKnownToAllPayload[] = "gtrain/known-to-all";
}  // namespace

absl::Status GaveUp(absl::string_view notice) {
  absl::Status status = absl::UnavailableError(notice);
  if (absl::StrContains(notice, kGaveUp)) status.SetPayload(kNoticePayload, absl::Cord(notice));
  return status;
}

std::string NoticeIn(const absl::Status& status) {
  const auto notice = status.GetPayload(kNoticePayload);
  return notice ? std::string(*notice) : "";
}

absl::Status KnownToAll(absl::Status status) {
  status.SetPayload(kKnownToAllPayload, absl::Cord());
  return status;
}

bool IsKnownToAll(const absl::Status& status) { return status.GetPayload(kKnownToAllPayload).has_value(); }

Instant Watch::Deadline() const {
  if (!deadline_) deadline_ = RealClock().Now() + std::min(timeout_, kForever);
  return *deadline_;
}

absl::Status Annotate(const absl::Status& status, absl::string_view what) {
  absl::Status annotated(status.code(), absl::StrCat(what, ": ", status.message()));
  status.ForEachPayload(
      [&](absl::string_view url, const absl::Cord& payload) { annotated.SetPayload(url, payload); });
  return annotated;
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
