#include <unistd.h>

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "launcher/cli/context.h"
#include "launcher/cli/follow.h"
#include "launcher/cli/rank_output.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"
#include "launcher/spec/parse.h"

namespace gtrain::cli {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(20);
constexpr size_t kStreamsAtOnce = 64;  // of which at most 256 KiB each are on the way

struct Stream {
  int rank = 0;
  bool is_stderr = false;
  std::string host;
  uint64_t offset = 0;
  std::optional<uint64_t> until;  // what follows is not read
  bool ended = true;              // no more will come, as far as was heard
};

struct LogsRequest {
  std::string job;
  std::optional<uint64_t> generation;
  std::vector<Stream> streams;
  bool one_rank = false;  // shown as it wrote it, without "host:rank: "
};

core::ClientRequestBody RequestOf(const LogsRequest& request, const Stream& stream, uint64_t offset) {
  return core::ClientLogs{JobId(request.job), request.generation, stream.rank, stream.is_stderr, offset};
}

// One piece of each stream; true when something came. Not all there is: a rank may write faster than we read,
// and what was read is shown before more is kept.
absl::StatusOr<bool> ReadSome(Cluster& cluster, absl::Span<Stream> streams, const LogsRequest& request,
                              RankOutput& output) {
  bool any = false;
  std::vector<core::ClientRequestBody> questions;
  for (const Stream& stream : streams) questions.push_back(RequestOf(request, stream, stream.offset));
  const auto answers = AskAll(cluster, std::move(questions), kTimeout);
  for (size_t i = 0; i < streams.size(); ++i) {
    Stream& stream = streams[i];
    if (stream.until && stream.offset >= *stream.until) continue;
    if (!answers[i].ok()) return answers[i].status();
    GT_ASSIGN_OR_RETURN(const LogDoc log, ParseLogDoc(*answers[i]));
    if (!log.note.empty() && stream.offset == 0)
      Complain(absl::StrCat("rank ", stream.rank, ": ", SafeText(log.note)));
    output.Add(stream.rank, stream.host, stream.is_stderr, log.text);
    stream.ended = log.end;
    if (log.next_offset <= stream.offset) continue;
    any = true;
    stream.offset = log.next_offset;
  }
  return any;
}

absl::StatusOr<bool> ReadSome(Cluster& cluster, LogsRequest& request, RankOutput& output) {
  bool any = false;
  for (size_t at = 0; at < request.streams.size(); at += kStreamsAtOnce) {
    const auto streams = absl::MakeSpan(request.streams).subspan(at, kStreamsAtOnce);
    GT_ASSIGN_OR_RETURN(const bool more, ReadSome(cluster, streams, request, output));
    any = any || more;
  }
  return any;
}

// Who does not follow sees what was written up to now: a rank may write faster than anybody reads.
void EndWhereItIs(Cluster& cluster, LogsRequest& request) {
  constexpr uint64_t kBeyond = uint64_t{1} << 62;
  for (Stream& stream : request.streams) {
    const absl::StatusOr<std::string> json = Ask(cluster, RequestOf(request, stream, kBeyond));
    const absl::StatusOr<LogDoc> log = json.ok() ? ParseLogDoc(*json) : json.status();
    if (log.ok() && log->next_offset < kBeyond) stream.until = log->next_offset;
  }
}

bool Show(RankOutput& output, bool flush) {
  for (const RankOutput::Piece& piece : output.Take(flush)) {
    if (!Print(piece.text)) return false;
  }
  return true;
}

RankOutput MakeOutput(const LogsRequest& request) {
  const bool colour = UsesColour(STDOUT_FILENO);
  return RankOutput(
      {.bare = request.one_rank, .only_rank = request.one_rank, .colour_out = colour, .colour_err = colour});
}

// How many ranks a generation had. An older head does not say it: then as many as the newest.
absl::StatusOr<int> RanksOf(Cluster& cluster, const JobDoc& job, uint64_t generation) {
  if (generation == job.generation) return job.world_size;
  GT_ASSIGN_OR_RETURN(const std::string json,
                      Ask(cluster, core::ClientLogs{JobId(job.id), generation, 0, false, 0, 4}));
  GT_ASSIGN_OR_RETURN(const LogDoc log, ParseLogDoc(json));
  return log.world_size.value_or(0) > 0 ? *log.world_size : job.world_size;
}

absl::StatusOr<LogsRequest> MakeRequest(Cluster& cluster, const Args& args, const JobDoc& job) {
  LogsRequest request;
  request.job = job.id;
  GT_ASSIGN_OR_RETURN(const std::optional<int64_t> generation, args.Int("generation", 1, int64_t{1} << 40));
  GT_ASSIGN_OR_RETURN(const std::optional<int64_t> rank, args.Int("rank", 0, spec::kRanksMax));
  if (job.generation == 0)
    return absl::NotFoundError(absl::StrCat(job.id, " has not started yet: ", job.reason));
  if (generation) request.generation = static_cast<uint64_t>(*generation);
  GT_ASSIGN_OR_RETURN(const int ranks, RanksOf(cluster, job, request.generation.value_or(job.generation)));
  if (rank && *rank >= ranks) return absl::NotFoundError(absl::StrCat(job.id, " has ranks 0 to ", ranks - 1));
  std::map<int, std::string> hosts;
  for (const RankDoc& r : job.ranks) hosts[r.rank] = r.hostname;
  for (const bool is_stderr : {false, true}) {
    if (args.Has(is_stderr ? "out" : "err")) continue;
    for (int r = static_cast<int>(rank.value_or(0)); r < (rank ? *rank + 1 : ranks); ++r)
      request.streams.push_back({r, is_stderr, hosts[r]});
  }
  request.one_rank = rank || ranks == 1;
  return request;
}

// A generation that ends while we follow is read to its end before the next one begins.
absl::Status FollowLogs(Cluster& cluster, const Args& args, JobDoc job, LogsRequest request) {
  SignalPipe signals;
  cluster.client->set_interrupt_fd(signals.fd());
  RankOutput output = MakeOutput(request);
  uint64_t after = 0;
  const RealClock clock;
  std::optional<Instant> over_since;
  while (signals.Next() == 0) {
    const absl::StatusOr<bool> any = ReadSome(cluster, request, output);
    if (absl::IsCancelled(any.status())) return absl::OkStatus();
    if (!any.ok() && !absl::IsUnavailable(any.status()) && !absl::IsDeadlineExceeded(any.status()))
      return any.status();
    const bool more = any.ok() && *any;
    if (!Show(output, /*flush=*/false)) return absl::OkStatus();
    if (more) continue;
    if (job.Final()) {
      // A slow disk may not have written its last words yet; a keeper gives up after eight seconds.
      constexpr absl::Duration kPatience = absl::Seconds(10), kPause = absl::Milliseconds(50);
      if (!over_since) over_since = clock.Now();
      const bool ended = std::ranges::all_of(request.streams, &Stream::ended);
      if (ended || clock.Now() - *over_since > kPatience) {
        Show(output, /*flush=*/true);
        return absl::OkStatus();
      }
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
      GT_ASSIGN_OR_RETURN(request, MakeRequest(cluster, args, *now));
    }
    job = *std::move(now);
  }
  return absl::OkStatus();
}

absl::Status PrintLogs(Cluster& cluster, LogsRequest& request) {
  RankOutput output = MakeOutput(request);
  while (!request.streams.empty()) {
    GT_ASSIGN_OR_RETURN(const bool more, ReadSome(cluster, request, output));
    if (!Show(output, /*flush=*/!more) || !more) break;
  }
  return absl::OkStatus();
}

absl::Status Logs(const Args& args) {
  if (args.Has("out") && args.Has("err"))
    return absl::InvalidArgumentError("both are shown without --out and --err");
  GT_ASSIGN_OR_RETURN(Cluster cluster, OpenCluster(args, Start::kNever));
  GT_ASSIGN_OR_RETURN(const JobDoc found, FindJob(cluster, args.words.empty() ? "" : args.words[0]));
  // The list of all jobs leaves out the ranks of finished ones, whose logs are as good as any.
  GT_ASSIGN_OR_RETURN(const JobDoc job, AskJob(cluster, found.id, absl::Seconds(10)));
  GT_ASSIGN_OR_RETURN(LogsRequest request, MakeRequest(cluster, args, job));
  if (args.Has("follow")) return FollowLogs(cluster, args, job, std::move(request));
  if (!job.Final()) EndWhereItIs(cluster, request);
  // Nobody has noted which line of one stream came before which of the other, and errors are looked for at
  // the end.
  const auto errors = std::ranges::partition(request.streams, [](const Stream& s) { return !s.is_stderr; });
  LogsRequest second = request;
  second.streams.assign(errors.begin(), errors.end());
  request.streams.erase(errors.begin(), errors.end());
  for (LogsRequest* part : {&request, &second}) GT_RETURN_IF_ERROR(PrintLogs(cluster, *part));
  return absl::OkStatus();
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
      "stdout and then stderr, for nobody notes which line of one came before which of the other; with -f in "
      "the\n"
      "order in which they come. Of a node that vanished, the last 64 KiB it sent. Control characters are "
      "shown as \\xNN; the files "
      "under\n"
      "<run dir>/logs hold the bytes.\n\n"
      "  gtrain logs fashion-mnist-1                every rank's output, host:rank before each line\n"
      "  gtrain logs --rank 3 --err -f              follow one rank's stderr only\n"
      "  gtrain logs --generation 1                 before the restart";
  verb.flags = {{"rank", '\0', "R", "only this rank"},
                {"out", '\0', "", "only stdout"},
                {"err", '\0', "", "only stderr"},
                {"generation", '\0', "G", "an earlier generation; default: the newest"},
                {"follow", 'f', "", "go on until the job ends"},
                ContextFlag()};
  verb.completes = Completes::kJobs;
  verb.words_max = 1;
  verb.run = Run;
  return verb;
}

}  // namespace gtrain::cli
