#include <algorithm>
#include <map>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "launcher/cli/context.h"
#include "launcher/cli/follow.h"
#include "launcher/cli/left.h"
#include "launcher/cli/rank_output.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"
#include "launcher/spec/parse.h"

namespace gtrain::cli {
namespace {

struct Stream {
  int rank = 0;
  std::string host;
  uint64_t offset = 0;
  std::optional<uint64_t> until;  // what follows is not read
  bool ended = true;              // no more will come, as far as was heard
};

struct LogsRequest {
  std::string job;
  std::optional<uint64_t> generation;
  bool is_stderr = false;
  std::vector<Stream> streams;
};

// One piece of each stream; true when something came. Not all there is: a rank may write faster than we read,
// and what was read is shown before more is kept.
absl::StatusOr<bool> ReadSome(absl::FunctionRef<absl::StatusOr<LogDoc>(const Stream&)> read,
                              LogsRequest& request, RankOutput& output) {
  bool any = false;
  for (Stream& stream : request.streams) {
    if (stream.until && stream.offset >= *stream.until) continue;
    const absl::StatusOr<LogDoc> log = read(stream);
    if (absl::IsNotFound(log.status()) && request.streams.size() > 1) continue;  // wrote nothing
    if (!log.ok()) return log.status();
    if (!log->note.empty() && stream.offset == 0)
      Complain(absl::StrCat("rank ", stream.rank, ": ", SafeText(log->note)));
    output.Add(stream.rank, stream.host, request.is_stderr, log->text);
    stream.ended = log->end;
    if (log->next_offset <= stream.offset) continue;
    any = true;
    stream.offset = log->next_offset;
  }
  return any;
}

absl::StatusOr<bool> ReadSome(Cluster& cluster, LogsRequest& request, RankOutput& output) {
  const auto ask = [&](const Stream& stream) -> absl::StatusOr<LogDoc> {
    GT_ASSIGN_OR_RETURN(const std::string json,
                        Ask(cluster, core::ClientLogs{JobId(request.job), request.generation, stream.rank,
                                                      request.is_stderr, stream.offset}));
    return ParseLogDoc(json);
  };
  return ReadSome(ask, request, output);
}

// Who does not follow sees what was written up to now: a rank may write faster than anybody reads.
void EndWhereItIs(Cluster& cluster, LogsRequest& request) {
  constexpr uint64_t kBeyond = uint64_t{1} << 62;
  for (Stream& stream : request.streams) {
    const absl::StatusOr<std::string> json = Ask(
        cluster,
        core::ClientLogs{JobId(request.job), request.generation, stream.rank, request.is_stderr, kBeyond});
    const absl::StatusOr<LogDoc> log = json.ok() ? ParseLogDoc(*json) : json.status();
    if (log.ok() && log->next_offset < kBeyond) stream.until = log->next_offset;
  }
}

bool Show(RankOutput& output, bool flush, bool plain) {
  std::string text;
  for (const std::string& line : output.Take(flush)) {
    // One rank's log is shown as the rank wrote it, without "host:rank: ".
    const size_t prefix = plain ? line.find(": ") : std::string::npos;
    absl::StrAppend(&text, prefix == std::string::npos ? line : line.substr(prefix + 2), "\n");
  }
  return text.empty() || Print(text);
}

absl::StatusOr<LogsRequest> MakeRequest(const Args& args, const JobDoc& job) {
  LogsRequest request;
  request.job = job.id;
  request.is_stderr = args.Has("err");
  GT_ASSIGN_OR_RETURN(const std::optional<int64_t> generation, args.Int("generation", 1, int64_t{1} << 40));
  if (generation) request.generation = static_cast<uint64_t>(*generation);
  GT_ASSIGN_OR_RETURN(const std::optional<int64_t> rank, args.Int("rank", 0, spec::kRanksMax));
  for (const RankDoc& r : job.ranks) {
    if (!rank || r.rank == *rank) request.streams.push_back({r.rank, r.hostname, 0});
  }
  if (request.streams.empty() && rank && request.generation)
    request.streams.push_back({static_cast<int>(*rank), "", 0});
  if (request.streams.empty()) {
    return absl::NotFoundError(rank ? absl::StrCat(job.id, " has ranks 0 to ", job.world_size - 1)
                                    : absl::StrCat(job.id, " has not started yet: ", job.reason));
  }
  return request;
}

// A generation that ends while we follow is read to its end before the next one begins.
absl::Status FollowLogs(Cluster& cluster, const Args& args, JobDoc job, LogsRequest request) {
  SignalPipe signals;
  cluster.client->set_interrupt_fd(signals.fd());
  RankOutput output;
  const bool plain = request.streams.size() == 1;
  uint64_t after = 0;
  const RealClock clock;
  std::optional<Instant> over_since;
  while (signals.Next() == 0) {
    const absl::StatusOr<bool> any = ReadSome(cluster, request, output);
    if (absl::IsCancelled(any.status())) return absl::OkStatus();
    if (!any.ok() && !absl::IsUnavailable(any.status()) && !absl::IsDeadlineExceeded(any.status()))
      return any.status();
    const bool more = any.ok() && *any;
    if (!Show(output, job.Final() && !more, plain)) return absl::OkStatus();
    if (more) continue;
    if (job.Final()) {
      // A slow disk may not have written its last words yet; a keeper gives up after eight seconds.
      constexpr absl::Duration kPatience = absl::Seconds(10), kPause = absl::Milliseconds(50);
      if (!over_since) over_since = clock.Now();
      const bool ended = std::ranges::all_of(request.streams, &Stream::ended);
      if (ended || clock.Now() - *over_since > kPatience) return absl::OkStatus();
      absl::SleepFor(kPause);
      continue;
    }
    const absl::StatusOr<std::string> wait =
        Ask(cluster, core::ClientEvents{JobId(job.id), after, absl::Milliseconds(500)}, absl::Seconds(10));
    if (wait.ok()) {
      GT_ASSIGN_OR_RETURN(const EventsDoc events, ParseEventsDoc(*wait));
      after = events.next;
    }
    absl::StatusOr<JobDoc> now = AskJob(cluster, job.id, absl::Seconds(10));
    if (absl::IsCancelled(now.status())) return absl::OkStatus();
    if (!now.ok()) return now.status();
    if (now->generation != job.generation && !args.Has("generation")) {
      Complain(absl::StrCat("generation ", now->generation));
      GT_ASSIGN_OR_RETURN(request, MakeRequest(args, *now));
    }
    job = *std::move(now);
  }
  return absl::OkStatus();
}

// From the files in the run directory; nobody writes them any more.
absl::Status ShowLeft(const Args& args, const std::string& json) {
  GT_ASSIGN_OR_RETURN(const JobDoc job, ParseJobDoc(json));
  if (job.ranks.empty() && job.generation > 0)
    return absl::NotFoundError(absl::StrCat("the run directory of ", job.id, " is gone: ", job.run_dir));
  GT_ASSIGN_OR_RETURN(LogsRequest request, MakeRequest(args, job));
  const auto read = [&](const Stream& stream) {
    return ReadLeftLog(job, request.generation, stream.rank, request.is_stderr, stream.offset);
  };
  RankOutput output;
  while (true) {
    GT_ASSIGN_OR_RETURN(const bool more, ReadSome(read, request, output));
    if (!Show(output, /*flush=*/!more, request.streams.size() == 1) || !more) return absl::OkStatus();
  }
}

absl::Status AskForLogs(const Args& args, const std::string& word) {
  GT_ASSIGN_OR_RETURN(Cluster cluster, OpenCluster(args, Start::kNever));
  GT_ASSIGN_OR_RETURN(const JobDoc found, FindJob(cluster, word, Without::kNewest));
  // The list of all jobs leaves out the ranks of finished ones, whose logs are as good as any.
  GT_ASSIGN_OR_RETURN(const JobDoc job, AskJob(cluster, found.id, absl::Seconds(10)));
  GT_ASSIGN_OR_RETURN(LogsRequest request, MakeRequest(args, job));
  if (args.Has("follow")) return FollowLogs(cluster, args, job, std::move(request));
  if (!job.Final()) EndWhereItIs(cluster, request);
  RankOutput output;
  while (true) {
    GT_ASSIGN_OR_RETURN(const bool more, ReadSome(cluster, request, output));
    if (!Show(output, /*flush=*/!more, request.streams.size() == 1) || !more) return absl::OkStatus();
  }
}

absl::Status Logs(const Args& args) {
  const std::string word = args.words.empty() ? "" : args.words[0];
  if (IsRunDirectory(word)) {
    GT_ASSIGN_OR_RETURN(const std::string json, LeftJob(args, word));
    return ShowLeft(args, json);
  }
  const absl::Status asked = AskForLogs(args, word);
  if (asked.ok()) return asked;
  GT_ASSIGN_OR_RETURN(const LeftAnswer left, LeftInstead(asked, args, word));
  Complain(SafeText(left.note));
  return ShowLeft(args, left.json);
}

int Run(const Args& args) {
  const absl::Status status = Logs(args);
  return status.ok() ? kDone : Report(status);
}

}  // namespace

Verb LogsVerb() {
  Verb verb;
  verb.name = "logs";
  verb.summary = "Print what ranks wrote";
  verb.usage = "[flags] [JOB]";
  verb.details =
      "Without JOB: the only job that runs, else the newest that is over. JOB may be the run directory of a "
      "job\n"
      "that is over. Of a node that vanished, the last 64 KiB it sent. Control characters are shown as "
      "\\xNN; the files "
      "under\n"
      "<run dir>/logs hold the bytes.\n\n"
      "  gtrain logs fashion-mnist-1                every rank's output, host:rank before each line\n"
      "  gtrain logs --rank 3 --err -f              follow one rank's stderr\n"
      "  gtrain logs --generation 1                 before the restart";
  verb.flags = {{"rank", '\0', "R", "only this rank"},
                {"err", '\0', "", "stderr instead of stdout"},
                {"generation", '\0', "G", "an earlier generation; default: the newest"},
                {"follow", 'f', "", "go on until the job ends"},
                ContextFlag()};
  verb.words_max = 1;
  verb.run = Run;
  return verb;
}

}  // namespace gtrain::cli
