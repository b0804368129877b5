#include "runtime/core/agent/machine_notice.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/units.h"

namespace gtrain::core {
namespace {

std::string Words(const NodeNotice& before, const NodeNotice& notice) {
  if (IsNotHeard(notice)) return notice.source;
  if (notice.kind != NoticeKind::kNone) {
    return absl::StrCat("the cloud says: ", notice.source, ", ", Name(notice.kind), " in ",
                        PrintDuration(absl::Floor(notice.left, absl::Seconds(1))));
  }
  return IsNotHeard(before) ? "the cloud is heard again" : "the cloud says: the notice is taken back";
}

}  // namespace

// A repeated notice is news only when its time comes nearer. An answer without a notice is news only after
// one with a notice, or once: the head may remember a notice that was taken back while no agent was running.
void MachineNotice::OnCloudSays(const CloudSays& event) {
  constexpr absl::Duration kNearer = absl::Seconds(1);
  const NodeNotice& notice = event.notice;
  const bool same = notice.kind == notice_.kind && notice.id == notice_.id;
  if (notice_sequence_ > 0 && same && context_.now() + notice.left + kNearer > notice_at_) return;
  if (notice.kind != NoticeKind::kNone || notice_sequence_ > 0) context_.Say(Words(notice_, notice));
  notice_ = notice;
  notice_at_ = context_.now() + notice.left;
  ++notice_sequence_;
  notice_acked_ = false;
  TellNotice();
}

void MachineNotice::TellNotice() {
  if (notice_sequence_ == 0 || notice_acked_) return;
  NodeNotice notice = notice_;
  notice.left = std::max(absl::ZeroDuration(), notice_at_ - context_.now());
  context_.Tell(NoticeSeen{notice_sequence_, std::move(notice)});
}

void MachineNotice::OnAck(const AckNotice& ack) {
  if (ack.sequence == notice_sequence_) notice_acked_ = true;
}

}  // namespace gtrain::core
