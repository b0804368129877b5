#include "runtime/core/head/rank_news.h"

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/probe.h"
#include "runtime/core/head/faults.h"
#include "runtime/core/head/job_life.h"
#include "runtime/core/head/leaves.h"
#include "runtime/core/head/newcomers.h"
#include "runtime/core/head/progress.h"
#include "runtime/core/head/recovery.h"
#include "runtime/core/head/sizing.h"
#include "runtime/core/head/stalls.h"
#include "runtime/core/values/rank_notes.h"

namespace gtrain::core {
namespace {

constexpr size_t kExitTailBytes = 2 << 10;  // of each rank, in the record
constexpr absl::Duration kLeftAfter = absl::Seconds(1);

bool Waits(const GenerationGone& gone) { return !gone.kept.empty() || !gone.coming.empty(); }

// Or one that waits beside them.
bool IsRankOf(const Job& job, int rank) {
  return rank >= 0 && static_cast<size_t>(rank) < job.ranks.size() + job.waiting.size();
}

}  // namespace

RankNews::RankNews(HeadContext& context, HeadModel& model, JobLife& life, Faults& faults, Progress& progress,
                   Stalls& stalls, Sizing& sizing, Leaves& leaves, Newcomers& newcomers, Recovery& recovery)
    : context_(context),
      model_(model),
      config_(context.config()),
      life_(life),
      faults_(faults),
      progress_(progress),
      stalls_(stalls),
      sizing_(sizing),
      leaves_(leaves),
      newcomers_(newcomers),
      recovery_(recovery) {}

// The job whose granted generation the message belongs to, if this node is part of it.
Job* RankNews::CurrentJob(const NodeId& node, const JobId& id, Generation generation) {
  Job* job = model_.FindJob(id);
  if (job == nullptr || IsFinal(job->record.state) || generation != job->record.generation ||
      !job->HoldsNode(node)) {
    ++context_.counters().stale_dropped;
    return nullptr;
  }
  return job;
}

void RankNews::OnRankStatus(const NodeId& node, const RankStatus& status, Instant now) {
  Job* job = CurrentJob(node, status.job, status.generation);
  if (job == nullptr || !IsRankOf(*job, status.rank)) return;
  if (PlaceOfRank(*job->record.grant, status.rank).node != node) {
    ++context_.counters().stale_dropped;
    return;
  }
  if (status.rank >= static_cast<int>(job->ranks.size())) return newcomers_.OnStatus(*job, status, now);
  RankLive& rank = job->ranks[status.rank];
  if (status.step && status.step != rank.status.step) rank.stepped_at = now;
  MeasureGoodput(*job, rank, status, now);
  const RankPause pause = rank.status.pause;
  job->SetStatus(rank, status);
  stalls_.CountIdle(*job, rank, now);
  const bool stayed = job->stays, stepped = job->low_step.has_value();
  job->stays = job->stays || status.stays;
  if (status.state == RankState::kJoined && !std::exchange(job->record.sdk, true)) context_.Dirty(*job);
  if (status.state != RankState::kStarting) job->SetStarted(rank);
  if (status.step) job->top_step = std::max(job->top_step.value_or(*status.step), *status.step);
  WarnOfDivergence(*job, rank.status);
  progress_.MeasurePace(*job, rank);
  progress_.UpdateProgress(*job, now);
  RunningIfAllStarted(*job, now);
  if (status.rank == 0 && status.pause != pause) newcomers_.OnPause(*job, now);
  // What they wait for comes once a generation: a look after each status would cost n * n a round.
  if (job->stays == stayed && job->low_step.has_value() == stepped) return;
  if (job->ProcessesStay() && job->Size() < job->demand.max) {
    sizing_.OweLooks();
    if (job->stays != stayed) sizing_.SayHowItRuns(*job);  // from now on it waits for no checkpoint
  }
  newcomers_.Consider(*job, now);
}

// Once a generation. A loss that is not a number stays in what status says; training goes on, for whether
// that makes sense is the user's to say. The head hears of it with a heartbeat, steps after the one that was
// it.
void RankNews::WarnOfDivergence(Job& job, const RankStatus& status) {
  if (!status.diverged || std::exchange(job.record.diverged, true)) return;
  context_.Emit(job, "warning",
                absl::StrCat("the loss of rank ", status.rank, " is not a finite number",
                             status.step ? absl::StrCat(", by step ", *status.step) : ""));
  context_.Dirty(job);
}

// Takes the rank's last step and loss from its exit. No heartbeat has reported them, and they belong to the
// job's end.
void RankNews::TakeLastWords(Job& job, RankLive& rank, const RankExit& exit, Instant now) {
  RankStatus last = rank.status;
  if (exit.step) last.step = exit.step;
  if (exit.loss || exit.diverged) std::tie(last.loss, last.diverged) = std::tie(exit.loss, exit.diverged);
  last.rank = exit.rank;
  job.SetStatus(rank, last);
  if (last.step) job.top_step = std::max(job.top_step.value_or(*last.step), *last.step);
  WarnOfDivergence(job, last);
  progress_.UpdateProgress(job, now);
}

void RankNews::OnStarted(const NodeId& node, const RanksStarted& started, Instant now) {
  Job* job = CurrentJob(node, started.job, started.generation);
  if (job == nullptr) return;
  for (const RankStatus& status : started.ranks) OnRankStatus(node, status, now);
  for (const RankPlace& place : job->record.grant->ranks) {  // it names none: all
    if (started.ranks.empty() && place.node == node) job->SetStarted(job->ranks[place.rank]);
  }
  RunningIfAllStarted(*job, now);
}

void RankNews::RunningIfAllStarted(Job& job, Instant now) {
  if (!job.Live() || job.record.state == JobState::kRunning || job.not_started > 0) return;
  job.start_deadline.reset();
  // The grant may have waited for the disk for long.
  if (job.return_deadline) job.return_deadline = std::max(*job.return_deadline, now + config_.return_timeout);
  job.progress_at = now;
  life_.Move(job, JobState::kRunning, sizing_.RunningReason(job));
  job.running_since = now;
  // A person did not want to wait for a checkpoint, and the ranks had not all started then.
  if (job.sizing.at_once && job.record.exits.size() < job.ranks.size()) sizing_.Resize(job, now);
}

void RankNews::OnExited(const NodeId& node, const RankExit& exit, Instant now) {
  context_.Send(node, SendKind::kReply, AckExit{model_.epoch(), exit.job, exit.generation, exit.rank});
  Job* job = CurrentJob(node, exit.job, exit.generation);
  if (job == nullptr || !IsRankOf(*job, exit.rank)) return;
  if (PlaceOfRank(*job->record.grant, exit.rank).node != node) return;
  if (exit.rank >= static_cast<int>(job->ranks.size())) {
    newcomers_.OnExit(*job, exit, now);
    return sizing_.SayHowItRuns(*job);
  }
  if (job->ExitOf(exit.rank) != nullptr) return;
  TakeLastWords(*job, job->ranks[exit.rank], exit, now);
  RankExit kept = exit;
  kept.tail = LastBytes(exit.tail, kExitTailBytes);
  job->SetExit(job->ranks[exit.rank], std::move(kept));
  context_.Dirty(*job);
  if (!job->Live()) {  // the consequence of a revoke, not a cause
    GT_PROBE("head.exit_after_revoke");
    return job->ended_meanwhile.push_back(exit.rank);
  }
  const bool well = exit.cause == ExitCause::kExited && exit.exit_code == 0;
  const bool all = job->record.exits.size() == job->ranks.size();
  if (!well && !faults_.AwaitsCause(*job, exit, now))
    return faults_.Fail(*job, faults_.FaultOf(*job, exit), now);
  if (all && job->cause_at) return faults_.FailBy75(*job, now);
  RunningIfAllStarted(*job, now);
  if (all) {
    // Many programs save at SIGTERM and end with 0, which says that the job is done. One that goes on in
    // place has nothing to save, and its data was over.
    const char* early = !job->told_at || job->ProcessesStay()
                            ? ""
                            : " after the notice that a machine leaves (a program that is to go on "
                              "elsewhere ends with 75 then)";
    const std::string who =
        job->ranks.size() == 1 ? "its rank" : absl::StrCat("all ", job->ranks.size(), " ranks");
    life_.Finish(*job, JobState::kSucceeded, absl::StrCat(who, " ended with exit code 0", early));
  }
  if (!all && !job->left_at) job->left_at = now + kLeftAfter;
}

// The ranks of most jobs end within a moment of each other and nobody is told anything. n ranks that end one
// by one cost a message a node every kLeftAfter, of at most 4 n bytes. `node`: that one alone; else all.
void RankNews::SayWhoLeft(const Job& job, const NodeId* node) {
  std::vector<int> left;
  for (const RankExit& exit : job.record.exits) {
    if (exit.cause == ExitCause::kExited && exit.exit_code == 0) left.push_back(exit.rank);
  }
  if (left.empty() || !job.Live()) return;
  GT_PROBE("head.ranks_left");
  const RanksLeft message{model_.epoch(), job.record.id, job.record.generation, std::move(left)};
  for (const NodePlace& place : job.record.grant->nodes) {
    if (node == nullptr || place.node == *node) context_.Send(place.node, SendKind::kReply, message);
  }
}

void RankNews::OnGone(Node& node, const GenerationGone& gone, Instant now) {
  if (!gone.clean && !node.record.unclean) {
    GT_PROBE("head.node_unclean");
    node.record.unclean = true;
    context_.Write(node.record);
    context_.Say(absl::StrCat(node.record.hostname, " is not used any more: ", gone.message));
  }
  recovery_.OnGone(node.record.id, gone);
  Job* job = model_.FindJob(gone.job);
  if (job == nullptr) {
    if (Waits(gone) && !recovery_.TakesUp(gone.job))
      context_.Send(node.record.id, SendKind::kReply, ForgetJob{model_.epoch(), gone.job});
    return;
  }
  if (!gone.clean) {
    context_.Emit(*job, "warning",
                  absl::StrCat("processes survived SIGKILL on ", node.record.hostname, ": ", gone.message,
                               "; the node is not used until it restarts"));
    context_.Dirty(*job);
  }
  if (gone.generation < job->record.revoked) {
    GT_PROBE("head.gone_of_older_generation");
    ++context_.counters().stale_dropped;
    if (Waits(gone)) life_.EndKept(*job, node.record.id);
    return;
  }
  // A generation that has begun meanwhile either has this node, whose keeper ends what has no place in it, or
  // has no place for any of them.
  const bool late = job->Live() || IsFinal(job->record.state);
  newcomers_.OnGone(*job, node.record.id, gone);
  job->kept.erase(node.record.id);
  job->coming.erase(node.record.id);
  if (!late && !gone.kept.empty()) job->kept[node.record.id] = gone.kept;
  if (!late && !gone.coming.empty()) job->coming[node.record.id] = gone.coming;
  if (late && Waits(gone) && !(job->Live() && job->HoldsNode(node.record.id)))
    life_.EndKept(*job, node.record.id);
  life_.Release(*job, node.record.id, now);
}

void RankNews::OnExchange(const NodeId& node, const ExchangePart& part) {
  Job* job = CurrentJob(node, part.job, part.generation);
  if (job == nullptr || !job->Live()) return;
  const auto progress = job->exchange->Add(part);
  if (!progress.ok()) {
    context_.Emit(*job, "warning",
                  absl::StrCat("bootstrap exchange ", part.sequence, " from ", model_.Hostname(node), ": ",
                               progress.status().message()));
    context_.Dirty(*job);
    return;
  }
  if (progress->table == nullptr && progress->repeated) return SayWhoIsMissing(*job, node, part.sequence);
  if (progress->table == nullptr) return;
  // Held once for all nodes: it is as long as the job has ranks.
  const SharedMessage table =
      ExchangeTable{model_.epoch(), part.job, part.generation, part.sequence, *progress->table};
  if (!progress->just_completed) GT_PROBE("head.exchange_answered_again");
  if (!progress->just_completed) return context_.Send(node, SendKind::kReply, table);
  for (const NodePlace& place : job->record.grant->nodes) context_.Send(place.node, SendKind::kReply, table);
}

// A node speaks when all of its ranks have; of those that are silent, the ones that joined wait themselves.
void RankNews::SayWhoIsMissing(const Job& job, const NodeId& node, uint64_t sequence) {
  GT_PROBE("head.exchange_missing");
  std::vector<int> silent = job.exchange->Missing(sequence);
  std::vector<int> late;
  if (sequence == 0) {  // joining and speaking in the entry barrier are one
    std::copy_if(silent.begin(), silent.end(), std::back_inserter(late),
                 [&](int rank) { return job.ranks[rank].status.state != RankState::kJoined; });
  }
  context_.Send(node, SendKind::kReply,
                ExchangeMissing{model_.epoch(), job.record.id, job.record.generation, sequence,
                                late.empty() ? std::move(silent) : std::move(late)});
}

void RankNews::OnCheckpoint(const NodeId& node, const CheckpointReport& report) {
  Job* job = model_.FindJob(report.job);
  if (job == nullptr || !job->HoldsNode(node) || report.timeline != job->record.timeline) {
    ++context_.counters().stale_dropped;
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
  context_.Write(*job->checkpoint);
  job->notes_before.erase(kStorageNote);
  progress_.UpdateProgress(*job, context_.step_at());
  context_.Emit(*job, "checkpoint", absl::StrCat("checkpoint of step ", report.step, " is committed"));
  context_.Dirty(*job);
  if (count == 1) sizing_.SayHowItRuns(*job);
  const bool current = report.generation == job->record.generation;
  if (current) job->saved_since_told = job->told_at.has_value();
  leaves_.LeaveStep(*job, context_.step_at());
  if (current) sizing_.ResizeBehindCheckpoint(*job, context_.step_at());
}

void RankNews::TakeNewest(Job& job, const CheckpointReport& newest) {
  if (newest.manifest.empty() || newest.timeline > job.record.timeline) return;
  if (job.checkpoint &&
      std::pair(job.checkpoint->timeline, job.checkpoint->step) >= std::pair(newest.timeline, newest.step))
    return;
  const uint64_t count = job.checkpoint ? job.checkpoint->count + 1 : 1;
  job.checkpoint = CheckpointRecord{job.record.id, newest.generation, newest.timeline,
                                    newest.step,   newest.manifest,   count};
  context_.Write(*job.checkpoint);
}

void RankNews::OnNote(const NodeId& node, const AgentNote& note) {
  // Whether the last of a log could be written is known only when the ranks, and so the job, may be over.
  // What was said of data came before that, and maybe to a head that died before it kept it.
  const bool may_be_late = note.kind == kLogsNote || note.kind == kSamplesNote;
  Job* const over = may_be_late ? model_.FindJob(note.job) : nullptr;
  const bool late = over != nullptr && IsFinal(over->record.state) && over->HoldsNode(node) &&
                    over->record.generation == note.generation;
  Job* job = late ? over : CurrentJob(node, note.job, note.generation);
  if (job == nullptr) return;
  if (IsRankNote(note.kind)) return TakeNote(*job, node, note);
  const std::string rank = note.rank >= 0 ? absl::StrCat("rank ", note.rank, " on ") : "";
  EmitNote(*job, note.kind.empty() ? "note" : note.kind,
           absl::StrCat(rank, model_.Hostname(node), ": ", note.text));
}

// Ranks may send any notes, and each event is a line in files and a record on the disk that all jobs share.
// Notes beyond the rate are left out and counted; the state that they report is kept.
void RankNews::EmitNote(Job& job, const std::string& kind, std::string text) {
  // A program reads records of samples: other notes take none of their room and tell what was left out.
  const bool record = kind == kSamplesNote;
  std::optional<RateLimit>& rate = record ? job.samples_rate : job.note_rate;
  if (!rate) rate.emplace(record ? config_.samples_burst : config_.notes_burst, 1, context_.step_at());
  if (!rate->Take(context_.step_at())) return (void)++job.notes_left_out;
  if (const int left_out = record ? 0 : std::exchange(job.notes_left_out, 0); left_out > 0)
    absl::StrAppend(&text, " (", left_out, " notes before this are not listed)");
  context_.Emit(job, kind, std::move(text));
  context_.Dirty(job);
}

// Whether that is an event of this generation, for agents repeat what was said of data to each head.
bool RankNews::IsTold(const Job& job, const AgentNote& note, absl::string_view text) const {
  return std::ranges::any_of(job.events, [&](const auto& event) {
    return event->generation == note.generation && event->kind == note.kind &&
           absl::EndsWith(event->text, absl::StrCat(": ", text));
  });
}

// Takes a rank's note as a state of the job. When a storage cannot be read, saves fail, a directory changes
// hands, samples are trained or an actor is lost, people also want to know when: these are events, too.
void RankNews::TakeNote(Job& job, const NodeId& node, const AgentNote& note) {
  std::string& known = job.rank_notes[note.kind];
  std::string text = note.text.substr(0, kRankNoteBytesMax);
  if (text == known) return;
  if (note.kind == kSamplesNote && IsTold(job, note, text)) return;
  const bool changes = known.empty() || text.empty();  // else another machine says the same in other words
  known = std::move(text);
  const bool told_when_it_changes =
      note.kind == kStorageNote || note.kind == kSavesNote || note.kind == kLogsNote;
  const bool always_told = note.kind == kOwnerNote || note.kind == kSamplesNote || note.kind == kActorsNote;
  if (!always_told && !(told_when_it_changes && changes)) return;
  EmitNote(job, note.kind,
           absl::StrCat("rank ", note.rank, " on ", model_.Hostname(node), ": ",
                        !known.empty()            ? known
                        : note.kind == kSavesNote ? "saves are committed again"
                        : note.kind == kLogsNote  ? "logs are written again"
                                                  : "the storage can be read again"));
}

}  // namespace gtrain::core
