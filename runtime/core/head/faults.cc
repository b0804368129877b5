#include "runtime/core/head/faults.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/probe.h"
#include "base/units.h"
#include "runtime/core/head/gang.h"
#include "runtime/core/head/job_life.h"
#include "runtime/core/head/leaves.h"
#include "runtime/core/head/newcomers.h"
#include "runtime/core/head/restart_policy.h"
#include "runtime/core/head/sizing.h"
#include "runtime/core/head/survivor_save.h"
#include "runtime/core/values/rank_notes.h"

namespace gtrain::core {
namespace {

constexpr size_t kFaultTailBytes = 16 << 10;  // of the first fault
// A program that never reports a step is taken to have made progress after this long.
constexpr absl::Duration kSilentProgress = absl::Minutes(5);
constexpr size_t kMessageBytesMax = 2 << 10;  // of a fault

// An end of its own that is no good one. What an agent ends it calls stopped.
bool EndedBadly(const RankExit& exit) {
  if (exit.cause == ExitCause::kStopped) return false;
  return exit.cause != ExitCause::kExited || (exit.exit_code != 0 && exit.exit_code != kExitSaved);
}

// Behind what the fault says: the rank that had ended well by then, if one had.
void NameWhoLeft(const Job& job, FaultRecord& fault) {
  const auto left = std::ranges::find_if(job.record.exits, [](const RankExit& exit) {
    return exit.cause == ExitCause::kExited && exit.exit_code == 0;
  });
  if (left == job.record.exits.end()) return;
  GT_PROBE("head.names_who_left");
  const std::string who =
      absl::StrCat("; rank ", left->rank, " had ended with exit code 0 while it still ran");
  fault.message = absl::StrCat(Shortened(std::move(fault.message), kMessageBytesMax - who.size()), who);
}

}  // namespace

Faults::Faults(HeadContext& context, HeadModel& model, JobLife& life, Sizing& sizing, Leaves& leaves,
               Newcomers& newcomers)
    : context_(context),
      model_(model),
      config_(context.config()),
      life_(life),
      sizing_(sizing),
      leaves_(leaves),
      newcomers_(newcomers) {}

FaultRecord Faults::FaultOf(const Job& job, const RankExit& exit) const {
  FaultRecord fault;
  fault.kind = KindOf(exit);
  fault.rank = exit.rank;
  fault.node = PlaceOfRank(*job.record.grant, exit.rank).node;
  fault.hostname = model_.Hostname(fault.node);
  fault.cause = exit.cause;
  fault.exit_code = exit.exit_code;
  fault.signal = exit.signal;
  const std::string what = exit.storage.empty() ? DescribeExit(exit) : exit.storage;
  fault.message =
      absl::StrCat("rank ", exit.rank, " on ", fault.hostname, ": ", what, exit.message.empty() ? "" : " (",
                   exit.message, exit.message.empty() ? "" : ")");
  fault.tail = LastBytes(exit.tail, kFaultTailBytes);
  if (fault.tail.empty()) {
    if (const HeldTail* tail = model_.tails.Find({job.record.id, exit.generation, exit.rank, true})) {
      fault.tail = LastBytes(tail->text, kFaultTailBytes);
    }
  }
  fault.signature = SignatureOf(exit);
  return fault;
}

void Faults::Fail(Job& job, FaultRecord fault, Instant now) {
  constexpr size_t kFaultsKept = 32;
  if (!job.Live()) return;
  sizing_.KeepWhatWorked(job, now);
  Excuse(job, fault, context_.step_at());
  fault.generation = job.record.generation;
  fault.step = job.top_step;
  fault.at = context_.Wall(now);
  const bool silent = !job.top_step && job.run_mark && job.any_started &&
                      job.RunTime(now) >= kSilentProgress * (job.record.restarts + 1);
  fault.progressed = job.top_step.has_value() || job.checkpointed ||
                     (silent && fault.kind != FaultKind::kStorage);  // it was waiting, not working
  // Ranks that saved and ask to be run again are given the time to finish saving.
  const absl::Duration grace = fault.kind == FaultKind::kSaved       ? job.spec.stop_grace
                               : fault.kind == FaultKind::kPreempted ? leaves_.LeaveGrace(job, now)
                                                                     : config_.reform_grace;
  fault.message = Shortened(std::move(fault.message), kMessageBytesMax);
  // In place all ranks train to the end of the run, so an error may be that one of them has left.
  if (fault.kind == FaultKind::kCrash && fault.cause == ExitCause::kExited && job.ProcessesStay())
    NameWhoLeft(job, fault);
  // A process that is to blame and has not ended must not go on (a hang: its library answers for it). That a
  // machine is silent says nothing of the first of its ranks.
  if (fault.rank >= 0 && fault.cause != ExitCause::kLost && job.ExitOf(fault.rank) == nullptr)
    job.hung.insert(ProcessOf(*job.record.grant, fault.rank));
  const std::string message = fault.message;
  if (!IsPlanned(fault)) job.goodput.CountLoss();
  context_.Emit(job, IsPlanned(fault) ? "resize" : "fault", message);
  job.record.faults.push_back(std::move(fault));
  job.fault_times.push_back(now);
  if (job.record.faults.size() > kFaultsKept) {
    // The first fault stays for the report.
    const int second = FirstFault(job.record.faults) == job.record.faults.data() ? 1 : 0;
    job.record.faults.erase(job.record.faults.begin() + second);
    job.fault_times.erase(job.fault_times.begin() + second);
  }
  life_.BeginEnding(job, Ending::kReform, EndMode::kReform, grace, message, now);
}

void Faults::RanksLost(Job& job, const Node& node, const std::string& why, Instant now) {
  if (!job.Live() || !job.HoldsNode(node.record.id)) return;
  FaultRecord fault;
  fault.kind = FaultKind::kInfrastructure;
  fault.cause = ExitCause::kLost;
  fault.node = node.record.id;
  fault.hostname = node.record.hostname;
  fault.message = absl::StrCat("node ", node.record.hostname, " is lost: ", why);
  for (const RankPlace& place : job.record.grant->ranks) {
    if (place.node != node.record.id || job.ExitOf(place.rank) != nullptr || fault.rank >= 0) continue;
    fault.rank = place.rank;
    const HeldTail* tail = model_.tails.Find({job.record.id, job.record.generation, place.rank, true});
    if (tail != nullptr) fault.tail = tail->text;
  }
  if (fault.rank >= 0) return Fail(job, std::move(fault), now);
  newcomers_.OnNodeLost(job, node.record.id, now);  // its ranks had all ended well, or it has none
  sizing_.SayHowItRuns(job);
}

// A rank that ends badly after it was told that its machine leaves, and a machine that is lost after it said
// so, are what the notice was about. A program that asks not to be restarted is believed.
void Faults::Excuse(const Job& job, FaultRecord& fault, Instant now) const {
  if (fault.kind != FaultKind::kCrash && fault.kind != FaultKind::kInfrastructure) return;
  if (fault.cause == ExitCause::kExited && fault.exit_code == kExitNoRestart) return;
  const auto it = model_.nodes.find(fault.node);
  const bool node_leaves = it != model_.nodes.end() && it->second.Leaving();
  if (!job.MayActOnNotice(now) && !(node_leaves && fault.kind == FaultKind::kInfrastructure)) return;
  GT_PROBE("head.fault_excused");
  fault.kind = FaultKind::kPreempted;
  if (job.leave)
    absl::StrAppend(&fault.message, "; node ", job.leave->hostname, " is leaving: ", job.leave->source);
}

bool Faults::AwaitsCause(Job& job, const RankExit& exit, Instant now) {
  if (exit.cause != ExitCause::kExited || KindOf(exit) != FaultKind::kSaved) return false;
  if (job.MayActOnNotice(now)) return false;  // they save and go because a machine leaves
  GT_PROBE("head.awaits_cause_of_exit75");
  if (!job.cause_at) job.cause_at = now + config_.cause_grace;
  return true;
}

void Faults::FailBy75(Job& job, Instant now) {
  job.cause_at.reset();
  const auto first = std::ranges::find_if(job.record.exits, [](const RankExit& exit) {
    return exit.cause == ExitCause::kExited && KindOf(exit) == FaultKind::kSaved;
  });
  if (first != job.record.exits.end()) Fail(job, FaultOf(job, *first), now);
}

// ---------------------------------------------------------------- what follows

// The rank whose end the head heard first may have ended only because another one met a storage fault; by now
// all exits are here. Storage faults in a row share one record: however long the storage is away, the other
// faults of the job are remembered.
void Faults::FindStorageFault(Job& job) {
  std::vector<FaultRecord>& faults = job.record.faults;
  FaultRecord& last = faults.back();
  const bool by_itself =
      last.kind == FaultKind::kCrash || last.kind == FaultKind::kOom || last.kind == FaultKind::kSaved;
  if (by_itself && !(last.cause == ExitCause::kExited && last.exit_code == kExitNoRestart)) {
    const auto met = std::find_if(job.record.exits.begin(), job.record.exits.end(), [](const RankExit& exit) {
      return MetStorageFault(exit) || (exit.cause == ExitCause::kStopped && !exit.storage.empty());
    });
    if (met != job.record.exits.end()) {
      GT_PROBE("head.storage_fault_of_another_rank");
      FaultRecord found = FaultOf(job, *met);
      found.kind = FaultKind::kStorage;
      found.generation = last.generation;
      found.step = last.step;
      found.at = last.at;
      found.committed = last.committed;
      found.progressed = last.step.has_value() || job.checkpointed;
      last = std::move(found);
      context_.Emit(job, "fault", last.message);
    } else if (const auto note = job.rank_notes.find(kStorageNote);
               note != job.rank_notes.end() && !note->second.empty() &&
               job.record.exits.size() < job.ranks.size()) {
      // The node of the rank with this note does not answer any more: its earlier note counts.
      last.kind = FaultKind::kStorage;
      last.message = Shortened(note->second, kMessageBytesMax);
      context_.Emit(job, "fault", last.message);
    }
  }
  if (faults.size() < 2 || last.kind != FaultKind::kStorage || last.progressed) return;
  FaultRecord& before = faults[faults.size() - 2];
  if (before.kind != FaultKind::kStorage) return;
  last.tries = before.tries + 1;
  before = std::move(last);
  faults.pop_back();
  job.fault_times.erase(job.fault_times.end() - 2);
}

void Faults::WaitForStorage(Job& job, absl::Duration delay, Instant now) {
  GT_PROBE("head.waits_for_storage");
  const FaultRecord& fault = job.record.faults.back();
  job.record.waits_for_storage = true;
  job.not_before = now + delay;
  job.blocked_by = {
      {.node = "",
       .constraint = Shortened(absl::StrCat("storage: ", fault.message), 1 << 10),
       .room = 0,
       .held_by = {},
       .unblocked_by = absl::StrCat(
           "the storage of ", job.spec.checkpoint.uri.empty() ? "its checkpoints" : job.spec.checkpoint.uri,
           " answering again: the job tries at most ", PrintDuration(kBackoffMax), " apart, or `gtrain stop ",
           job.record.id.value, "`")}};
}

// A rank that cannot go on without another one says 75, and its end may be heard before that of the one whose
// error it was. By now all exits are here.
void Faults::FindCauseOfExit75(Job& job) {
  FaultRecord& last = job.record.faults.back();
  if (last.kind != FaultKind::kSaved) return;
  for (const RankExit& exit : job.record.exits) {
    if (!EndedBadly(exit)) continue;
    GT_PROBE("head.cause_of_exit75");
    FaultRecord found = FaultOf(job, exit);
    found.generation = last.generation;
    found.step = last.step;
    found.at = last.at;
    found.committed = last.committed;
    found.progressed = last.progressed;
    Excuse(job, found, context_.step_at());
    last = std::move(found);
    return context_.Emit(job, "fault", last.message);
  }
}

// Exit 75 says that the job goes on behind what it saved. A program that says so and has saved nothing, on
// machines that all stay, would come back for ever.
void Faults::ChargeUnlessEarned(Job& job) {
  FaultRecord& last = job.record.faults.back();
  if (last.kind != FaultKind::kSaved || job.MayActOnNotice(context_.step_at()) ||
      SavedMore(job.record.faults))
    return;
  if (!job.broken_links.empty()) return;
  for (const NodePlace& place : job.record.grant->nodes) {
    const auto node = model_.nodes.find(place.node);
    if (node == model_.nodes.end() || node->second.state == NodeState::kDead || node->second.Leaving())
      return;
  }
  GT_PROBE("head.exit75_charged");
  last.kind = FaultKind::kCrash;
  last.signature.clear();  // it is no error; the budget ends it
  absl::StrAppend(&last.message, ", but no checkpoint of a higher step was committed since the last one");
  NameWhoLeft(job, last);
  context_.Emit(job, "fault", last.message);
}

// Several ranks may end at once, and the one that is heard of first is called the fault. By now all exits are
// here, so the fault says who else ended by itself.
void Faults::NameTheOthers(Job& job) {
  constexpr size_t kNamed = 6;
  FaultRecord& last = job.record.faults.back();
  if (IsPlanned(last)) return;
  std::vector<int> others;
  for (const RankExit& exit : job.record.exits) {
    if (exit.rank != last.rank && EndedBadly(exit)) others.push_back(exit.rank);
  }
  if (others.empty()) return;
  GT_PROBE("head.names_the_others");
  const size_t named = std::min(others.size(), kNamed);
  std::ranges::partial_sort(others, others.begin() + static_cast<ptrdiff_t>(named));
  const std::string who = absl::StrCat(
      "; ", others.size(), last.rank >= 0 ? " more" : "", others.size() == 1 ? " rank" : " ranks",
      " ended with it: ", absl::StrJoin(others.begin(), others.begin() + named, ", "),
      named < others.size() ? ", ..." : "");
  last.message = absl::StrCat(Shortened(std::move(last.message), kMessageBytesMax - who.size()), who);
}

void Faults::DecideAfterFault(Job& job, Instant now) {
  job.written.newest_fault = false;
  std::optional<int64_t>& committed = job.record.faults.back().committed;
  for (const FaultRecord& fault : job.record.faults) committed = std::max(committed, fault.committed);
  if (job.checkpoint) committed = std::max(committed.value_or(job.checkpoint->step), job.checkpoint->step);
  // What processes that go on have in memory is as good as saved.
  const bool kept = job.SurvivorsWait();
  if (const std::optional<int64_t> step = job.record.faults.back().step; kept && step)
    committed = std::max(committed.value_or(*step), *step);
  if (kept && committed) job.record.faults.back().progressed = true;  // who goes on is past its first step
  FindStorageFault(job);
  FindCauseOfExit75(job);
  ChargeUnlessEarned(job);
  NameTheOthers(job);
  if (job.record.after_save != Ending::kNone) {
    if (!SurvivorSave::IsDue(job)) life_.FinishAfterSave(job);  // else those that are left try again
    return;
  }
  if (sizing_.GoesBack(job, now)) return;
  std::vector<PastFault> past;
  for (size_t i = 0; i < job.record.faults.size(); ++i)
    past.push_back({&job.record.faults[i], job.fault_times[i]});
  const FaultRecord& fault = job.record.faults.back();
  const RestartVerdict verdict = DecideRestart(job.spec.restart, past, now, context_.rng());
  if (!verdict.restart) {
    if (sizing_.GoesOnWithoutNewcomer(job, now)) return;
    GT_PROBE("head.no_more_restarts");
    return life_.FinishSaved(job, Ending::kFail, absl::StrCat(fault.message, "; ", verdict.reason));
  }
  if (fault.kind == FaultKind::kStorage) {
    WaitForStorage(job, verdict.delay, now);
    const absl::Duration shown = std::max(absl::Seconds(1), absl::Floor(verdict.delay, absl::Seconds(1)));
    return life_.Move(job, JobState::kWaiting,
                      absl::StrCat("storage: ", fault.message, "; ", verdict.reason, ", next try in ",
                                   PrintDuration(shown)));
  }
  if (Charged(fault.kind)) ++job.record.restarts;
  std::string again;
  if (verdict.delay > absl::ZeroDuration() && Sizing::MayGoOnAlone(job)) {
    // They wait for nobody else's process; the job grows again as it does where there is room.
    GT_PROBE("head.goes_on_alone");
    job.sizing.alone = true;
    again = ", the others go on at once, alone at first";
  } else if (verdict.delay > absl::ZeroDuration()) {
    GT_PROBE("head.backoff");
    job.not_before = now + verdict.delay;
    constexpr absl::Duration kShown = absl::Milliseconds(100);  // less of it would be "again in 0"
    again = absl::StrCat(", again in ",
                         absl::FormatDuration(std::max(kShown, absl::Trunc(verdict.delay, kShown))));
  }
  life_.Move(job, JobState::kReconfiguring, absl::StrCat(fault.message, "; ", verdict.reason, again));
}

}  // namespace gtrain::core
