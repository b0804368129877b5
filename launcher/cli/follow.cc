// One loop, one thread: handle a signal if one came, wait for events a short while, read the state and the
// new output, show it. Every request has a deadline; a signal ends a waiting request at once. When the head
// is silent the loop keeps asking with the same patience: the ranks do not depend on it.
#include "launcher/cli/follow.h"

#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <list>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "base/units.h"
#include "launcher/cli/left.h"
#include "launcher/cli/news.h"
#include "launcher/cli/rank_output.h"
#include "launcher/cli/screen.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"
#include "runtime/agent/node.h"
#include "runtime/core/agent/agent_core.h"

namespace gtrain::cli {
namespace {

constexpr absl::Duration kEventsWait = absl::Milliseconds(400);
constexpr absl::Duration kLookMin = absl::Milliseconds(5);           // between two looks at a log here
constexpr absl::Duration kLoudEventsWait = absl::Milliseconds(100);  // while output is read beside
constexpr absl::Duration kRequestTimeout = absl::Seconds(10);
constexpr absl::Duration kOwnRequestTimeout = absl::Seconds(3);  // then look for the next head
constexpr absl::Duration kLogTimeout = absl::Seconds(15);        // above the time the head gives an agent
constexpr absl::Duration kOwnLogTimeout = absl::Seconds(3);      // a local agent is back sooner
constexpr absl::Duration kSilencePatience = absl::Minutes(10);
constexpr absl::Duration kEndedPatience = absl::Seconds(10);  // for a head that ended in order
constexpr absl::Duration kReportPatience = absl::Seconds(2);
constexpr absl::Duration kReportPoll = absl::Milliseconds(20);
constexpr int kRanksShown = 32;  // output of more ranks is in the log files
constexpr uint64_t kFirstBytes = 4096;
constexpr uint64_t kCharacterBytes = 4;  // a piece is cut between characters
constexpr int kChunksPerTurn = 8;        // of one rank's stream, so that one loud rank cannot starve the rest
constexpr int kChunksOfTheOld = 64;      // of a generation that has just ended
constexpr int kFileChunks = 4;           // as many times more of a file that lies here
constexpr int kTurnsOfTheRest = 8;       // of what was written when the job is over
constexpr absl::Duration kRestPatience = absl::Seconds(5);
constexpr absl::Duration kEndPatience = absl::Seconds(10);  // above the time that a keeper gives its logs
constexpr absl::Duration kEndPoll = absl::Milliseconds(10), kEndPollMax = absl::Milliseconds(250);

// Reads what ranks wrote since the last time, of each generation until nothing more comes: processes that go
// over to the next one write in the old one until their keeper has given them their place, which is later
// than the head says that the next one has begun, and one may come and go between two looks.
class OutputReader {
 public:
  OutputReader(Cluster& cluster, std::string job, const FollowOptions& options)
      : cluster_(cluster),
        job_(std::move(job)),
        rank0_alone_(!options.show),
        shown_generation_(options.shown_generation),
        shown_bytes_(options.shown_bytes) {}

  // `show` is called after each piece of a file on this machine, if given, and says whether to read on now.
  using Show = std::function<bool()>;
  void Read(const JobDoc& job, RankOutput& output, const Show& show) {
    if (job.generation == 0) return;
    final_ = job.Final();
    timeout_ = cluster_.is_own() && !final_ ? kOwnLogTimeout : kLogTimeout;
    GoOver(job);
    run_dir_ = cluster_.backend->on_this_machine() && MayRead(job) ? job.run_dir : "";
    for (auto of = watched_.begin(); std::next(of) != watched_.end();)
      of = ReadOlder(*of, output, show) ? std::next(of) : watched_.erase(of);
    ReadRanks(watched_.back(), output, kChunksPerTurn, show);
  }

  bool reads_files() const { return !run_dir_.empty(); }  // on this machine
  // Reads the new output in the files on this machine. True: there is more.
  bool ReadFiles(RankOutput& output, const Show& show) {
    bool more = false;
    if (watched_.empty()) return more;
    Watched& of = watched_.back();
    for (const auto& [rank, host] : of.hosts) {
      for (const bool is_stderr : {false, true})
        more = ReadFile(of, {rank, is_stderr}, kChunksPerTurn, output, show) == Found::kMore || more;
    }
    return more;
  }

  // Streams that had more when they were read last: generation, rank, whether it is stderr.
  using Cut = std::tuple<uint64_t, int, bool>;
  const std::set<Cut>& cut() const { return cut_; }
  // Streams whose ends were not seen: they may still be written, though the job is over.
  const std::set<Cut>& open() const { return open_; }
  uint64_t bytes() const { return bytes_; }  // read so far

 private:
  struct Stream {
    int rank = 0;
    bool is_stderr = false;
  };
  struct File {
    std::string path;
    UniqueFd fd;
  };
  struct Watched {
    uint64_t generation = 0;
    std::map<int, std::string> hosts = {};
    std::map<std::pair<int, bool>, uint64_t> offsets = {};
    std::map<std::pair<int, bool>, File> files = {};
    std::optional<Instant> quiet_since = {};  // it is over, and nothing has come since
  };
  enum class Found {
    kMore,
    kAll,      // nobody else knows of more
    kUnknown,  // the file is not here, or cannot be read
  };

  // Of a generation that is over; false: no more will come. What comes next is of other processes.
  bool ReadOlder(Watched& of, RankOutput& output, const Show& show) {
    const uint64_t before = bytes_;
    const bool first = !of.quiet_since;
    ReadRanks(of, output, first ? kChunksOfTheOld : kChunksPerTurn, show);
    if (first || bytes_ != before) {
      of.quiet_since = clock_.Now();
      output.EndLines();
    }
    if (final_ || clock_.Now() - *of.quiet_since <= kEndPatience) return true;
    const auto is_of = [&](const Cut& cut) { return std::get<0>(cut) == of.generation; };
    std::erase_if(cut_, is_of);
    std::erase_if(open_, is_of);
    return false;
  }

  void GoOver(const JobDoc& job) {
    const uint64_t first = watched_.empty() ? job.generation : watched_.back().generation + 1;
    for (uint64_t next = first; next <= job.generation; ++next) {
      Watched of{.generation = next};
      if (next == shown_generation_) of.offsets[{0, false}] = shown_bytes_;
      if (next < job.generation) AskWhoWrote(of);
      watched_.push_back(std::move(of));
    }
    if (watched_.back().generation != job.generation) return;
    for (const RankDoc& rank : job.ranks) {  // who waits beside them is not named any more when it has ended
      if (rank.rank < kRanksShown) watched_.back().hosts[rank.rank] = rank.hostname;
    }
  }

  // Of a generation that was never looked at. Where its other ranks were is learned with what they wrote.
  void AskWhoWrote(Watched& of) {
    const absl::StatusOr<std::string> json =
        Ask(cluster_, core::ClientLogs{JobId(job_), of.generation, 0, false, 0, kCharacterBytes}, timeout_);
    const absl::StatusOr<LogDoc> log = json.ok() ? ParseLogDoc(*json) : json.status();
    if (!log.ok()) return;  // it is forgotten
    const int ranks = std::min(log->world_size.value_or(0), kRanksShown);
    for (int rank = 0; rank < ranks; ++rank) of.hosts[rank] = log->hostname;
  }

  // Like an agent, it does not read a run directory that belongs to another job or another user.
  bool MayRead(const JobDoc& job) const {
    const std::string log = core::RankLogPath(job.run_dir, Generation{watched_.back().generation}, 0, false);
    return agent::CheckRunDirOfLog(log, ClusterId(job.cluster), JobId(job_)).ok();
  }

  // On the user's own machine the way through agent and head, sealed twice, costs more than all else. The
  // file stays open: the way to it costs more than a piece of it.
  Found ReadFile(Watched& of, const Stream& stream, int chunks, RankOutput& output, const Show& show) {
    if (run_dir_.empty()) return Found::kUnknown;
    File& file = of.files[{stream.rank, stream.is_stderr}];
    const Cut cut(of.generation, stream.rank, stream.is_stderr);
    if (!file.fd.valid()) {
      file.path = core::RankLogPath(run_dir_, Generation{of.generation}, stream.rank, stream.is_stderr);
      absl::StatusOr<UniqueFd> opened = agent::OpenLog(file.path);
      if (!opened.ok()) {
        cut_.erase(cut);
        return absl::IsNotFound(opened.status()) ? Found::kAll : Found::kUnknown;
      }
      file.fd = *std::move(opened);
    }
    uint64_t& offset = of.offsets[{stream.rank, stream.is_stderr}];
    for (int i = 0; i < chunks * kFileChunks; ++i) {
      const absl::Status read = agent::ReadLogPiece(file.fd, file.path, offset, 0, &piece_);
      if (!read.ok()) {
        file.fd.reset();
        cut_.erase(cut);
        return Found::kUnknown;
      }
      Give(stream, of.hosts[stream.rank], piece_.text, output);
      bytes_ += piece_.text.size();
      offset = piece_.next_offset;
      const bool goes_on = show == nullptr || piece_.text.empty() || show();
      if (piece_.at_end) {
        cut_.erase(cut);
        return Found::kAll;
      }
      if (!goes_on) break;
    }
    cut_.insert(cut);
    return Found::kMore;
  }

  // Most streams have little that is new or nothing, so all are asked for a little at once: one way there and
  // back. Streams with more are read on one by one, so that no more than a piece is on its way. For a file
  // that was read here only its end is asked for, and only when the job is over.
  void ReadRanks(Watched& of, RankOutput& output, int chunks, const Show& show) {
    std::vector<Stream> streams;
    std::vector<core::ClientRequestBody> requests;
    for (const auto& [rank, host] : of.hosts) {
      for (const bool is_stderr : {false, true}) {
        const Stream stream{rank, is_stderr};
        const Found found = ReadFile(of, stream, chunks, output, show);
        if (found == Found::kMore || (found == Found::kAll && !final_)) continue;
        streams.push_back(stream);
        requests.push_back(Request(of, stream, kFirstBytes));
      }
    }
    if (requests.empty()) return;
    const std::vector<absl::StatusOr<std::string>> answers = AskAll(cluster_, std::move(requests), timeout_);
    std::vector<Stream> loud;
    for (size_t i = 0; i < streams.size(); ++i) {
      const std::optional<uint64_t> bytes = Take(of, streams[i], answers[i], output);
      if (!bytes) continue;
      if (*bytes + kCharacterBytes > kFirstBytes) {
        loud.push_back(streams[i]);
      } else {
        cut_.erase({of.generation, streams[i].rank, streams[i].is_stderr});
      }
    }
    for (const Stream& stream : loud) {
      bool ended = false;
      for (int i = 0; i < chunks && !ended; ++i) {
        const std::optional<uint64_t> bytes =
            Take(of, stream, Ask(cluster_, Request(of, stream, 0), timeout_), output);
        if (!bytes) return;  // the head or agent did not answer, or a signal came: again in the next turn
        ended = *bytes == 0;
      }
      const Cut cut(of.generation, stream.rank, stream.is_stderr);
      if (ended) {
        cut_.erase(cut);
      } else {
        cut_.insert(cut);
      }
    }
  }

  core::ClientLogs Request(Watched& of, const Stream& stream, uint64_t bytes_max) {
    return {JobId(job_),
            of.generation,
            stream.rank,
            stream.is_stderr,
            of.offsets[{stream.rank, stream.is_stderr}],
            bytes_max};
  }

  void Give(const Stream& stream, const std::string& host, absl::string_view text, RankOutput& output) const {
    if (rank0_alone_ && stream.rank != 0 && !stream.is_stderr) return;
    output.Add(stream.rank, host, stream.is_stderr, text);
  }

  // How far the stream went on; nullopt: nobody knows.
  std::optional<uint64_t> Take(Watched& of, const Stream& stream, const absl::StatusOr<std::string>& json,
                               RankOutput& output) {
    if (!json.ok()) return std::nullopt;
    const absl::StatusOr<LogDoc> log = ParseLogDoc(*json);
    if (!log.ok()) return std::nullopt;
    if (!log->hostname.empty()) of.hosts[stream.rank] = log->hostname;
    Give(stream, of.hosts[stream.rank], log->text, output);
    bytes_ += log->text.size();
    const Cut open(of.generation, stream.rank, stream.is_stderr);
    if (log->end) {
      open_.erase(open);
    } else {
      open_.insert(open);
    }
    uint64_t& offset = of.offsets[{stream.rank, stream.is_stderr}];
    const uint64_t before = std::exchange(offset, std::max(offset, log->next_offset));
    return offset - before;
  }

  Cluster& cluster_;
  const std::string job_;
  const bool rank0_alone_;
  const uint64_t shown_generation_, shown_bytes_;
  absl::Duration timeout_ = kLogTimeout;
  const RealClock clock_;
  bool final_ = false;
  std::string run_dir_;         // if its files are on this machine
  std::list<Watched> watched_;  // the newest generation is the last
  agent::LogPiece piece_;
  std::set<Cut> cut_, open_;
  uint64_t bytes_ = 0;
};

class Follower {
 public:
  Follower(Cluster& cluster, const std::string& job_id, const FollowOptions& options)
      : cluster_(cluster),
        job_id_(job_id),
        ctrl_c_stops_(options.ctrl_c_stops),
        tell_restore_(options.tell_restore),
        bare_(options.bare),
        show_(options.show),
        reader_(cluster, job_id, options),
        from_start_(options.from_start) {}

  int Run() {
    cluster_.client->set_interrupt_fd(signals_.fd());
    const int code = FollowToItsEnd();
    if (bare_ == nullptr) signals_.IgnoreCtrlC();
    return code;
  }

 private:
  int FollowToItsEnd() {
    while (true) {
      if (const std::optional<int> code = HandleSignal()) return *code;
      const absl::Status status = Turn();
      if (absl::IsCancelled(status) && !closed_) continue;  // a signal came
      if (absl::IsCancelled(status)) return Closed();
      if (absl::IsNotFound(status) || absl::IsPermissionDenied(status)) {
        screen_.Say(std::string(status.message()));
        return kFailed;
      }
      if (!status.ok()) {
        if (const std::optional<int> code = HeadSilent(status)) return *code;
        continue;
      }
      if (silent_since_) screen_.Say("the head answers again");
      silent_since_.reset();
      if (closed_) return Closed();
      if (job_.Final() && !ShowsMore()) return Finish();
    }
  }

  // A job that is over may have more output than a person waits for (fault: `yes`), and its last output may
  // not be written yet (a slow disk). Signals are looked at in between, and the next Ctrl-C ends it.
  bool ShowsMore() {
    if (!final_since_) {
      final_since_ = clock_.Now();
      final_stops_ = stops_;
      BoundPrint(kRestPatience);
    }
    const absl::Duration waited = clock_.Now() - *final_since_;
    if (stops_ != final_stops_) return false;
    if (!reader_.cut().empty()) {
      if (stops_ > 0 || screen_.terminal()) return ++final_turns_ < kTurnsOfTheRest && waited < kRestPatience;
      // A file or a program gets all of it, as from a pipe, unless it does not come.
      if (std::exchange(final_bytes_, reader_.bytes()) != reader_.bytes()) final_progress_ = clock_.Now();
      return clock_.Now() - final_progress_.value_or(*final_since_) < kEndPatience;
    }
    // A user who has pressed Ctrl-C waits for less time.
    if (reader_.open().empty() || waited >= (stops_ > 0 ? kRestPatience : kEndPatience)) return false;
    absl::SleepFor(end_poll_);  // each look asks for up to 64 streams
    end_poll_ = std::min(2 * end_poll_, kEndPollMax);
    return true;
  }

  absl::Status Turn() {
    GT_RETURN_IF_ERROR(ReadEvents());
    GT_ASSIGN_OR_RETURN(job_, AskJob(cluster_, job_id_, Timeout()));
    TellRestore();
    TellHidden();
    ChooseOutput();
    const uint64_t before = reader_.bytes();
    reader_.Read(job_, *output_, ShowsPieces());
    NextLook(!reader_.cut().empty(), reader_.bytes() != before);
    output_->AddRedrawn(clock_.Now());
    ShowOutput(/*flush=*/false);
    closed_ = closed_ || !screen_.Update(job_, Hint(), clock_.Now());
    return absl::OkStatus();
  }

  void TellHidden() {
    if (job_.world_size <= kRanksShown || std::exchange(told_hidden_, true)) return;
    const int last = job_.world_size - 1;
    screen_.Say(absl::StrCat(
        "output of rank",
        last == kRanksShown ? absl::StrCat(" ", last) : absl::StrCat("s ", kRanksShown, "-", last),
        " is not shown here: gtrain logs ", job_id_, " --rank ", kRanksShown, " -f"));
  }

  // Only the first note of its ranks is shown: the checkpoint that they resume after a crash is no surprise.
  void TellRestore() {
    if (job_.restore.empty() || !std::exchange(tell_restore_, false)) return;
    if (const std::string news = RestoreNews(job_.restore); !news.empty()) screen_.Say(news);
  }

  // A job may come to have another number of ranks.
  void ChooseOutput() {
    const bool only_rank = job_.world_size == 1;
    if (output_ && output_->options().only_rank == only_rank) return;
    if (output_) ShowOutput(/*flush=*/true);
    const int out = STDOUT_FILENO, err = screen_.terminal() ? out : STDERR_FILENO;
    output_.emplace(RankOutput::Options{.bare = bare_ != nullptr,
                                        .only_rank = only_rank,
                                        .live = only_rank && screen_.terminal(),
                                        .colour_out = UsesColour(out),
                                        .colour_err = UsesColour(err)});
  }

  void ShowOutput(bool flush) {
    std::vector<RankOutput::Piece> pieces = output_->Take(flush);
    for (size_t i = 0; bare_ != nullptr && i < pieces.size(); ++i) {
      for (const absl::string_view line : absl::StrSplit(absl::StripSuffix(pieces[i].text, "\n"), '\n'))
        bare_->emplace_back(line);
    }
    if (!show_) std::erase_if(pieces, [](const RankOutput::Piece& piece) { return !piece.is_stderr; });
    closed_ = closed_ || !screen_.Output(
                             pieces, screen_.terminal() ? output_->Unfinished() : std::vector<std::string>());
  }

  // Lines of several ranks wait for those that are equal to them, and a terminal is drawn once for many. Else
  // a piece is shown while it is still in the processor's cache.
  OutputReader::Show ShowsPieces() {
    if (!output_->options().only_rank || screen_.terminal()) return nullptr;
    return [this] {
      ShowOutput(/*flush=*/false);
      pollfd signal = {signals_.fd(), POLLIN, 0};
      return !closed_ && poll(&signal, 1, 0) == 0;
    };
  }

  // The output that an only rank writes on this machine is shown as it comes, while the head is asked for
  // events. A rank that writes is looked at often, one that is silent less and less. (inotify(7) would tell
  // it, but a program that has used it waits 15 ms for the kernel when it ends.)
  std::optional<net::ControlClient::Aside> OutputAside() {
    if (!output_ || !output_->options().only_rank || !reader_.reads_files()) return std::nullopt;
    if (job_.state != "RUNNING" && !job_.Final()) return std::nullopt;  // that it runs is said first
    if (job_.Final() && (stops_ > 0 || screen_.terminal())) return std::nullopt;  // it is shown in turns
    const auto step = [this]() -> absl::StatusOr<Instant> {
      const uint64_t before = reader_.bytes();
      const bool more = reader_.ReadFiles(*output_, ShowsPieces());
      ShowOutput(/*flush=*/false);
      if (closed_) return absl::CancelledError("nobody reads what is shown");
      return NextLook(more, reader_.bytes() != before);
    };
    return net::ControlClient::Aside{next_look_, step};
  }

  Instant NextLook(bool more, bool found) {
    look_every_ = found ? kLookMin : std::min(2 * look_every_, kEventsWait);
    return next_look_ = clock_.Now() + (more ? absl::ZeroDuration() : look_every_);
  }

  absl::Status ReadEvents() {
    std::optional<net::ControlClient::Aside> aside;
    if (!finished_) aside = OutputAside();
    absl::Duration wait = kEventsWait;
    if (!reader_.cut().empty()) wait = aside && !job_.Final() ? kLoudEventsWait : absl::ZeroDuration();
    cluster_.client->set_aside(std::move(aside));
    const absl::StatusOr<std::string> json =
        Ask(cluster_, core::ClientEvents{JobId(job_id_), after_, wait}, Timeout());
    cluster_.client->set_aside(std::nullopt);
    return TakeEvents(json);
  }

  absl::Status TakeEvents(const absl::StatusOr<std::string>& json) {
    GT_RETURN_IF_ERROR(json.status());
    GT_ASSIGN_OR_RETURN(const EventsDoc doc, ParseEventsDoc(*json));
    for (const EventDoc& event : doc.events) {
      after_ = std::max(after_, event.sequence);
      if (!from_start_) continue;
      if (news_.Worth(event))
        closed_ = closed_ || !screen_.Say(event.text, event.kind == "fault" ? Tone::kBad : Tone::kNews);
    }
    from_start_ = true;
    return absl::OkStatus();
  }

  absl::Duration Timeout() const { return cluster_.is_own() ? kOwnRequestTimeout : kRequestTimeout; }

  std::string Hint() const {
    if (stops_ > 1) return "stopping now";
    if (stops_ == 1) return "stopping; Ctrl-C again stops now";
    return ctrl_c_stops_
               ? "Ctrl-C stops the job"
               : absl::StrCat("Ctrl-C detaches, the job goes on; gtrain stop ", job_id_, " ends it");
  }

  // An exit code when the watching ends here.
  std::optional<int> HandleSignal() {
    const int stops_before = stops_;
    while (const int number = signals_.Next()) {
      if (number != SIGINT || !ctrl_c_stops_) return Detach(128 + number);
      stops_ = std::min(stops_ + 1, 2);  // a third one says nothing new
      BoundPrint(kRestPatience);
    }
    if (stops_ > stops_before) {
      screen_.Say(stops_ == 1 ? "stopping: the ranks may save; Ctrl-C again stops now" : "stopping now");
    }
    if (stops_ == stops_told_) return std::nullopt;
    const absl::Status status =
        Ask(cluster_, core::ClientStop{JobId(job_id_), stops_ > 1, "Ctrl-C"}, kRequestTimeout).status();
    if (status.ok()) {
      stops_told_ = stops_;
    } else if (!absl::IsCancelled(status) && !std::exchange(stop_refused_, true)) {
      screen_.Say(absl::StrCat("the stop was not taken yet: ", status.message()));
    }
    return std::nullopt;  // what was not taken is asked again
  }

  // Nobody reads any more: of a job that is over there is nothing to detach from.
  int Closed() { return job_.Final() ? Finish() : Detach(OutputError() != 0 ? kFailed : 128 + SIGPIPE); }

  int Detach(int code) {
    screen_.Say(
        absl::StrCat("detached; ", job_id_, " goes on. gtrain attach ", job_id_, " | gtrain stop ", job_id_));
    return code;
  }

  std::optional<int> HeadSilent(const absl::Status& status) {
    const Instant now = clock_.Now();
    if (!silent_since_) {
      silent_since_ = now;
      screen_.Say(
          absl::StrCat("the head does not answer (", status.message(), "); the ranks go on, trying again"));
    }
    if (now - *silent_since_ > kSilencePatience) {
      screen_.Say(absl::StrCat("no head for ", PrintDuration(kSilencePatience),
                               "; gave up. Later: gtrain attach ", job_id_));
      return kFailed;
    }
    // The next head of the local cluster may be at another address. Where all of its daemons were killed
    // nobody else starts one, and the lease of the ranks runs.
    const bool long_enough = now - *silent_since_ > kEndedPatience;
    const absl::Status there = cluster_.is_own()
                                   ? Reconnect(cluster_, long_enough ? Start::kIfDied : Start::kNever)
                                   : absl::OkStatus();
    if (there.ok()) {
      cluster_.client->set_interrupt_fd(signals_.fd());
    } else if (absl::IsNotFound(there) && long_enough) {
      // A cluster without jobs ends: a command that printed for so long, or was stopped, finds the result of
      // its job.
      if (absl::StatusOr<JobDoc> left = LeftResult(job_.run_dir, job_id_); left.ok() && left->Final()) {
        job_ = *std::move(left);
        head_gone_ = true;
        return Finish();
      }
      screen_.Say(absl::StrCat("the ", cluster_.name(),
                               " cluster was ended; ranks that still run are found again by: gtrain attach ",
                               job_id_));
      return kFailed;
    }
    absl::SleepFor(absl::Milliseconds(200));
    return std::nullopt;
  }

  // The head writes it a moment after the state is known, and not at all without room or rights; it may also
  // lie on another machine.
  std::string ReportLine() const {
    const std::string path = job_.run_dir + "/failure.json";
    const Instant deadline = clock_.Now() + kReportPatience;
    while (access(path.c_str(), F_OK) != 0) {
      if (access(job_.run_dir.c_str(), F_OK) != 0 || clock_.Now() >= deadline) {
        return absl::StrCat("no report could be found in ", job_.run_dir, ": gtrain why ", job_.id,
                            " says what the head knows");
      }
      absl::SleepFor(kReportPoll);
    }
    return absl::StrCat("report: ", path);
  }

  int Finish() {
    if (output_) ShowOutput(/*flush=*/true);
    finished_ = true;
    // Whether the last lines of a log could be written is known late.
    if (!head_gone_) (void)ReadEvents();
    const std::set<OutputReader::Cut>& left = reader_.cut().empty() ? reader_.open() : reader_.cut();
    if (!left.empty()) {
      const auto& [generation, rank, is_stderr] = *left.begin();
      std::vector<int> ranks;
      for (const OutputReader::Cut& cut : left) ranks.push_back(std::get<1>(cut));
      ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
      screen_.Say(absl::StrCat("the rest of what rank", ranks.size() == 1 ? " " : "s ", PrintRanks(ranks),
                               " wrote is not shown; all of it: gtrain logs ", job_.id, " --rank ", rank,
                               " --generation ", generation, is_stderr ? " --err" : ""));
    }
    const std::string logs = job_.run_dir.empty() ? "" : absl::StrCat("; logs: ", job_.run_dir, "/logs");
    const Tone tone = job_.state == "SUCCEEDED" ? Tone::kGood : Tone::kBad;
    screen_.Say(absl::StrCat(job_.id, " ", job_.state, job_.reason.empty() ? "" : ": ", job_.reason, logs),
                tone);
    if (job_.state == "FAILED") {
      for (const std::string& line : FaultLines(job_)) {
        if (absl::StartsWith(line, " ")) {
          screen_.Say(line);
        } else {
          screen_.Say(line, tone);
        }
      }
      if (!job_.run_dir.empty()) screen_.Say(ReportLine());
    }
    return ExitCode();
  }

  int ExitCode() const { return job_.state != "SUCCEEDED" && stops_ > 0 ? 128 + SIGINT : ExitCodeOf(job_); }

  Cluster& cluster_;
  const std::string job_id_;
  const bool ctrl_c_stops_;
  const RealClock clock_;
  SignalPipe signals_;
  Screen screen_;
  News news_;
  bool tell_restore_;  // it was not told yet
  bool told_hidden_ = false;
  bool head_gone_ = false;
  std::vector<std::string>* const bare_;
  const bool show_;
  std::optional<RankOutput> output_;
  OutputReader reader_;
  absl::Duration look_every_ = kLookMin;
  Instant next_look_;
  JobDoc job_;
  bool from_start_;
  uint64_t after_ = 0;
  int stops_ = 0;       // 1: Ctrl-C came; 2: more than once
  int stops_told_ = 0;  // what the head took of it
  bool stop_refused_ = false;
  bool closed_ = false;
  bool finished_ = false;  // all output that will be shown was shown
  std::optional<Instant> silent_since_;
  // Since the job is over.
  std::optional<Instant> final_since_;
  int final_turns_ = 0;
  uint64_t final_bytes_ = 0;
  std::optional<Instant> final_progress_;
  absl::Duration end_poll_ = kEndPoll;
  int final_stops_ = 0;
};

}  // namespace

int ExitCodeOf(const JobDoc& job) {
  if (job.state == "SUCCEEDED") return kDone;
  const int code = job.exit_code.value_or(kFailed);
  return code == kDoNotRestart || (code > 128 && code < 256) ? code : kFailed;
}

absl::StatusOr<JobDoc> AskJob(Cluster& cluster, const std::string& job_id, absl::Duration timeout) {
  GT_ASSIGN_OR_RETURN(const std::string json, Ask(cluster, core::ClientStatus{JobId(job_id)}, timeout));
  GT_ASSIGN_OR_RETURN(StatusDoc doc, ParseStatusDoc(json));
  if (doc.jobs.size() != 1)
    return absl::NotFoundError(absl::StrCat("no job ", job_id, "; `gtrain status` lists them"));
  doc.jobs[0].cluster = doc.cluster;
  return std::move(doc.jobs[0]);
}

absl::StatusOr<JobDoc> FindJob(Cluster& cluster, const std::string& word, Without without) {
  GT_ASSIGN_OR_RETURN(std::string json, Ask(cluster, core::ClientStatus{}));
  GT_ASSIGN_OR_RETURN(StatusDoc doc, ParseStatusDoc(json));
  absl::StatusOr<JobDoc> job = ChooseJob(doc, word, without);
  if (absl::IsNotFound(job.status()) && doc.omitted > 0) {  // by its name among all that are over
    GT_ASSIGN_OR_RETURN(json, Ask(cluster, core::ClientStatus{JobId(), core::ClientStatus::kOverMax}));
    GT_ASSIGN_OR_RETURN(doc, ParseStatusDoc(json));
    job = ChooseJob(doc, word, without);
  }
  const bool by_id = job.ok() && (word.empty() || job->id == word);
  if (by_id || word.empty() || (doc.omitted == 0 && !absl::IsNotFound(job.status()))) return job;
  // An id wins over a name, also that of a job which the list leaves out.
  absl::StatusOr<JobDoc> of_id = AskJob(cluster, word, absl::Seconds(20));
  return of_id.ok() || absl::IsNotFound(job.status()) ? std::move(of_id) : std::move(job);
}

int Follow(Cluster& cluster, const std::string& job_id, const FollowOptions& options) {
  return Follower(cluster, job_id, options).Run();
}

}  // namespace gtrain::cli
