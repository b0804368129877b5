// What agents report about ranks. Every message names its generation: one that is not the granted one is
// dropped and counted, except exits, which are always acknowledged so that nobody repeats them for ever.
#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/probe.h"
#include "runtime/core/head/head_state.h"
#include "runtime/core/head/restart_policy.h"
#include "runtime/core/values/rank_notes.h"

namespace gtrain::core {
namespace {

constexpr size_t kExitTailBytes = 2 << 10;    // of each rank, in the record
constexpr size_t kFaultTailBytes = 16 << 10;  // of the first fault
constexpr absl::Duration kRateStretch = absl::Seconds(30);
constexpr absl::Duration kRateFirst = absl::Seconds(2);
constexpr absl::Duration kRateEvery = absl::Seconds(1);
constexpr absl::Duration kLeftAfter = absl::Seconds(1);
// A program that never reports a step is taken to have made progress after this long.
constexpr absl::Duration kSilentProgress = absl::Minutes(5);

std::string LastBytes(const std::string& text, size_t bytes) {
  return text.size() <= bytes ? text : text.substr(text.size() - bytes);
}

// Ranks report at different moments of a step, and their agents once a second, so only a stretch of many
// reports gives an honest rate: the end of a job that is foretold from it must not jump by a quarter from
// look to look.
void MeasureRate(Job& job, int64_t low, Instant now) {
  auto& over = job.rate_over;
  if (over.empty() || now - over.back().second >= kRateEvery) over.emplace_back(low, now);
  while (over.size() > 2 && now - over.front().second > kRateStretch) over.pop_front();
  // The first of a generation may be of one rank alone, or of a first step that compiled something.
  const auto& [from, since] = over.size() > 2 ? over[1] : over[0];
  if (over.size() > 1 && now - since >= kRateFirst)
    job.steps_per_second = static_cast<double>(low - from) / absl::ToDoubleSeconds(now - since);
}

}  // namespace

// The job whose granted generation the message belongs to, if this node is part of it.
Job* HeadState::CurrentJob(const NodeId& node, const JobId& id, Generation generation) {
  Job* job = FindJob(id);
  if (job == nullptr || IsFinal(job->record.state) || generation != job->record.generation ||
      !job->HoldsNode(node)) {
    ++counters_.stale_dropped;
    return nullptr;
  }
  return job;
}

void HeadState::OnRankStatus(const NodeId& node, const RankStatus& status, Instant now) {
  Job* job = CurrentJob(node, status.job, status.generation);
  if (job == nullptr || status.rank < 0 || status.rank >= static_cast<int>(job->ranks.size())) return;
  if (job->record.grant->ranks[status.rank].node != node) {
    ++counters_.stale_dropped;
    return;
  }
  RankLive& rank = job->ranks[status.rank];
  if (status.step && status.step != rank.status.step) rank.stepped_at = now;
  job->SetStatus(rank, status);
  CountIdle(*job, rank, now);
  if (status.state == RankState::kJoined && !std::exchange(job->record.sdk, true)) Dirty(*job);
  if (status.state != RankState::kStarting) job->SetStarted(rank);
  if (status.step) job->top_step = std::max(job->top_step.value_or(*status.step), *status.step);
  WarnOfDivergence(*job, rank.status);
  MeasurePace(*job, rank);
  UpdateProgress(*job, now);
  RunningIfAllStarted(*job, now);
}

// Once a generation. A loss that is not a number stays in what status says; training goes on, for whether
// that makes sense is the user's to say.
void HeadState::WarnOfDivergence(Job& job, const RankStatus& status) {
  if (!status.diverged || std::exchange(job.record.diverged, true)) return;
  Emit(job, "warning",
       absl::StrCat("the loss of rank ", status.rank, " is not a finite number",
                    status.step ? absl::StrCat(", at step ", *status.step) : ""));
  Dirty(job);
}

// What an exit says of the rank's last step and loss, which no heartbeat has told: they belong to the job's
// end.
void HeadState::TakeLastWords(Job& job, RankLive& rank, const RankExit& exit, Instant now) {
  RankStatus last = rank.status;
  if (exit.step) last.step = exit.step;
  if (exit.loss || exit.diverged) std::tie(last.loss, last.diverged) = std::tie(exit.loss, exit.diverged);
  last.rank = exit.rank;
  job.SetStatus(rank, last);
  if (last.step) job.top_step = std::max(job.top_step.value_or(*last.step), *last.step);
  WarnOfDivergence(job, last);
  UpdateProgress(job, now);
}

// A program may count its steps within an epoch, or go back to a checkpoint by itself. It has begun anew once
// all ranks that tell steps have: one that stands still while another goes round and round is a stall.
bool HeadState::AllBeganAnew(Job& job) {
  int tell = 0;
  for (const auto& [step, ranks] : job.steps) tell += ranks;
  if (job.began_anew < tell) return false;
  for (RankLive& rank : job.ranks) rank.began_anew = false;
  job.began_anew = 0;
  return true;
}

// Programs that report every hundredth step change it seldom, however fast they are.
absl::Duration BetweenSteps(const Job& job) {
  const auto& over = job.rate_over;
  if (over.size() < 2) return absl::ZeroDuration();
  return (over.back().second - over.front().second) / static_cast<int64_t>(over.size() - 1);
}

// The job is where its slowest running rank is.
void HeadState::UpdateProgress(Job& job, Instant now) {
  if (job.steps.empty()) return;
  const int64_t low = job.steps.begin()->first;
  if (job.low_step && low == *job.low_step) return;
  const bool fell = job.low_step && low < *job.low_step;
  if (fell && !AllBeganAnew(job)) return;
  if (fell) job.rate_over.clear();
  MeasureRate(job, low, now);
  job.low_step = low;
  job.progress_at = now;
  job.rank_notes.erase(kProgressNote);
  if (job.stalled) {
    GT_PROBE("head.stall_over");
    job.stalled.reset();
    Emit(job, "stall", absl::StrCat("steps again: ", low));
    Dirty(job);
  }
}

void HeadState::OnStarted(const NodeId& node, const RanksStarted& started, Instant now) {
  Job* job = CurrentJob(node, started.job, started.generation);
  if (job == nullptr) return;
  for (const RankPlace& place : job->record.grant->ranks) {
    if (place.node == node) job->SetStarted(job->ranks[place.rank]);
  }
  for (const RankStatus& status : started.ranks) OnRankStatus(node, status, now);
  RunningIfAllStarted(*job, now);
}

void HeadState::RunningIfAllStarted(Job& job, Instant now) {
  if (!job.Live() || job.record.state == JobState::kRunning || job.not_started > 0) return;
  job.start_deadline.reset();
  job.progress_at = now;
  Move(job, JobState::kRunning, RunningReason(job));
  // A person did not want to wait for a checkpoint, and the ranks had not all started then.
  if (job.sizing.at_once && job.record.exits.size() < job.ranks.size()) Resize(job, now);
}

void HeadState::OnExited(const NodeId& node, const RankExit& exit, Instant now) {
  Send(node, SendKind::kReply, AckExit{epoch(), exit.job, exit.generation, exit.rank});
  Job* job = CurrentJob(node, exit.job, exit.generation);
  if (job == nullptr || exit.rank < 0 || exit.rank >= static_cast<int>(job->ranks.size())) return;
  if (job->record.grant->ranks[exit.rank].node != node || job->ExitOf(exit.rank) != nullptr) return;
  TakeLastWords(*job, job->ranks[exit.rank], exit, now);
  RankExit kept = exit;
  kept.tail = LastBytes(exit.tail, kExitTailBytes);
  job->SetExit(job->ranks[exit.rank], std::move(kept));
  Dirty(*job);
  if (!job->Live()) GT_PROBE("head.exit_after_revoke");
  if (!job->Live()) return;  // the consequence of a revoke, not a cause
  const bool well = exit.cause == ExitCause::kExited && exit.exit_code == 0;
  const bool all = job->record.exits.size() == job->ranks.size();
  if (!well && !AwaitsCause(*job, exit, now)) return Fail(*job, FaultOf(*job, exit), now);
  if (all && job->cause_at) return FailBy75(*job, now);
  RunningIfAllStarted(*job, now);
  if (all) {
    // Many programs save at SIGTERM and end with 0, which says that the job is done.
    const char* early = !MayActOnNotice(*job, now)
                            ? ""
                            : " after the notice that a machine leaves (a program that is to go on "
                              "elsewhere ends with 75 then)";
    const std::string who =
        job->ranks.size() == 1 ? "its rank" : absl::StrCat("all ", job->ranks.size(), " ranks");
    Finish(*job, JobState::kSucceeded, absl::StrCat(who, " ended with exit code 0", early));
  }
  if (!all && !job->left_at) job->left_at = now + kLeftAfter;
}

// A rank that cannot go on without another one says 75 at once, while that one still unwinds. Whoever ended
// now would be ended by us, and its error lost. What says why, or the last exit, ends the wait.
bool HeadState::AwaitsCause(Job& job, const RankExit& exit, Instant now) {
  if (exit.cause != ExitCause::kExited || KindOf(exit) != FaultKind::kSaved) return false;
  if (MayActOnNotice(job, now)) return false;  // they save and go because a machine leaves
  GT_PROBE("head.awaits_cause_of_exit75");
  if (!job.cause_at) job.cause_at = now + config_.cause_grace;
  return true;
}

void HeadState::FailBy75(Job& job, Instant now) {
  job.cause_at.reset();
  const auto first = std::ranges::find_if(job.record.exits, [](const RankExit& exit) {
    return exit.cause == ExitCause::kExited && KindOf(exit) == FaultKind::kSaved;
  });
  if (first != job.record.exits.end()) Fail(job, FaultOf(job, *first), now);
}

// The ranks of most jobs end within a moment of each other and nobody is told anything. n ranks that end one
// by one cost a message a node every kLeftAfter, of at most 4 n bytes. `node`: that one alone; else all.
void HeadState::SayWhoLeft(const Job& job, const NodeId* node) {
  std::vector<int> left;
  for (const RankExit& exit : job.record.exits) {
    if (exit.cause == ExitCause::kExited && exit.exit_code == 0) left.push_back(exit.rank);
  }
  if (left.empty() || !job.Live()) return;
  GT_PROBE("head.ranks_left");
  const RanksLeft message{epoch(), job.record.id, job.record.generation, std::move(left)};
  for (const NodePlace& place : job.record.grant->nodes) {
    if (node == nullptr || place.node == *node) Send(place.node, SendKind::kReply, message);
  }
}

FaultRecord HeadState::FaultOf(const Job& job, const RankExit& exit) const {
  FaultRecord fault;
  fault.kind = KindOf(exit);
  fault.rank = exit.rank;
  fault.node = job.record.grant->ranks[exit.rank].node;
  fault.hostname = Hostname(fault.node);
  fault.cause = exit.cause;
  fault.exit_code = exit.exit_code;
  fault.signal = exit.signal;
  const std::string what = exit.storage.empty() ? DescribeExit(exit) : exit.storage;
  fault.message =
      absl::StrCat("rank ", exit.rank, " on ", fault.hostname, ": ", what, exit.message.empty() ? "" : " (",
                   exit.message, exit.message.empty() ? "" : ")");
  fault.tail = LastBytes(exit.tail, kFaultTailBytes);
  if (fault.tail.empty()) {
    if (const HeldTail* tail = tails_.Find({job.record.id, exit.generation, exit.rank, true})) {
      fault.tail = LastBytes(tail->text, kFaultTailBytes);
    }
  }
  fault.signature = SignatureOf(exit);
  return fault;
}

// Revoke at once; whether another generation follows is decided when no process of this one is left.
void HeadState::Fail(Job& job, FaultRecord fault, Instant now) {
  constexpr size_t kFaultsKept = 32;
  if (!job.Live()) return;
  KeepWhatWorked(job, now);
  Excuse(job, fault, step_at_);
  fault.generation = job.record.generation;
  fault.step = job.top_step;
  fault.at = Wall(now);
  const bool silent = !job.top_step && job.run_mark && job.any_started &&
                      RunTime(job, now) >= kSilentProgress * (job.record.restarts + 1);
  fault.progressed = job.top_step.has_value() || job.checkpointed ||
                     (silent && fault.kind != FaultKind::kStorage);  // it was waiting, not working
  // Ranks that saved and ask to be run again are given the time to finish saving.
  const absl::Duration grace = fault.kind == FaultKind::kSaved       ? job.spec.stop_grace
                               : fault.kind == FaultKind::kPreempted ? LeaveGrace(job, now)
                                                                     : config_.reform_grace;
  fault.message = Shortened(std::move(fault.message), 2 << 10);
  const std::string message = fault.message;
  Emit(job, "fault", message);
  job.record.faults.push_back(std::move(fault));
  job.fault_times.push_back(now);
  if (job.record.faults.size() > kFaultsKept) {
    // The first fault stays for the report.
    const int second = FirstFault(job.record.faults) == job.record.faults.data() ? 1 : 0;
    job.record.faults.erase(job.record.faults.begin() + second);
    job.fault_times.erase(job.fault_times.begin() + second);
  }
  BeginEnding(job, Ending::kReform, EndMode::kReform, grace, message, now);
}

void HeadState::OnGone(Node& node, const GenerationGone& gone, Instant now) {
  if (!gone.clean && !node.record.unclean) {
    GT_PROBE("head.node_unclean");
    node.record.unclean = true;
    Write(node.record);
    Say(absl::StrCat(node.record.hostname, " is not used any more: ", gone.message));
  }
  if (const auto it = unproven_.find({gone.job, node.record.id});
      it != unproven_.end() && it->second.generation <= gone.generation) {
    unproven_.erase(it);
  }
  Job* job = FindJob(gone.job);
  if (job == nullptr) return;
  if (!gone.clean) {
    Emit(*job, "warning",
         absl::StrCat("processes survived SIGKILL on ", node.record.hostname, ": ", gone.message,
                      "; the node is not used until it restarts"));
    Dirty(*job);
  }
  if (gone.generation < job->record.revoked) {
    GT_PROBE("head.gone_of_older_generation");
    ++counters_.stale_dropped;
    return;
  }
  Release(*job, node.record.id, now);
}

void HeadState::OnExchange(const NodeId& node, const ExchangePart& part) {
  Job* job = CurrentJob(node, part.job, part.generation);
  if (job == nullptr || !job->Live()) return;
  const auto progress = job->exchange->Add(part);
  if (!progress.ok()) {
    Emit(*job, "warning",
         absl::StrCat("bootstrap exchange ", part.sequence, " from ", Hostname(node), ": ",
                      progress.status().message()));
    Dirty(*job);
    return;
  }
  if (progress->table == nullptr && progress->repeated) return SayWhoIsMissing(*job, node, part.sequence);
  if (progress->table == nullptr) return;
  const ExchangeTable table{epoch(), part.job, part.generation, part.sequence, *progress->table};
  if (!progress->just_completed) GT_PROBE("head.exchange_answered_again");
  if (!progress->just_completed) return Send(node, SendKind::kReply, table);
  for (const NodePlace& place : job->record.grant->nodes) Send(place.node, SendKind::kReply, table);
}

// A node speaks when all of its ranks have; of those that are silent, the ones that joined wait themselves.
void HeadState::SayWhoIsMissing(const Job& job, const NodeId& node, uint64_t sequence) {
  GT_PROBE("head.exchange_missing");
  std::vector<int> silent = job.exchange->Missing(sequence);
  std::vector<int> late;
  if (sequence == 0) {  // joining and speaking in the entry barrier are one
    std::copy_if(silent.begin(), silent.end(), std::back_inserter(late),
                 [&](int rank) { return job.ranks[rank].status.state != RankState::kJoined; });
  }
  Send(node, SendKind::kReply,
       ExchangeMissing{epoch(), job.record.id, job.record.generation, sequence,
                       late.empty() ? std::move(silent) : std::move(late)});
}

void HeadState::OnCheckpoint(const NodeId& node, const CheckpointReport& report) {
  Job* job = FindJob(report.job);
  if (job == nullptr || !job->HoldsNode(node) || report.timeline != job->record.timeline) {
    ++counters_.stale_dropped;
    return;
  }
  if (report.generation == job->record.generation) job->checkpointed = true;
  job->checkpoint_policy = report.policy;
  if (job->checkpoint) {
    const CheckpointRecord& known = *job->checkpoint;
    if (std::pair(known.timeline, known.step) >= std::pair(report.timeline, report.step)) return;
    // A line in $GTRAIN_REPORT of a program that also has the SDK: the manifest says more.
    if (!known.manifest.empty() && report.manifest.empty()) return;
  }
  const uint64_t count = job->checkpoint ? job->checkpoint->count + 1 : 1;
  job->checkpoint =
      CheckpointRecord{report.job, report.generation, report.timeline, report.step, report.manifest, count};
  Write(*job->checkpoint);
  job->notes_before.erase(kStorageNote);
  Emit(*job, "checkpoint", absl::StrCat("checkpoint of step ", report.step, " is committed"));
  Dirty(*job);
  if (count == 1) SayHowItRuns(*job);
  const bool current = report.generation == job->record.generation;
  if (current) job->saved_since_told = job->told_at.has_value();
  LeaveStep(*job, step_at_);
  if (current) ResizeBehindCheckpoint(*job, step_at_);
}

// What the ranks of a job taken up were told is the newest checkpoint, if nothing newer is known here.
void HeadState::TakeNewest(Job& job, const CheckpointReport& newest) {
  if (newest.manifest.empty() || newest.timeline > job.record.timeline) return;
  if (job.checkpoint &&
      std::pair(job.checkpoint->timeline, job.checkpoint->step) >= std::pair(newest.timeline, newest.step))
    return;
  const uint64_t count = job.checkpoint ? job.checkpoint->count + 1 : 1;
  job.checkpoint = CheckpointRecord{job.record.id, newest.generation, newest.timeline,
                                    newest.step,   newest.manifest,   count};
  Write(*job.checkpoint);
}

void HeadState::OnNote(const NodeId& node, const AgentNote& note) {
  // Whether the last of a log could be written is known only when the ranks, and so the job, may be over.
  Job* const over = note.kind == kLogsNote ? FindJob(note.job) : nullptr;
  const bool late = over != nullptr && IsFinal(over->record.state) && over->HoldsNode(node) &&
                    over->record.generation == note.generation;
  Job* job = late ? over : CurrentJob(node, note.job, note.generation);
  if (job == nullptr) return;
  if (IsRankNote(note.kind)) return TakeNote(*job, node, note);
  const std::string rank = note.rank >= 0 ? absl::StrCat("rank ", note.rank, " on ") : "";
  EmitNote(*job, note.kind.empty() ? "note" : note.kind, absl::StrCat(rank, Hostname(node), ": ", note.text));
}

// Ranks say what they like, and each event is a line in files and a record on the disk that all jobs share.
// What is too much is left out and counted; the state that it told of is kept.
void HeadState::EmitNote(Job& job, const std::string& kind, std::string text) {
  if (!job.note_rate) job.note_rate.emplace(config_.notes_burst, 1, step_at_);
  if (!job.note_rate->Take(step_at_)) return (void)++job.notes_left_out;
  if (const int left_out = std::exchange(job.notes_left_out, 0); left_out > 0)
    absl::StrAppend(&text, " (", left_out, " notes before this are not listed)");
  Emit(job, kind, std::move(text));
  Dirty(job);
}

// What ranks say of themselves is a state of the job. Of a storage that cannot be read, of saves that come to
// nothing, of a directory that changed hands and of data that is trained, people also want to know when.
void HeadState::TakeNote(Job& job, const NodeId& node, const AgentNote& note) {
  std::string& known = job.rank_notes[note.kind];
  std::string text = note.text.substr(0, kRankNoteBytesMax);
  if (text == known) return;
  const bool changes = known.empty() || text.empty();  // else another machine says the same in other words
  known = std::move(text);
  const bool told_when_it_changes =
      note.kind == kStorageNote || note.kind == kSavesNote || note.kind == kLogsNote;
  const bool always_told = note.kind == kOwnerNote || note.kind == kSamplesNote;
  if (!always_told && !(told_when_it_changes && changes)) return;
  EmitNote(job, note.kind,
           absl::StrCat("rank ", note.rank, " on ", Hostname(node), ": ",
                        !known.empty()            ? known
                        : note.kind == kSavesNote ? "saves are committed again"
                        : note.kind == kLogsNote  ? "logs are written again"
                                                  : "the storage can be read again"));
}

}  // namespace gtrain::core
