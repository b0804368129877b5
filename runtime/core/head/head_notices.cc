// Machines that leave: a cloud's notice or a person's drain.
//
// Either becomes part of the node's record before anything rests on it. From then on nothing new is placed
// there, and each job with ranks on it is given what is left of the time, counted back from the moment the
// machine goes:
//
//     tell_at ---- preempt.lead ---- end_at -- grace -- reserve -- at
//
// At tell_at all ranks of the job are told (it takes all of them to save); at end_at, or as soon as a
// checkpoint made after the telling is committed and other machines have room, the generation is revoked and
// the next one is placed elsewhere. The fault it ends with is charged to nobody.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/probe.h"
#include "base/units.h"
#include "nlohmann/json.hpp"
#include "runtime/core/head/head_state.h"
#include "runtime/core/head/restart_policy.h"
#include "runtime/core/values/authority.h"

namespace gtrain::core {
namespace {

constexpr absl::Duration kReserve = absl::Seconds(10);       // clocks, messages, the end of processes (P13)
constexpr absl::Duration kFreezeMargin = absl::Seconds(30);  // beyond the freeze that was announced
constexpr absl::Duration kNearer = absl::Seconds(1);         // what counts as another deadline

std::string Rounded(absl::Duration left) { return PrintDuration(absl::Floor(left, absl::Seconds(1))); }

}  // namespace

// The one that goes first.
const NodeNotice& Node::Parting() const {
  if (record.drain.kind != NoticeKind::kLeave) return record.notice;
  if (record.notice.kind != NoticeKind::kLeave) return record.drain;
  return *notice_at <= *drain_at ? record.notice : record.drain;
}

std::optional<Instant> Node::PartsAt() const {
  if (!Leaving()) return std::nullopt;
  return &Parting() == &record.notice ? notice_at : drain_at;
}

void HeadState::RestoreNotices(Node& node, Instant now) {
  // When these were said is not known any more; the agent repeats what the cloud says with the time that is
  // left now.
  if (node.record.notice.kind != NoticeKind::kNone) node.notice_at = now + node.record.notice.left;
  if (node.record.drain.kind != NoticeKind::kNone) node.drain_at = now + node.record.drain.left;
  AllowFreeze(node);
}

void HeadState::AllowFreeze(const Node& node) {
  const NodeNotice& notice = node.record.notice;
  const bool freezes = notice.kind == NoticeKind::kFreeze;
  detector_.Patience(node.record.id, freezes ? notice.frozen + kFreezeMargin : absl::ZeroDuration());
}

void HeadState::OnNoticeSeen(Node& node, const NoticeSeen& seen, Instant now) {
  Send(node.record.id, SendKind::kReply, AckNotice{epoch(), seen.sequence});
  NodeNotice notice = seen.notice;
  if (notice.kind == NoticeKind::kNone) notice = NodeNotice();
  TakeNotice(node, node.record.notice, node.notice_at, std::move(notice), now);
}

// `slot` is one of the node's two. The same notice again may only bring its deadline nearer.
void HeadState::TakeNotice(Node& node, NodeNotice& slot, std::optional<Instant>& at, NodeNotice notice,
                           Instant now) {
  const Instant due = now + notice.left;
  if (slot.kind == notice.kind && slot.id == notice.id && (!at || due + kNearer > *at)) return;
  const bool gone = notice.kind == NoticeKind::kNone;
  if (gone) {
    GT_PROBE("head.notice_withdrawn");
    Say(absl::StrCat(node.record.hostname, ": ", slot.source, " is taken back"));
    at.reset();
  } else {
    GT_PROBE("head.notice_taken");
    Say(absl::StrCat(node.record.hostname, ": ", notice.source, ", ", Name(notice.kind), " in ",
                     Rounded(notice.left)));
    at = due;
  }
  const std::string source = gone ? absl::StrCat(slot.source, " is taken back") : notice.source;
  slot = std::move(notice);
  Write(node.record);
  AllowFreeze(node);
  for (Job* job : LiveJobs()) {
    if (!job->Live() || !job->HoldsNode(node.record.id)) continue;
    Emit(*job, "notice",
         absl::StrCat(node.record.hostname, ": ", source,
                      gone ? "" : absl::StrCat(", ", Name(slot.kind), " in ", Rounded(slot.left))));
    Dirty(*job);
    FindLeave(*job, now);
    LeaveStep(*job, now);
  }
  schedule_ = true;
}

bool HeadState::NeedsNode(const Job& job, const NodeId& node) const {
  return std::any_of(
      job.record.grant->ranks.begin(), job.record.grant->ranks.end(),
      [&](const RankPlace& place) { return place.node == node && job.ExitOf(place.rank) == nullptr; });
}

// Which node of the job's generation goes first, and what becomes of its ranks when.
void HeadState::FindLeave(Job& job, Instant now) {
  if (!job.Live()) return job.leave.reset();
  const Node* first = nullptr;
  for (const NodePlace& place : job.record.grant->nodes) {
    const auto it = nodes_.find(place.node);
    if (it == nodes_.end() || !it->second.Leaving() || !NeedsNode(job, place.node)) continue;
    if (first == nullptr || *it->second.PartsAt() < *first->PartsAt()) first = &it->second;
  }
  if (first == nullptr) {
    const std::optional<JobLeave> had = std::exchange(job.leave, std::nullopt);
    if (!had) return;
    const auto it = nodes_.find(had->node);
    if (it == nodes_.end() || !it->second.Leaving()) WithdrawNotice(job, now);
    return SayHowItRuns(job);
  }
  const Instant at = *first->PartsAt();
  const NodeId& id = first->record.id;
  if (job.leave && job.leave->node == id && job.leave->at == at) return;
  const absl::Duration usable = std::max(absl::ZeroDuration(), at - now - kReserve);
  const absl::Duration grace = std::max(config_.reform_grace, std::min(job.spec.stop_grace, usable / 3));
  const Instant end_at = std::max(now, at - kReserve - grace);
  if (job.told_at && at > *job.told_at + kNearer) WithdrawNotice(job, now);
  job.leave = JobLeave{id,
                       first->record.hostname,
                       first->Parting().source,
                       at,
                       std::max(now, end_at - job.spec.preempt.lead),
                       end_at};
  Move(job, job.record.state,
       absl::StrCat("node ", job.leave->hostname, " is leaving (", job.leave->source,
                    "): the ranks end within ", Rounded(job.leave->end_at - now),
                    " and go on where there is room"));
}

// What comes later than the ranks were told is another notice to them, of which they have yet to hear. They
// do not hear that the first was taken back, so for a while they may still save and end because of it.
void HeadState::WithdrawNotice(Job& job, Instant now) {
  if (!job.told_at) return;
  job.excused_until = std::min(*job.told_at, now + job.spec.stop_grace);
  job.told_at.reset();
  job.saved_since_told = false;
}

bool HeadState::MayActOnNotice(const Job& job, Instant now) const {
  return job.told_at || (job.excused_until && now < *job.excused_until);
}

void HeadState::TellRanks(const Job& job, const NodeId& node, Instant now) {
  Send(node, SendKind::kReply,
       NoticeRanks{epoch(), job.record.id, job.record.generation,
                   std::max(absl::ZeroDuration(), job.leave->at - now), job.notices});
}

void HeadState::LeaveStep(Job& job, Instant now) {
  if (!job.Live() || !job.leave) return;
  if (!NeedsNode(job, job.leave->node)) FindLeave(job, now);
  if (!job.leave) return;
  const JobLeave& leave = *job.leave;
  const bool known = job.told_at && leave.at + kNearer > *job.told_at;
  if (!known && now >= leave.tell_at && now < leave.end_at) {
    GT_PROBE("head.ranks_told_of_notice");
    if (!job.told_at) {  // else it is the same notice, and its end comes nearer
      ++job.notices;
      job.saved_since_told = false;
    }
    job.told_at = leave.at;
    for (const NodePlace& place : job.record.grant->nodes) TellRanks(job, place.node, now);
    Emit(job, "notice",
         absl::StrCat("the ranks are told: ", Rounded(leave.at - now), " left on ", leave.hostname));
    Dirty(job);
  }
  const bool saved = job.told_at && job.saved_since_told;
  const auto fits_elsewhere = [&] {
    CheckViews();
    return PlacementFor(job).placed;
  };
  if (now < leave.end_at && !(saved && fits_elsewhere())) return;
  if (saved) GT_PROBE("head.drained_after_checkpoint");
  GT_PROBE("head.drained");
  FaultRecord fault;
  fault.kind = FaultKind::kPreempted;
  fault.cause = ExitCause::kStopped;
  fault.node = leave.node;
  fault.hostname = leave.hostname;
  fault.message = absl::StrCat("node ", leave.hostname, " is leaving: ", leave.source,
                               saved ? "; a checkpoint was made" : "");
  Fail(job, std::move(fault), now);
}

std::optional<Instant> HeadState::LeaveDeadline(const Job& job) const {
  if (!job.leave) return std::nullopt;
  return job.told_at ? job.leave->end_at : std::min(job.leave->tell_at, job.leave->end_at);
}

// How long ranks have from TERM to KILL when a machine leaves (fault P13).
absl::Duration HeadState::LeaveGrace(const Job& job, Instant now) const {
  if (!job.leave) return job.spec.stop_grace;
  return std::max(config_.reform_grace, std::min(job.spec.stop_grace, job.leave->at - kReserve - now));
}

// A rank that ends badly after it was told that its machine leaves, and a machine that is lost after it said
// so, are what the notice was about. A program that asks not to be restarted is believed.
void HeadState::Excuse(const Job& job, FaultRecord& fault, Instant now) const {
  if (fault.kind != FaultKind::kCrash && fault.kind != FaultKind::kInfrastructure) return;
  if (fault.cause == ExitCause::kExited && fault.exit_code == kExitNoRestart) return;
  const auto it = nodes_.find(fault.node);
  const bool node_leaves = it != nodes_.end() && it->second.Leaving();
  if (!MayActOnNotice(job, now) && !(node_leaves && fault.kind == FaultKind::kInfrastructure)) return;
  GT_PROBE("head.fault_excused");
  fault.kind = FaultKind::kPreempted;
  if (job.leave)
    absl::StrAppend(&fault.message, "; node ", job.leave->hostname, " is leaving: ", job.leave->source);
}

// ---------------------------------------------------------------- by hand

absl::StatusOr<std::string> HeadState::Drain(const Peer& peer, const ClientDrainNode& drain, Instant now) {
  const NodeId id = NodeCalled(drain.node);
  const auto it = nodes_.find(id);
  if (it == nodes_.end()) {
    return absl::NotFoundError(
        absl::StrCat("no node ", Shortened(drain.node, 200),
                     ", or several of that name; `gtrain nodes` lists them with their ids"));
  }
  Node& node = it->second;
  if (drain.undo) {
    TakeNotice(node, node.record.drain, node.drain_at, NodeNotice(), now);
    TakeNotice(node, node.record.notice, node.notice_at, NodeNotice(), now);
    EndAvoidances(id, absl::StrCat("undrained by ", OwnerName(peer)));
  } else {
    NodeNotice notice;
    notice.kind = NoticeKind::kLeave;
    notice.left = drain.left;
    notice.source = Shortened(
        absl::StrCat("drained by ", OwnerName(peer), drain.reason.empty() ? "" : ": ", drain.reason), 400);
    notice.id = notice.source;
    TakeNotice(node, node.record.drain, node.drain_at, std::move(notice), now);
  }
  nlohmann::json jobs = nlohmann::json::array();
  for (const auto& [job_id, job] : jobs_) {
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
