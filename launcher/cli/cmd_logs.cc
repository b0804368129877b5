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
#include "launcher/cli/log_files.h"
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
  bool one_rank = false;    // shown as it wrote it, without "host:rank: "
  std::optional<int> rank;  // that the user named
};

core::ClientRequestBody RequestOf(const LogsRequest& request, const Stream& stream, uint64_t offset) {
  return core::ClientLogs{JobId(request.job), request.generation, stream.rank, stream.is_stderr, offset};
}

// Where logs are read from: a piece of each of the streams, as many as asked.
using Source = absl::FunctionRef<std::vector<absl::StatusOr<LogDoc>>(absl::Span<const Stream>)>;

struct Came {
  bool any = false;
  absl::Status status;  // of the first stream that could not be read; what came of the others is shown
};

// One piece of each stream. Not all there is: a rank may write faster than we read, and what was read is
// shown before more is kept.
Came ReadSome(Source read, LogsRequest& request, RankOutput& output) {
  Came came;
  for (size_t at = 0; at < request.streams.size(); at += kStreamsAtOnce) {
    const auto streams = absl::MakeSpan(request.streams).subspan(at, kStreamsAtOnce);
    const std::vector<absl::StatusOr<LogDoc>> logs = read(streams);
    for (size_t i = 0; i < streams.size(); ++i) {
      Stream& stream = streams[i];
      if (stream.until && stream.offset >= *stream.until) continue;
      came.status.Update(logs[i].status());
      if (!logs[i].ok()) continue;
      if (!logs[i]->note.empty() && stream.offset == 0 && !std::exchange(stream.told, true))
        Complain(absl::StrCat("rank ", stream.rank, ": ", SafeText(logs[i]->note)));
      if (stream.host.empty()) stream.host = logs[i]->hostname;
      output.Add(stream.rank, stream.host, stream.is_stderr, logs[i]->text);
      stream.ended = logs[i]->end;
      if (logs[i]->next_offset <= stream.offset) continue;
      came.any = true;
      stream.offset = logs[i]->next_offset;
    }
  }
  return came;
}

std::vector<absl::StatusOr<LogDoc>> AskForPieces(Cluster& cluster, const LogsRequest& request,
                                                 absl::Span<const Stream> streams) {
  std::vector<core::ClientRequestBody> questions;
  for (const Stream& stream : streams) questions.push_back(RequestOf(request, stream, stream.offset));
  std::vector<absl::StatusOr<LogDoc>> logs;
  for (const auto& answer : AskAll(cluster, std::move(questions), kAnswerWithin))
    logs.push_back(answer.ok() ? ParseLogDoc(*answer) : answer.status());
  return logs;
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

// How many ranks a generation had, with those that waited beside them. An older head does not say it: then as
// many as the newest. Of the newest the job itself says it, but for those that waited and are gone: for a
// rank that the user names beyond it the head is asked.
absl::StatusOr<int> RanksOf(Cluster& cluster, const JobDoc& job, uint64_t generation,
                            std::optional<int64_t> rank) {
  const int now = std::max(job.world_size, static_cast<int>(job.ranks.size()));
  if (generation == job.generation && rank.value_or(0) < now) return now;
  GT_ASSIGN_OR_RETURN(const std::string json,
                      Ask(cluster, core::ClientLogs{JobId(job.id), generation, 0, false, 0, 4}));
  GT_ASSIGN_OR_RETURN(const LogDoc log, ParseLogDoc(json));
  return log.world_size.value_or(0) > 0 ? *log.world_size : job.world_size;
}

// The generation that the user named, if any.
absl::StatusOr<std::optional<uint64_t>> NamedGeneration(const Args& args, const JobDoc& job) {
  GT_ASSIGN_OR_RETURN(const std::optional<int64_t> generation, args.Int("generation", 1, int64_t{1} << 40));
  if (job.generation == 0)
    return absl::NotFoundError(absl::StrCat(job.id, " has not started yet: ", job.reason));
  if (!generation) return std::nullopt;
  // This is not NotFound, for which the files of the run directory would be tried, which could not answer
  // either.
  if (static_cast<uint64_t>(*generation) > job.generation) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", job.id, " has no generation ", *generation, "; its newest is ", job.generation));
  }
  return static_cast<uint64_t>(*generation);
}

// `generation`: none is the newest. `ranks`: how many it had.
absl::StatusOr<LogsRequest> MakeRequest(const Args& args, const JobDoc& job,
                                        std::optional<uint64_t> generation, int ranks) {
  LogsRequest request;
  request.job = job.id;
  request.generation = generation;
  GT_ASSIGN_OR_RETURN(const std::optional<int64_t> rank, args.Int("rank", 0, spec::kRanksMax));
  if (rank) request.rank = static_cast<int>(*rank);
  std::map<int, std::string> hosts;
  const bool newest = generation.value_or(job.generation) == job.generation;
  for (const RankDoc& r : job.ranks) hosts[r.rank] = newest ? r.hostname : "";
  for (const bool is_stderr : {false, true}) {
    if (args.Has(is_stderr ? "out" : "err")) continue;
    for (int r = request.rank.value_or(0); r < (rank ? *request.rank + 1 : ranks); ++r)
      request.streams.push_back({r, is_stderr, hosts[r]});
  }
  request.one_rank = rank || ranks == 1;
  return request;
}

absl::StatusOr<LogsRequest> MakeRequest(Cluster& cluster, const Args& args, const JobDoc& job,
                                        std::optional<uint64_t> generation) {
  GT_ASSIGN_OR_RETURN(const std::optional<int64_t> rank, args.Int("rank", 0, spec::kRanksMax));
  GT_ASSIGN_OR_RETURN(const int ranks, RanksOf(cluster, job, generation.value_or(job.generation), rank));
  if (rank && *rank >= ranks)
    return absl::FailedPreconditionError(absl::StrCat(job.id, " has ranks 0 to ", ranks - 1));
  return MakeRequest(args, job, generation, ranks);
}

// Follows a job from generation to generation. Each one is asked for by its number and has an output of its
// own, so what comes late is still its own. One that is over is read on: a process that waited for its place
// in the next one, and one that goes on in it, write there until their keeper has given them that place,
// which is later than the head says that the next generation has begun. Where the logs lie on this machine
// they are read here: what was written is there also while an agent or the head is away.
class LogFollower {
 public:
  LogFollower(Cluster& cluster, const Args& args, JobDoc job)
      : cluster_(cluster), args_(args), job_(std::move(job)), files_(cluster, job_) {
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
  // A file is looked at in no time, and a rank that writes line by line has always written one more.
  static constexpr absl::Duration kLookAgain = absl::Milliseconds(2);
  // Another head may come as late as that; where the local cluster was ended none comes after kPatience.
  static constexpr absl::Duration kSilencePatience = absl::Minutes(10);

  static bool Ended(const Followed& one) { return std::ranges::all_of(one.request.streams, &Stream::ended); }

  void Begin(LogsRequest request) {
    RankOutput output = MakeOutput(request);
    followed_.push_back({std::move(request), std::move(output), std::nullopt});
  }

  absl::Status Turn() {
    GT_ASSIGN_OR_RETURN(const bool more, ReadAll());
    if (more) absl::SleepFor(kLookAgain);
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
    absl::StatusOr<JobDoc> now = AskJob(cluster_, job_.id, absl::Seconds(10));
    if (IsSilence(now.status())) return AwaitHead(now.status());
    GT_RETURN_IF_ERROR(now.status());
    silent_since_.reset();
    return GoOver(*std::move(now));
  }

  static bool IsSilence(const absl::Status& status) {
    return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
  }

  // The ranks do not depend on the head, and the next one of the local cluster may be at another address.
  absl::Status AwaitHead(const absl::Status& silence) {
    constexpr absl::Duration kPause = absl::Milliseconds(200);
    const Instant now = clock_.Now();
    if (!silent_since_) {
      silent_since_ = now;
      Complain(absl::StrCat(SafeText(silence.message()), "; trying again"));
    }
    const absl::Duration silent = now - *silent_since_;
    if (silent > kSilencePatience) return silence;
    if (cluster_.is_own()) {
      const absl::Status there = Reconnect(cluster_, Start::kNever);
      if (there.ok()) cluster_.client->set_interrupt_fd(signals_.fd());
      if (absl::IsNotFound(there) && silent > kPatience) return silence;
    }
    absl::SleepFor(kPause);
    return absl::OkStatus();
  }

  // Whether more will come no file says: the head is asked for it where that matters, once the job is over.
  std::vector<absl::StatusOr<LogDoc>> Read(const LogsRequest& request, absl::Span<const Stream> streams) {
    std::vector<absl::StatusOr<LogDoc>> logs;
    std::vector<Stream> others;
    std::vector<size_t> places;
    for (const Stream& stream : streams) {
      std::optional<LogDoc> here =
          files_.Read(*request.generation, stream.rank, stream.is_stderr, stream.offset);
      const bool enough = here && (!here->text.empty() || !job_.Final());
      if (!enough) others.push_back(stream), places.push_back(logs.size());
      logs.push_back(here ? absl::StatusOr<LogDoc>(*std::move(here)) : absl::NotFoundError("no file"));
    }
    if (others.empty()) return logs;
    std::vector<absl::StatusOr<LogDoc>> answers = AskForPieces(cluster_, request, others);
    for (size_t i = 0; i < answers.size(); ++i) {
      absl::StatusOr<LogDoc>& log = logs[places[i]];
      const bool forgotten = absl::IsNotFound(answers[i].status());  // nobody writes there any more
      if (answers[i].ok() || !log.ok()) log = std::move(answers[i]);
      if (log.ok() && forgotten) log->end = true;
    }
    return logs;
  }

  // True: something came. The older ones are read first, so that lines come in the order of generations.
  absl::StatusOr<bool> ReadAll() {
    bool any = false;
    for (auto one = followed_.begin(); one != followed_.end() && !ended_;) {
      const Came came =
          ReadSome([&](absl::Span<const Stream> streams) { return Read(one->request, streams); },
                   one->request, one->output);
      any = any || came.any;
      const bool goes_over = !args_.Has("generation");
      const bool older = goes_over && *one->request.generation < job_.generation;
      // The head may know of a newer one by then: the job is asked for before anything is given up.
      const bool forgotten = goes_over && absl::IsNotFound(came.status);
      if (!came.status.ok() && !forgotten && !IsSilence(came.status)) return came.status;
      one->output.AddRedrawn(clock_.Now());
      const bool over = older && (forgotten || IsOver(*one, came.any));
      if (over && !came.status.ok() && !Ended(*one))
        Complain(absl::StrCat("the rest of generation ", *one->request.generation,
                              " is not shown: ", SafeText(came.status.message())));
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

  // Where the head does not say how many ranks it had, the files here say who wrote in it. Where an agent is
  // only away for a while it has had as many as the newest, as far as anybody knows.
  absl::StatusOr<LogsRequest> RequestFor(const JobDoc& now, uint64_t generation) {
    absl::StatusOr<LogsRequest> request = MakeRequest(cluster_, args_, now, generation);
    const bool silence = IsSilence(request.status());
    if (!silence && !absl::IsNotFound(request.status())) return request;
    const int ranks = std::max(files_.RanksOf(generation), silence ? now.world_size : 0);
    return ranks > 0 ? MakeRequest(args_, now, generation, ranks) : std::move(request);
  }

  // A generation may have come and gone between two looks: its logs are as good as any.
  absl::Status GoOver(JobDoc now) {
    for (uint64_t next = job_.generation + 1; next <= now.generation && !args_.Has("generation"); ++next) {
      absl::StatusOr<LogsRequest> request = RequestFor(now, next);
      // One that is forgotten, or in which the rank that was asked for has no place, has nothing to show.
      const bool none = absl::IsNotFound(request.status()) || absl::IsFailedPrecondition(request.status());
      Complain(none ? absl::StrCat("generation ", next, ": ", SafeText(request.status().message()))
                    : absl::StrCat("generation ", next));
      job_.generation = next;
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
  const LogFiles files_;
  const RealClock clock_;
  SignalPipe signals_;
  std::list<Followed> followed_;  // in the order of generations
  uint64_t after_ = 0;
  bool ended_ = false;  // all was shown, or nobody reads it
  std::optional<Instant> over_since_, silent_since_;
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

// Says on stderr why there is nothing, or where there is more.
void SayWhatIsNotShown(const LogsRequest& request, const JobDoc& job, bool anything) {
  if (!anything && request.rank) {
    const bool earlier = !request.generation && job.generation > 1;
    return Complain(absl::StrCat(
        "rank ", *request.rank, " has written nothing in generation ",
        request.generation.value_or(job.generation), job.Final() ? "" : " yet",
        earlier ? absl::StrCat("; an earlier one may have: --generation 1 to ", job.generation - 1) : ""));
  }
  if (request.generation || job.generation < 2) return;
  if (!anything) return SayWhoWrote(job);
  // In place each generation has logs of its own: a user who sees the last ones may take them for all.
  const std::optional<uint64_t> newest =
      job.Final() ? NewestWritten(job.run_dir, job.generation) : std::nullopt;
  if (!newest) return;
  Complain(absl::StrCat("this is generation ", job.generation, "; earlier ones wrote, too: --generation ",
                        *newest == 1 ? "1" : absl::StrCat("1 to ", *newest)));
}

// All stdout and then all stderr: nobody has noted which line of one stream came before which of the other,
// and errors are looked for at the end.
absl::Status PrintLogs(Source read, const LogsRequest& request, const JobDoc& job) {
  bool anything = false;
  for (const bool is_stderr : {false, true}) {
    LogsRequest part = request;
    std::erase_if(part.streams, [&](const Stream& stream) { return stream.is_stderr != is_stderr; });
    RankOutput output = MakeOutput(part);
    while (!part.streams.empty()) {
      const auto [more, status] = ReadSome(read, part, output);
      anything = anything || more;
      const bool reads_on = more && status.ok();
      const bool shown = Show(output, /*flush=*/!reads_on);
      GT_RETURN_IF_ERROR(status);
      if (!shown || !reads_on) break;
    }
  }
  SayWhatIsNotShown(request, job, anything);
  return absl::OkStatus();
}

// Shows the files in the run directory, which nobody writes any more.
absl::Status ShowLeft(const Args& args, const std::string& json) {
  GT_ASSIGN_OR_RETURN(const JobDoc job, ParseJobDoc(json));
  if (job.ranks.empty() && job.generation > 0)
    return absl::NotFoundError(absl::StrCat("the run directory of ", job.id, " is gone: ", job.run_dir));
  GT_ASSIGN_OR_RETURN(const std::optional<uint64_t> generation, NamedGeneration(args, job));
  // Nobody remembers how many ranks an earlier one had, and who waited beside them: its files do.
  const uint64_t shown = generation.value_or(job.generation);
  const int ranks = std::max(RanksLogged(job.run_dir, shown), shown == job.generation ? job.world_size : 0);
  GT_ASSIGN_OR_RETURN(const LogsRequest request, MakeRequest(args, job, generation, std::max(1, ranks)));
  const auto pieces = [&](absl::Span<const Stream> streams) {
    std::vector<absl::StatusOr<LogDoc>> logs;
    for (const Stream& stream : streams)
      logs.push_back(ReadLeftLog(job, request.generation, stream.rank, stream.is_stderr, stream.offset));
    return logs;
  };
  return PrintLogs(pieces, request, job);
}

// `word` becomes the id of the job that was chosen: if its logs cannot be had, no other job's are shown.
absl::Status AskForLogs(const Args& args, std::string& word) {
  GT_ASSIGN_OR_RETURN(Cluster cluster, OpenCluster(args, Start::kNever));
  GT_ASSIGN_OR_RETURN(const JobDoc found, FindJob(cluster, word, Without::kNewest));
  word = found.id;
  // The list of all jobs leaves out the ranks of finished ones, whose logs are as good as any.
  GT_ASSIGN_OR_RETURN(const JobDoc job, AskJob(cluster, found.id, absl::Seconds(10)));
  GT_ASSIGN_OR_RETURN(const std::optional<uint64_t> generation, NamedGeneration(args, job));
  GT_ASSIGN_OR_RETURN(LogsRequest request, MakeRequest(cluster, args, job, generation));
  if (args.Has("follow")) return LogFollower(cluster, args, job).Run(std::move(request));
  if (!job.Final()) EndWhereItIs(cluster, request);
  return PrintLogs([&](absl::Span<const Stream> streams) { return AskForPieces(cluster, request, streams); },
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
