#include <unistd.h>

#include <algorithm>
#include <list>
#include <map>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "job/spec/parse.h"
#include "launcher/cli/context.h"
#include "launcher/cli/follow.h"
#include "launcher/cli/left.h"
#include "launcher/cli/rank_output.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"

namespace gtrain::cli {
namespace {

constexpr absl::Duration kAnswerWithin = absl::Seconds(20);
constexpr size_t kStreamsAtOnce = 64;  // of which at most 256 KiB each are on the way

struct Stream {
  int rank = 0;
  bool is_stderr = false;
  std::string host;
  uint64_t offset = 0;
  std::optional<uint64_t> until;  // what follows is not read
  bool ended = true;              // no more will come, as far as was heard
  bool told = false;              // why there may be less than it wrote
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

// Where logs are read from: a piece of each of the streams, as many as asked.
using Source = absl::FunctionRef<std::vector<absl::StatusOr<LogDoc>>(absl::Span<const Stream>)>;

// One piece of each stream; true when something came. Not all there is: a rank may write faster than we read,
// and what was read is shown before more is kept.
absl::StatusOr<bool> ReadSome(Source read, LogsRequest& request, RankOutput& output) {
  bool any = false;
  for (size_t at = 0; at < request.streams.size(); at += kStreamsAtOnce) {
    const auto streams = absl::MakeSpan(request.streams).subspan(at, kStreamsAtOnce);
    const std::vector<absl::StatusOr<LogDoc>> logs = read(streams);
    for (size_t i = 0; i < streams.size(); ++i) {
      Stream& stream = streams[i];
      if (stream.until && stream.offset >= *stream.until) continue;
      if (!logs[i].ok()) return logs[i].status();
      if (!logs[i]->note.empty() && stream.offset == 0 && !std::exchange(stream.told, true))
        Complain(absl::StrCat("rank ", stream.rank, ": ", SafeText(logs[i]->note)));
      if (stream.host.empty()) stream.host = logs[i]->hostname;
      output.Add(stream.rank, stream.host, stream.is_stderr, logs[i]->text);
      stream.ended = logs[i]->end;
      if (logs[i]->next_offset <= stream.offset) continue;
      any = true;
      stream.offset = logs[i]->next_offset;
    }
  }
  return any;
}

absl::StatusOr<bool> ReadSome(Cluster& cluster, LogsRequest& request, RankOutput& output) {
  const auto ask = [&](absl::Span<const Stream> streams) {
    std::vector<core::ClientRequestBody> questions;
    for (const Stream& stream : streams) questions.push_back(RequestOf(request, stream, stream.offset));
    std::vector<absl::StatusOr<LogDoc>> logs;
    for (const auto& answer : AskAll(cluster, std::move(questions), kAnswerWithin))
      logs.push_back(answer.ok() ? ParseLogDoc(*answer) : answer.status());
    return logs;
  };
  return ReadSome(ask, request, output);
}

// Without --follow only the output up to now is shown: a rank may write faster than a person reads.
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
  // With those that wait beside the ranks.
  if (generation == job.generation) return std::max(job.world_size, static_cast<int>(job.ranks.size()));
  GT_ASSIGN_OR_RETURN(const std::string json,
                      Ask(cluster, core::ClientLogs{JobId(job.id), generation, 0, false, 0, 4}));
  GT_ASSIGN_OR_RETURN(const LogDoc log, ParseLogDoc(json));
  return log.world_size.value_or(0) > 0 ? *log.world_size : job.world_size;
}

// `cluster`: nullptr for a job that no head knows. `which`: the generation, where the user names none.
absl::StatusOr<LogsRequest> MakeRequest(Cluster* cluster, const Args& args, const JobDoc& job,
                                        std::optional<int64_t> which = std::nullopt) {
  LogsRequest request;
  request.job = job.id;
  GT_ASSIGN_OR_RETURN(std::optional<int64_t> generation, args.Int("generation", 1, int64_t{1} << 40));
  if (!generation) generation = which;
  GT_ASSIGN_OR_RETURN(const std::optional<int64_t> rank, args.Int("rank", 0, spec::kRanksMax));
  if (job.generation == 0)
    return absl::NotFoundError(absl::StrCat(job.id, " has not started yet: ", job.reason));
  // This is not NotFound, for which the files of the run directory would be tried, which could not answer
  // either.
  if (generation && static_cast<uint64_t>(*generation) > job.generation) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", job.id, " has no generation ", *generation, "; its newest is ", job.generation));
  }
  if (generation) request.generation = static_cast<uint64_t>(*generation);
  int ranks = job.world_size;
  if (cluster != nullptr) {
    GT_ASSIGN_OR_RETURN(ranks, RanksOf(*cluster, job, request.generation.value_or(job.generation)));
  }
  // Without a head nobody knows how many waited beside a generation: its files do.
  if (rank && *rank >= ranks && cluster != nullptr)
    return absl::FailedPreconditionError(absl::StrCat(job.id, " has ranks 0 to ", ranks - 1));
  std::map<int, std::string> hosts;
  const bool newest = request.generation.value_or(job.generation) == job.generation;
  for (const RankDoc& r : job.ranks) hosts[r.rank] = newest ? r.hostname : "";
  for (const bool is_stderr : {false, true}) {
    if (args.Has(is_stderr ? "out" : "err")) continue;
    for (int r = static_cast<int>(rank.value_or(0)); r < (rank ? *rank + 1 : ranks); ++r)
      request.streams.push_back({r, is_stderr, hosts[r]});
  }
  request.one_rank = rank || ranks == 1;
  return request;
}

// Follows a job from generation to generation. Each one is asked for by its number and has an output of its
// own, so what comes late is still its own. One that is over is read on: a process that waited for its place
// in the next one, and one that goes on in it, write there until their keeper has given them that place,
// which is later than the head says that the next generation has begun.
class LogFollower {
 public:
  LogFollower(Cluster& cluster, const Args& args, JobDoc job)
      : cluster_(cluster), args_(args), job_(std::move(job)) {
    cluster_.client->set_interrupt_fd(signals_.fd());
  }

  absl::Status Run(LogsRequest first) {
    if (!first.generation) first.generation = job_.generation;
    Begin(std::move(first));
    absl::Status status;
    while (status.ok() && !ended_ && signals_.Next() == 0) status = Turn();
    return absl::IsCancelled(status) ? absl::OkStatus() : status;  // a signal came
  }

 private:
  struct Followed {
    LogsRequest request;
    RankOutput output;
    std::optional<Instant> quiet_since;  // it is over, and nothing has come since
  };

  // A processor that is busy elsewhere may keep a keeper from its work for so long.
  static constexpr absl::Duration kQuiet = absl::Seconds(3);
  // A slow disk may not have written its last words yet; a keeper gives up after eight seconds.
  static constexpr absl::Duration kPatience = absl::Seconds(10);

  static bool Ended(const Followed& one) { return std::ranges::all_of(one.request.streams, &Stream::ended); }

  void Begin(LogsRequest request) {
    RankOutput output = MakeOutput(request);
    followed_.push_back({std::move(request), std::move(output), std::nullopt});
  }

  absl::Status Turn() {
    GT_ASSIGN_OR_RETURN(const bool more, ReadAll());
    if (more || ended_) return absl::OkStatus();
    if (job_.Final()) {
      AwaitLastWords();
      return absl::OkStatus();
    }
    const absl::StatusOr<std::string> wait =
        Ask(cluster_, core::ClientEvents{JobId(job_.id), after_, absl::Milliseconds(500)}, absl::Seconds(10));
    if (wait.ok()) {
      GT_ASSIGN_OR_RETURN(const EventsDoc events, ParseEventsDoc(*wait));
      after_ = events.next;
    }
    GT_ASSIGN_OR_RETURN(JobDoc now, AskJob(cluster_, job_.id, absl::Seconds(10)));
    return GoOver(std::move(now));
  }

  // True: something came. The older ones are read first, so that lines come in the order of generations.
  absl::StatusOr<bool> ReadAll() {
    bool any = false;
    for (auto one = followed_.begin(); one != followed_.end() && !ended_;) {
      const absl::StatusOr<bool> came = ReadSome(cluster_, one->request, one->output);
      const bool older = !args_.Has("generation") && *one->request.generation < job_.generation;
      const bool forgotten = older && absl::IsNotFound(came.status());  // by the head
      if (forgotten)
        Complain(absl::StrCat("the rest of generation ", *one->request.generation,
                              " is not shown: ", SafeText(came.status().message())));
      if (!came.ok() && !forgotten && !absl::IsUnavailable(came.status()) &&
          !absl::IsDeadlineExceeded(came.status()))
        return came.status();
      const bool more = came.ok() && *came;
      any = any || more;
      one->output.AddRedrawn(clock_.Now());
      const bool over = forgotten || (older && IsOver(*one, more));
      ended_ = !Show(one->output, /*flush=*/over);
      one = over ? followed_.erase(one) : std::next(one);
    }
    return any;
  }

  bool IsOver(Followed& one, bool more) {
    const Instant now = clock_.Now();
    if (more || !one.quiet_since) one.quiet_since = more ? now : one.quiet_since.value_or(now);
    return now - *one.quiet_since > (Ended(one) ? kQuiet : kPatience);
  }

  void AwaitLastWords() {
    constexpr absl::Duration kPause = absl::Milliseconds(50);
    if (!over_since_) over_since_ = clock_.Now();
    ended_ = std::ranges::all_of(followed_, Ended) || clock_.Now() - *over_since_ > kPatience;
    if (!ended_) return absl::SleepFor(kPause);
    for (Followed& one : followed_) Show(one.output, /*flush=*/true);
  }

  // A generation may have come and gone between two looks: its logs are as good as any.
  absl::Status GoOver(JobDoc now) {
    for (uint64_t next = job_.generation + 1; next <= now.generation && !args_.Has("generation"); ++next) {
      absl::StatusOr<LogsRequest> request = MakeRequest(&cluster_, args_, now, static_cast<int64_t>(next));
      // One that is forgotten, or in which the rank that was asked for has no place, has nothing to show.
      const bool none = absl::IsNotFound(request.status()) || absl::IsFailedPrecondition(request.status());
      Complain(none ? absl::StrCat("generation ", next, ": ", SafeText(request.status().message()))
                    : absl::StrCat("generation ", next));
      if (none) continue;
      GT_RETURN_IF_ERROR(request.status());
      Begin(*std::move(request));
    }
    job_ = std::move(now);
    return absl::OkStatus();
  }

  Cluster& cluster_;
  const Args& args_;
  JobDoc job_;
  const RealClock clock_;
  SignalPipe signals_;
  std::list<Followed> followed_;  // in the order of generations
  uint64_t after_ = 0;
  bool ended_ = false;  // all was shown, or nobody reads it
  std::optional<Instant> over_since_;
};

// After a restart an earlier generation may have written the output that the user wants, and processes that
// go on in place write where they were started. Where the logs lie elsewhere nobody knows which one it is.
void SayWhoWrote(const JobDoc& job) {
  const bool here = HasLogs(job.run_dir);
  const std::optional<uint64_t> wrote = NewestWritten(job.run_dir, job.generation);
  Complain(absl::StrCat(
      "generation ", job.generation, " has written nothing", job.Final() ? "" : " yet",
      wrote  ? absl::StrCat("; what an earlier one wrote: --generation ", *wrote)
      : here ? ", and no earlier one has"
             : absl::StrCat("; an earlier one may have: --generation 1 to ", job.generation - 1)));
}

// All stdout and then all stderr: nobody has noted which line of one stream came before which of the other,
// and errors are looked for at the end.
absl::Status PrintLogs(absl::FunctionRef<absl::StatusOr<bool>(LogsRequest&, RankOutput&)> read,
                       const LogsRequest& request, const JobDoc& job) {
  bool anything = false;
  for (const bool is_stderr : {false, true}) {
    LogsRequest part = request;
    std::erase_if(part.streams, [&](const Stream& stream) { return stream.is_stderr != is_stderr; });
    RankOutput output = MakeOutput(part);
    while (!part.streams.empty()) {
      GT_ASSIGN_OR_RETURN(const bool more, read(part, output));
      anything = anything || more;
      if (!Show(output, /*flush=*/!more) || !more) break;
    }
  }
  if (!anything && !request.generation && job.generation > 1) SayWhoWrote(job);
  return absl::OkStatus();
}

// Shows the files in the run directory, which nobody writes any more.
absl::Status ShowLeft(const Args& args, const std::string& json) {
  GT_ASSIGN_OR_RETURN(const JobDoc job, ParseJobDoc(json));
  if (job.ranks.empty() && job.generation > 0)
    return absl::NotFoundError(absl::StrCat("the run directory of ", job.id, " is gone: ", job.run_dir));
  GT_ASSIGN_OR_RETURN(const LogsRequest request, MakeRequest(nullptr, args, job));
  const auto pieces = [&](absl::Span<const Stream> streams) {
    std::vector<absl::StatusOr<LogDoc>> logs;
    for (const Stream& stream : streams)
      logs.push_back(ReadLeftLog(job, request.generation, stream.rank, stream.is_stderr, stream.offset));
    return logs;
  };
  return PrintLogs([&](LogsRequest& part, RankOutput& output) { return ReadSome(pieces, part, output); },
                   request, job);
}

// `word` becomes the id of the job that was chosen: if its logs cannot be had, no other job's are shown.
absl::Status AskForLogs(const Args& args, std::string& word) {
  GT_ASSIGN_OR_RETURN(Cluster cluster, OpenCluster(args, Start::kNever));
  GT_ASSIGN_OR_RETURN(const JobDoc found, FindJob(cluster, word, Without::kNewest));
  word = found.id;
  // The list of all jobs leaves out the ranks of finished ones, whose logs are as good as any.
  GT_ASSIGN_OR_RETURN(const JobDoc job, AskJob(cluster, found.id, absl::Seconds(10)));
  GT_ASSIGN_OR_RETURN(LogsRequest request, MakeRequest(&cluster, args, job));
  if (args.Has("follow")) return LogFollower(cluster, args, job).Run(std::move(request));
  if (!job.Final()) EndWhereItIs(cluster, request);
  return PrintLogs([&](LogsRequest& part, RankOutput& output) { return ReadSome(cluster, part, output); },
                   request, job);
}

absl::Status Logs(const Args& args) {
  if (args.Has("out") && args.Has("err"))
    return absl::InvalidArgumentError("both are shown without --out and --err");
  std::string word = args.words.empty() ? "" : args.words[0];
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

int RunLogs(const Args& args) {
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
      "order in which they come. Without JOB: the only job that runs, else the newest that is over. JOB may "
      "be the\n"
      "run directory of a job that is over. Of a node that vanished, the last 64 KiB it sent. Control "
      "characters are shown as \\xNN; the files "
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
  verb.run = RunLogs;
  return verb;
}

}  // namespace gtrain::cli
