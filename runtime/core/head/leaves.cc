// Each job with ranks on a machine that leaves is given what is left of the time, counted back from the
// moment the machine goes:
//
//     tell_at ---- preempt.lead ---- end_at -- grace -- reserve -- at
//
// At tell_at all ranks of the job are told (it takes all of them to save); at end_at, or as soon as a
// checkpoint made after the telling is committed and other machines have room, the generation is revoked and
// the next one is placed elsewhere. The fault it ends with is charged to nobody.
//
// Processes that go on lose nothing when their generation ends, whenever that is: where they would be fewer
// without the machine they use it to end_at, which is later than for others.
#include "runtime/core/head/leaves.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/probe.h"
#include "runtime/core/head/faults.h"
#include "runtime/core/head/job_life.h"
#include "runtime/core/head/placer.h"
#include "runtime/core/head/sizing.h"

namespace gtrain::core {
namespace {

constexpr absl::Duration kReserve = absl::Seconds(10);  // clocks, messages, the end of processes (P13)

// A state's reason is read long after it was said, so it names a time and not what is left of it.
std::string ClockText(absl::Time at, absl::Time now) {
  const char* format = at - now < absl::Hours(20) ? "%H:%M:%S UTC" : "%Y-%m-%d %H:%M:%S UTC";
  return absl::FormatTime(format, at, absl::UTCTimeZone());
}

}  // namespace

Leaves::Leaves(HeadContext& context, HeadModel& model, Placer& placer, JobLife& life, Faults& faults,
               Sizing& sizing)
    : context_(context),
      model_(model),
      config_(context.config()),
      placer_(placer),
      life_(life),
      faults_(faults),
      sizing_(sizing) {}

void Leaves::FindLeave(Job& job, Instant now) {
  if (!job.Live()) return job.leave.reset();
  const Node* first = nullptr;
  for (const NodePlace& place : job.record.grant->nodes) {
    const auto it = model_.nodes.find(place.node);
    if (it == model_.nodes.end() || !it->second.Leaving() || !job.NeedsNode(place.node)) continue;
    if (first == nullptr || *it->second.PartsAt() < *first->PartsAt()) first = &it->second;
  }
  if (first == nullptr) {
    const std::optional<JobLeave> had = std::exchange(job.leave, std::nullopt);
    if (!had) return;
    const auto it = model_.nodes.find(had->node);
    if (it == model_.nodes.end() || !it->second.Leaving()) WithdrawNotice(job, now);
    return sizing_.SayHowItRuns(job);
  }
  const Instant at = *first->PartsAt();
  const NodeId& id = first->record.id;
  if (job.leave && job.leave->node == id && job.leave->at == at) return;
  const absl::Duration usable = std::max(absl::ZeroDuration(), at - now - kReserve);
  // Processes that go on have let go of their generation within milliseconds, and have nothing to save.
  const absl::Duration grace =
      job.ProcessesStay() ? config_.reform_grace
                          : std::max(config_.reform_grace, std::min(job.spec.stop_grace, usable / 3));
  const Instant end_at = std::max(now, at - kReserve - grace);
  if (job.told_at && at > *job.told_at + kNearer) WithdrawNotice(job, now);
  job.leave = JobLeave{id,
                       first->record.hostname,
                       first->Parting().source,
                       at,
                       std::max(now, end_at - job.spec.preempt.lead),
                       end_at};
  life_.Move(
      job, job.record.state,
      absl::StrCat("node ", job.leave->hostname, " is leaving (", job.leave->source, "): the ranks end by ",
                   ClockText(context_.Wall(end_at), context_.Wall(now)), " and go on where there is room"));
}

// A notice that comes after the ranks were told is another one to them, of which they have yet to hear. They
// do not hear that the first was taken back, so for a while they may still save and end because of it.
void Leaves::WithdrawNotice(Job& job, Instant now) {
  if (!job.told_at) return;
  job.excused_until = std::min(*job.told_at, now + job.spec.stop_grace);
  job.told_at.reset();
  job.saved_since_told = false;
}

void Leaves::TellRanks(const Job& job, const NodeId& node, Instant now) {
  context_.Send(node, SendKind::kReply,
                NoticeRanks{model_.epoch(), job.record.id, job.record.generation,
                            std::max(absl::ZeroDuration(), job.leave->at - now), job.notices});
}

void Leaves::LeaveStep(Job& job, Instant now) {
  if (!job.Live() || !job.leave) return;
  if (!job.NeedsNode(job.leave->node)) FindLeave(job, now);
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
    context_.Emit(job, "notice",
                  absl::StrCat("the ranks are told: ", Rounded(leave.at - now), " left on ", leave.hostname));
    context_.Dirty(job);
  }
  const bool saved = job.told_at && job.saved_since_told;
  const auto fits_elsewhere = [&] {
    placer_.CheckViews();
    const plan::Placement placement = placer_.PlacementFor(job);
    const auto ranks = static_cast<size_t>(job.record.grant->world_size);
    return placement.placed && (!job.ProcessesStay() || placement.ranks.size() >= ranks);
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
  faults_.Fail(job, std::move(fault), now);
}

std::optional<Instant> Leaves::NextDeadline(const Job& job) const {
  if (!job.leave) return std::nullopt;
  return job.told_at ? job.leave->end_at : std::min(job.leave->tell_at, job.leave->end_at);
}

absl::Duration Leaves::LeaveGrace(const Job& job, Instant now) const {
  if (!job.leave) return job.spec.stop_grace;
  return std::max(config_.reform_grace, std::min(job.spec.stop_grace, job.leave->at - kReserve - now));
}

}  // namespace gtrain::core
