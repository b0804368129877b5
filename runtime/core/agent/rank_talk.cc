#include "runtime/core/agent/rank_talk.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/probe.h"
#include "runtime/core/agent/exchanges.h"
#include "runtime/core/agent/head_talk.h"
#include "runtime/core/agent/idleness.h"
#include "runtime/core/agent/tails.h"
#include "runtime/core/values/rank_notes.h"

namespace gtrain::core {

RankTalk::RankTalk(AgentContext& context, AgentModel& model, HeadTalk& head, Exchanges& exchanges,
                   Tails& tails, Idleness& idleness)
    : context_(context),
      model_(model),
      head_(head),
      exchanges_(exchanges),
      tails_(tails),
      idleness_(idleness) {}

void RankTalk::OnRelay(const JobId& job, const keeper::RelayUp& relay) {
  AgentGeneration* generation = model_.Find(job, Generation{relay.generation});
  AgentRank* rank = model_.Find(job, Generation{relay.generation}, relay.rank);
  const RankSaid said = ReadRelay(relay.json);
  if (rank != nullptr && !generation->gone && said.kind == RankSaid::Kind::kExchange) {
    return exchanges_.Exchange(job, *generation, relay.rank, said, relay.id);
  }
  if (rank != nullptr && said.kind == RankSaid::Kind::kNote && said.note == kSamplesNote) {
    return TakeRecord(job, *generation, relay, said.text);
  }
  const bool of_storage = said.kind == RankSaid::Kind::kNote && said.note == kStorageNote;
  std::optional<uint64_t> done = relay.id;
  if (rank != nullptr && of_storage) {
    done = std::exchange(rank->storage_relay, relay.id);
    if (done == relay.id) done.reset();  // the keeper says it again to a new connection
  }
  if (done) context_.Command(job, keeper::AckRelay{relay.generation, relay.rank, *done});
  if (rank == nullptr) return;
  rank->sdk = true;
  if (said.kind == RankSaid::Kind::kOverdue)
    return exchanges_.SayWhoIsMissing(job, *generation, relay.rank, said.sequence);
  if (said.kind == RankSaid::Kind::kLink)
    return context_.Tell(LinkDown{job, generation->generation, relay.rank, said.peer, said.text});
  if (said.kind == RankSaid::Kind::kNote) return TakeNote(job, *generation, relay.rank, said);
  Apply(job, *generation, relay.rank, said);
}

// A storage that is away is away for all ranks of a machine: one of them speaks to the head, so that a job of
// many ranks costs a message a machine. The first word counts whatever it is: an earlier generation may have
// said that the storage is away.
void RankTalk::TakeNote(const JobId& job, AgentGeneration& generation, int number, const RankSaid& said) {
  const bool first = !generation.notes.contains(said.note);
  AgentNote& note = generation.notes[said.note];
  if (said.note == kStorageNote) {
    generation.ranks.at(number).storage = said.text;
    if (!first && note.rank != number && (said.text.empty() || !note.text.empty())) return;
  }
  note = {job, generation.generation, number, said.note, said.text};
  context_.Tell(note);
}

// The keeper says it again to a new connection and to an agent that restarted, unless it may forget it.
void RankTalk::TakeRecord(const JobId& job, AgentGeneration& generation, const keeper::RelayUp& relay,
                          const std::string& text) {
  AgentRank& rank = generation.ranks.at(relay.rank);
  rank.sdk = true;
  std::vector<AgentRecord>& records = generation.records;
  const bool known = std::ranges::any_of(records, [&](const AgentRecord& record) {
    return record.note.rank == relay.rank && record.relay == relay.id;
  });
  if (known) return;
  if (rank.exit && rank.acked)  // the head has what was said before that
    return context_.Command(job, keeper::AckRelay{relay.generation, relay.rank, relay.id});
  records.push_back({{job, generation.generation, relay.rank, kSamplesNote, text}, relay.id});
  context_.Tell(records.back().note);
  if (records.size() <= kRecordsMax) return;
  GT_PROBE("agent.oldest_record_goes");
  const AgentRecord& oldest = records.front();
  context_.Command(job, keeper::AckRelay{relay.generation, oldest.note.rank, oldest.relay});
  records.erase(records.begin());
}

void RankTalk::Apply(const JobId& job, AgentGeneration& generation, int number, const RankSaid& said) {
  AgentRank& rank = generation.ranks[number];
  if (rank.exit || said.kind == RankSaid::Kind::kNothing) return;
  if (said.kind == RankSaid::Kind::kJoined) {
    // The head is told now, not with the next heartbeat: should this machine be lost before, it would wait
    // for the lease of ranks that need none.
    rank.status.state = RankState::kJoined;
    head_.HurryHeartbeat();
  }
  rank.status_changed = true;
  if (said.kind == RankSaid::Kind::kPause && number == 0) {  // which speaks for all
    rank.status.pause = said.paused ? RankPause::kPaused : RankPause::kMay;
    // They stand still until the head has heard. It hears once what it has asked for, whatever a rank says.
    if (said.paused && std::exchange(generation.asked_to_pause, false))
      context_.Tell(RanksStarted{job, generation.generation, {rank.status}});
  }
  if (said.kind == RankSaid::Kind::kCheckpoint || said.checkpoint) {
    const Timeline timeline = said.timeline ? Timeline{*said.timeline} : generation.timeline;
    generation.checkpoint = CheckpointReport{job,           generation.generation,
                                             timeline,      said.step.value_or(rank.status.step.value_or(0)),
                                             said.manifest, said.text};
    context_.Tell(*generation.checkpoint);
  }
  if (said.kind != RankSaid::Kind::kProgress) return idleness_.Heard(rank);
  // The head counts what a generation costs until its first step.
  if (said.step && !std::exchange(generation.stepped, true)) head_.HurryHeartbeat();
  TakeProgress(rank, said);
  if (said.samples && *said.samples >= 0) CountSamples(rank, *said.samples);
}

void RankTalk::TakeProgress(AgentRank& rank, const RankSaid& said) {
  if (said.step && said.step != rank.status.step) {
    idleness_.Heard(rank);
    rank.status.step = said.step;
  }
  if (said.loss) {
    rank.status.diverged = !std::isfinite(*said.loss);
    rank.status.loss = rank.status.diverged ? std::nullopt : said.loss;
  }
  if (said.collective) rank.status.collective_sequence = *said.collective;
  if (said.waited) rank.status.waited_seconds = said.waited;
  if (said.joined) rank.status.joined_seconds = said.joined;
  if (said.stalled) rank.status.stalled_seconds = said.stalled;
}

void RankTalk::CountSamples(AgentRank& rank, double samples) {
  rank.samples += samples;
  if (!rank.samples_at) {  // the first count began at an unknown time
    rank.samples_at = context_.now();
    rank.samples = 0;
    return;
  }
  const double seconds = absl::ToDoubleSeconds(context_.now() - *rank.samples_at);
  if (seconds < 0.5) return;
  const double rate = rank.samples / seconds;
  const double before = rank.status.samples_per_second.value_or(rate);
  rank.status.samples_per_second = 0.5 * (before + rate);
  rank.samples = 0;
  rank.samples_at = context_.now();
}

void RankTalk::OnOutput(const JobId& job, const keeper::Output& output) {
  AgentGeneration* generation = model_.Find(job, Generation{output.generation});
  AgentRank* rank = model_.Find(job, Generation{output.generation}, output.rank);
  if (rank == nullptr) return;
  AgentTail& tail = output.is_stderr ? rank->err : rank->out;
  tails_.Append(tail, output);
  if (!output.bytes.empty()) idleness_.Heard(*rank);
  TakeRefusal(job, *generation, output.rank, output);
  if (output.refused == 0 && output.dropped > rank->dropped_told) {
    rank->dropped_told = output.dropped * 2;  // said again when it doubles
    context_.Tell(AgentNote{job, generation->generation, output.rank, "log-dropped",
                            absl::StrCat("rank ", output.rank,
                                         " writes faster than its log may grow, or the disk refused a part: ",
                                         output.dropped, " bytes dropped so far")});
  }
  if (generation->patterns.empty()) return;
  for (const std::string& line : tail.lines.Take(output.bytes)) {
    Apply(job, *generation, output.rank, generation->patterns.Match(line));
  }
}

// A full disk is full for all ranks of a machine: one of them speaks for all, and the last to be written
// again takes it back (fault P8).
void RankTalk::TakeRefusal(const JobId& job, AgentGeneration& generation, int number,
                           const keeper::Output& output) {
  AgentRank& rank = generation.ranks.at(number);
  int& known = output.is_stderr ? rank.err_refused : rank.out_refused;
  if (std::exchange(known, output.refused) == output.refused) return;
  std::string text;
  if (output.refused != 0) {
    text =
        absl::StrCat("what ranks write is dropped, ", generation.run_dir,
                     "/logs cannot be written: ", strerror(output.refused),
                     output.refused == EFBIG
                         ? ". A file may not grow further there: raise `ulimit -f` where the agent is started"
                         : ". Free some space there",
                     "; they go on meanwhile");
  } else if (std::any_of(generation.ranks.begin(), generation.ranks.end(), [](const auto& item) {
               return item.second.out_refused != 0 || item.second.err_refused != 0;
             })) {
    return;
  }
  AgentNote& note = generation.notes[kLogsNote];
  if (note.text == text) return;
  note = {job, generation.generation, number, kLogsNote, std::move(text)};
  context_.Tell(note);
}

void RankTalk::OnReport(const JobId& job, const keeper::ReportBytes& report) {
  AgentGeneration* generation = model_.Find(job, Generation{report.generation});
  AgentRank* rank = model_.Find(job, Generation{report.generation}, report.rank);
  if (rank == nullptr) return;
  for (const std::string& line : rank->report_lines.Take(report.bytes)) {
    Apply(job, *generation, report.rank, ReadReportLine(line));
  }
}

}  // namespace gtrain::core
