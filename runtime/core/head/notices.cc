// Nodes that leave: a cloud's notice or a person's drain. Either becomes part of the node's record before
// anything rests on it, and from then on nothing new is placed there; leaves.cc tells what becomes of the
// jobs that are there.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/probe.h"
#include "nlohmann/json.hpp"
#include "runtime/core/head/leaves.h"
#include "runtime/core/head/links.h"
#include "runtime/core/head/membership.h"
#include "runtime/core/values/authority.h"

namespace gtrain::core {
namespace {

constexpr absl::Duration kFreezeMargin = absl::Seconds(30);  // beyond the freeze that was announced

std::string Words(const NodeNotice& before, const NodeNotice& notice) {
  if (IsNotHeard(notice)) return notice.source;
  if (notice.kind != NoticeKind::kNone)
    return absl::StrCat(notice.source, ", ", Name(notice.kind), " in ", Rounded(notice.left));
  if (IsNotHeard(before)) return "notices of its cloud are heard again";
  return absl::StrCat(before.source, " is taken back");
}

}  // namespace

void Membership::RestoreNotices(Node& node, Instant now) {
  // When these were said is not known any more; the agent repeats what the cloud says with the time that is
  // left now.
  if (node.record.notice.kind != NoticeKind::kNone) node.notice_at = now + node.record.notice.left;
  if (node.record.drain.kind != NoticeKind::kNone) node.drain_at = now + node.record.drain.left;
  AllowFreeze(node);
}

void Membership::AllowFreeze(const Node& node) {
  const NodeNotice& notice = node.record.notice;
  const bool freezes = notice.kind == NoticeKind::kFreeze;
  detector_.Patience(node.record.id, freezes ? notice.frozen + kFreezeMargin : absl::ZeroDuration());
}

void Membership::OnNoticeSeen(Node& node, const NoticeSeen& seen, Instant now) {
  context_.Send(node.record.id, SendKind::kReply, AckNotice{model_.epoch(), seen.sequence});
  NodeNotice notice = seen.notice;
  if (notice.kind == NoticeKind::kNone) notice = NodeNotice();
  // An agent that was started again does not know what the one before it heard.
  const NodeNotice& stands = node.record.notice;
  if (IsNotHeard(notice) && stands.kind != NoticeKind::kNone && !IsNotHeard(stands)) return;
  TakeNotice(node, node.record.notice, node.notice_at, std::move(notice), now);
}

// `slot` is one of the node's two. A repeated notice may only bring its deadline nearer.
void Membership::TakeNotice(Node& node, NodeNotice& slot, std::optional<Instant>& at, NodeNotice notice,
                            Instant now) {
  const Instant due = now + notice.left;
  if (slot.kind == notice.kind && slot.id == notice.id && (!at || due + kNearer > *at)) return;
  const std::string words = absl::StrCat(node.record.hostname, ": ", Words(slot, notice));
  context_.Say(words);
  if (notice.kind == NoticeKind::kNone) {
    GT_PROBE("head.notice_withdrawn");
    at.reset();
  } else {
    GT_PROBE("head.notice_taken");
    at = due;
  }
  slot = std::move(notice);
  context_.Write(node.record);
  AllowFreeze(node);
  for (Job* job : model_.LiveJobs()) {
    if (!job->Live() || !job->HoldsNode(node.record.id)) continue;
    context_.Emit(*job, "notice", words);
    context_.Dirty(*job);
    leaves_.FindLeave(*job, now);
    leaves_.LeaveStep(*job, now);
  }
  model_.schedule = true;
}

absl::StatusOr<std::string> Membership::Drain(const Peer& peer, const ClientDrainNode& drain, Instant now) {
  const NodeId id = NodeCalled(drain.node);
  const auto it = model_.nodes.find(id);
  if (it == model_.nodes.end()) {
    return absl::NotFoundError(
        absl::StrCat("no node ", Shortened(drain.node, 200),
                     ", or several of that name; `gtrain nodes` lists them with their ids"));
  }
  Node& node = it->second;
  const std::string source = Shortened(
      absl::StrCat("drained by ", OwnerName(peer), drain.reason.empty() ? "" : ": ", drain.reason), 400);
  if (drain.undo && drain.own) {
    if (node.record.drain.source == source)
      TakeNotice(node, node.record.drain, node.drain_at, NodeNotice(), now);
  } else if (drain.undo) {
    TakeNotice(node, node.record.drain, node.drain_at, NodeNotice(), now);
    TakeNotice(node, node.record.notice, node.notice_at, NodeNotice(), now);
    links_.EndAvoidances(id, absl::StrCat("undrained by ", OwnerName(peer)));
  } else {
    NodeNotice notice;
    notice.kind = NoticeKind::kLeave;
    notice.left = drain.left;
    notice.source = source;
    notice.id = notice.source;
    TakeNotice(node, node.record.drain, node.drain_at, std::move(notice), now);
  }
  nlohmann::json jobs = nlohmann::json::array();
  for (const auto& [job_id, job] : model_.jobs) {
    if (job.Live() && job.leave && job.leave->node == id) jobs.push_back(job_id.value);
  }
  nlohmann::json document = {{"node", id.value},
                             {"hostname", node.record.hostname},
                             {"leaving", node.Leaving()},
                             {"jobs", std::move(jobs)}};
  // An earlier notice may leave less time than this one asks for.
  if (const std::optional<Instant> at = node.PartsAt())
    document["left_seconds"] = std::max<int64_t>(0, absl::ToInt64Seconds(*at - now));
  return document.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace gtrain::core
