// One loop, one thread: write what came, read stdin when all that was read before is taken, make a turn. A
// turn that waits for output is given up as soon as there is something to read or a signal; the next one
// replaces it. Output that nobody takes yet holds up everything but a turn now and then, which says that we
// are still there.
#include "launcher/cli/console.h"

#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "launcher/cli/follow.h"

namespace gtrain::cli {
namespace {

constexpr absl::Duration kTurnTimeout = absl::Seconds(6);  // a keeper answers after 3 s at the latest
constexpr absl::Duration kStillHere = absl::Seconds(3);    // keepers end what is silent for 15 s
constexpr absl::Duration kHeadPatience = absl::Seconds(20);
constexpr absl::Duration kHangUpTimeout = absl::Seconds(2);
constexpr absl::Duration kAgain = absl::Milliseconds(200);
constexpr absl::Duration kLookFirst = absl::Milliseconds(20), kLookMax = absl::Seconds(1);
constexpr size_t kPipeChunk = 4096;  // PIPE_BUF: a pipe that is ready takes so much without waiting

// The terminal of stdin passes every key on, until destruction.
class RawTerminal {
 public:
  RawTerminal() {
    if (tcgetattr(STDIN_FILENO, &before_) != 0) return;
    termios raw = before_;
    cfmakeraw(&raw);
    changed_ = tcsetattr(STDIN_FILENO, TCSANOW, &raw) == 0;
  }
  ~RawTerminal() {
    if (changed_) tcsetattr(STDIN_FILENO, TCSANOW, &before_);
  }
  RawTerminal(const RawTerminal&) = delete;
  RawTerminal& operator=(const RawTerminal&) = delete;

 private:
  termios before_{};
  bool changed_ = false;
};

bool IsReady(int fd, short events, absl::Duration wait = absl::ZeroDuration()) {
  pollfd look{fd, events, 0};
  return poll(&look, 1, static_cast<int>(absl::ToInt64Milliseconds(wait))) > 0;
}

// One of our two outputs.
struct Sink {
  int fd = -1;
  const char* key = "";  // in the head's answer
  uint64_t seen = 0;     // of the program's output, `waits` included
  std::string waits;     // not written yet
};

class Talk {
 public:
  Talk(Cluster& cluster, const ConsoleOptions& options, ConsoleInput& input)
      : cluster_(cluster), options_(options), input_(input), session_(net::NewRequestId()) {}

  absl::StatusOr<ConsoleEnd> Run() {
    GT_RETURN_IF_ERROR(Prepare());
    const absl::Status talked = Loop();
    cluster_.client->set_interrupt_fd(-1);
    if (generation_ || end_.signal != 0) HangUp();
    // A rank that ends while nobody asks is over before its code is known here; its output was shown already.
    const bool over = options_.argv.empty() && generation_ && absl::IsFailedPrecondition(talked);
    if (!talked.ok() && !over) return talked;
    end_.generation = generation_.value_or(0);
    end_.shown_bytes = out_.seen - out_.waits.size();
    return end_;
  }

 private:
  absl::Status Prepare() {
    struct stat info {};
    writes_files_ = fstat(STDOUT_FILENO, &info) == 0 && S_ISREG(info.st_mode);
    wake_.reset(epoll_create1(EPOLL_CLOEXEC));
    if (!wake_.valid() || !Watch(WakeFd(), true)) return ErrnoStatus(errno, "epoll");
    heard_ = turned_ = clock_.Now();
    return absl::OkStatus();
  }

  absl::Status Loop() {
    while (true) {
      if (Stopped()) return absl::OkStatus();
      if (!out_.waits.empty() || !err_.waits.empty()) {
        GT_RETURN_IF_ERROR(WriteSome());
        continue;
      }
      if (over_) return absl::OkStatus();
      GT_RETURN_IF_ERROR(ReadInput());
      GT_RETURN_IF_ERROR(Turn());
    }
  }

  int WakeFd() const { return options_.signals != nullptr ? options_.signals->fd() : options_.stop_fd; }

  bool Watch(int fd, bool wanted) {
    epoll_event event{};
    event.events = EPOLLIN;
    return epoll_ctl(wake_.get(), wanted ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, fd, &event) == 0;
  }

  bool Stopped() {
    if (options_.signals == nullptr) {
      if (IsReady(options_.stop_fd, POLLIN)) end_.signal = -1;
    }
    while (const int number = options_.signals == nullptr ? 0 : options_.signals->Next()) {
      if (number != SIGWINCH) end_.signal = number;  // each turn tells the size
    }
    return end_.signal != 0;
  }

  // A user who pipes the output into a pager may not read for an hour.
  absl::Status WriteSome() {
    for (Sink* sink : {&out_, &err_}) {
      if (sink->waits.empty()) continue;
      const absl::Duration left = std::max(absl::ZeroDuration(), turned_ + kStillHere - clock_.Now());
      pollfd look[2] = {{sink->fd, POLLOUT, 0}, {wake_.get(), POLLIN, 0}};
      poll(look, 2, static_cast<int>(absl::ToInt64Milliseconds(left)));
      if (look[0].revents != 0) {
        const size_t bytes = writes_files_ ? sink->waits.size() : std::min(sink->waits.size(), kPipeChunk);
        const ssize_t n = write(sink->fd, sink->waits.data(), bytes);
        if (n < 0 && (errno == EPIPE || errno == EIO)) {  // nobody reads any more
          end_.signal = SIGPIPE;
          return absl::OkStatus();
        }
        if (n < 0 && errno != EINTR && errno != EAGAIN)
          return ErrnoStatus(errno, "the output is not whole, it could not be written");
        sink->waits.erase(0, static_cast<size_t>(std::max<ssize_t>(0, n)));
      } else if (look[1].revents != 0) {
        return absl::OkStatus();
      }
    }
    if (clock_.Now() >= turned_ + kStillHere && !over_) return Turn();
    return absl::OkStatus();
  }

  absl::Status ReadInput() {
    if (!input_.waits.empty() || input_.end || !IsReady(STDIN_FILENO, POLLIN)) return absl::OkStatus();
    input_.waits.resize(core::kConsoleBytes);
    const ssize_t n = read(STDIN_FILENO, input_.waits.data(), input_.waits.size());
    const int error = errno;
    input_.waits.resize(static_cast<size_t>(std::max<ssize_t>(0, n)));
    if (n < 0 && (error == EINTR || error == EAGAIN)) return absl::OkStatus();
    // A terminal that is gone is the end, too.
    if (n < 0 && error != EIO) return ErrnoStatus(error, "stdin could not be read");
    if (n <= 0) input_.end = true;
    if (n <= 0 && options_.terminal) end_.signal = SIGHUP;
    return absl::OkStatus();
  }

  core::ClientRequest Request(bool hang_up) const {
    core::ClientConsole body{.job = JobId(options_.job), .generation = generation_, .rank = options_.rank};
    core::Console& turn = body.turn;
    turn.session = session_;
    turn.start = !generation_.has_value();
    if (turn.start) turn.argv = options_.argv;
    turn.terminal = options_.terminal;
    const char* term = std::getenv("TERM");
    if (options_.terminal && term != nullptr) turn.term = std::string(term).substr(0, kTermMax);
    if (options_.terminal) {
      const TerminalSize size = SizeOfTerminal(STDIN_FILENO);
      turn.rows = std::min(size.rows, 65535);
      turn.columns = std::min(size.columns, 65535);
    }
    turn.input_offset = taken_;
    turn.input = input_.waits;
    turn.input_end = input_.end;
    turn.out_seen = out_.seen - out_.waits.size();
    turn.err_seen = err_.seen - err_.waits.size();
    turn.hang_up = hang_up;
    return {.id = net::NewRequestId(), .body = std::move(body)};
  }

  absl::Status Turn() {
    const bool reads = input_.waits.empty() && !input_.end && out_.waits.empty() && err_.waits.empty();
    const bool watched = reads && Watch(STDIN_FILENO, true);
    cluster_.client->set_interrupt_fd(wake_.get());
    turned_ = clock_.Now();
    const absl::StatusOr<core::ClientReply> reply =
        cluster_.client->Call(Request(/*hang_up=*/false), kTurnTimeout);
    if (watched) Watch(STDIN_FILENO, false);
    if (absl::IsCancelled(reply.status())) return absl::OkStatus();
    if (absl::IsPermissionDenied(reply.status())) return reply.status();
    if (!reply.ok()) return Silent(reply.status());
    if (reply->ok) return Take(reply->json);
    const absl::Status refused(static_cast<absl::StatusCode>(reply->code), reply->error);
    const bool passes = absl::IsUnavailable(refused) || absl::IsDeadlineExceeded(refused) ||
                        (generation_ && absl::IsResourceExhausted(refused));
    return passes ? Silent(refused) : refused;
  }

  // The head may be starting again, or the agent; the same turn is repeated.
  absl::Status Silent(const absl::Status& status) {
    if (clock_.Now() - heard_ > kHeadPatience && !generation_) {
      return absl::UnavailableError(absl::StrCat(
          status.message(), ". If it is there, it may be of an earlier version, which knows no -i"));
    }
    if (clock_.Now() - heard_ > kHeadPatience) {
      return absl::UnavailableError(absl::StrCat("nothing was heard of the program for ",
                                                 absl::FormatDuration(kHeadPatience), " (", status.message(),
                                                 "); it is ended where it runs"));
    }
    if (cluster_.is_own()) (void)Reconnect(cluster_, Start::kNever);  // it may be at another address
    (void)IsReady(wake_.get(), POLLIN, kAgain);
    return absl::OkStatus();
  }

  absl::Status Take(const std::string& text) {
    const nlohmann::json reply = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    const auto number = [&](const char* key) -> uint64_t {
      const auto it = reply.find(key);
      return it != reply.end() && it->is_number_unsigned() ? it->get<uint64_t>() : 0;
    };
    if (!reply.is_object()) return absl::InternalError("the head's answer is not a JSON object");
    heard_ = clock_.Now();
    if (!generation_ && options_.terminal) raw_ = std::make_unique<RawTerminal>();
    generation_ = number("generation");
    const uint64_t taken = number("taken");
    if (taken > taken_) {
      input_.waits.erase(0, std::min<uint64_t>(input_.waits.size(), taken - taken_));
      taken_ = taken;
    }
    Add(reply, number("at"), out_);
    Add(reply, err_.seen - err_.waits.size(), err_);
    if (options_.signals == nullptr) out_.waits.clear();  // shown by somebody else
    const auto code = reply.find("exit_code");
    if (code != reply.end() && code->is_number_integer()) {
      over_ = true;
      end_.exit_code = code->get<int>();
    }
    return absl::OkStatus();
  }

  static void Add(const nlohmann::json& reply, uint64_t at, Sink& sink) {
    std::string bytes;
    const auto it = reply.find(sink.key);
    if (it == reply.end() || !it->is_string() || !absl::Base64Unescape(it->get<std::string>(), &bytes))
      return;
    if (at > sink.seen) {
      sink.waits += absl::StrCat("\r\n[gtrain: ", at - sink.seen, " bytes are only in the log]\r\n");
      sink.waits += bytes;
    } else if (at + bytes.size() > sink.seen) {
      sink.waits += bytes.substr(sink.seen - at);
    } else {
      return;
    }
    sink.seen = at + bytes.size();
  }

  void HangUp() { (void)cluster_.client->Call(Request(/*hang_up=*/true), kHangUpTimeout); }

  static constexpr size_t kTermMax = 100;

  Cluster& cluster_;
  const ConsoleOptions& options_;
  ConsoleInput& input_;
  const std::string session_;
  const RealClock clock_;
  UniqueFd wake_;  // a signal, or while it is wanted stdin
  std::unique_ptr<RawTerminal> raw_;
  bool writes_files_ = false;
  std::optional<uint64_t> generation_;  // once the program runs
  uint64_t taken_ = 0;
  Sink out_{.fd = STDOUT_FILENO, .key = "stdout"}, err_{.fd = STDERR_FILENO, .key = "stderr"};
  bool over_ = false;
  ConsoleEnd end_;
  Instant heard_, turned_;
};

// Talks with the generation that runs, until its end or that of the client.
absl::StatusOr<ConsoleEnd> TalkWith(const JobDoc& job, Cluster& cluster, const ConsoleOptions& options,
                                    ConsoleInput& input) {
  absl::StatusOr<ConsoleEnd> end = RunConsole(cluster, options, input);
  // It was over already; the log has its words.
  if (absl::IsFailedPrecondition(end.status())) return ConsoleEnd{.generation = job.generation};
  return end;
}

// The signal that has come, -1: the end of stop_fd; 0: none.
int NextSignal(const ConsoleOptions& options) {
  if (options.signals != nullptr) return options.signals->Next();
  return IsReady(options.stop_fd, POLLIN) ? -1 : 0;
}

// Says once why no rank runs.
void SayWhyItWaits(const JobDoc& job, std::string& said) {
  if (job.reason.empty() || said == job.reason) return;
  said = job.reason;
  Complain(SafeText(said));
}

bool Runs(const JobDoc& job) {
  return !job.ranks.empty() && (job.ranks[0].state == "running" || job.ranks[0].state == "joined");
}

}  // namespace

absl::StatusOr<ConsoleEnd> RunConsole(Cluster& cluster, const ConsoleOptions& options, ConsoleInput& input) {
  return Talk(cluster, options, input).Run();
}

absl::StatusOr<ConsoleEnd> RunRankConsoles(Cluster& cluster, const ConsoleOptions& options) {
  ConsoleInput input;
  ConsoleEnd end;
  const RealClock clock;
  const Instant begin = clock.Now();
  absl::Duration look = kLookFirst;
  std::string said;
  const int wake = options.signals != nullptr ? options.signals->fd() : options.stop_fd;
  while (true) {
    const int signal = NextSignal(options);
    if (signal != 0 && signal != SIGWINCH) {
      end.signal = signal;
      return end;
    }
    const absl::StatusOr<JobDoc> job = AskJob(cluster, options.job, kTurnTimeout);
    if (absl::IsNotFound(job.status()) || absl::IsPermissionDenied(job.status())) return job.status();
    if (!job.ok() && cluster.is_own()) (void)Reconnect(cluster, Start::kNever);
    if (job.ok() && job->Final()) return end;
    if (job.ok() && job->generation > end.generation && Runs(*job)) {
      GT_ASSIGN_OR_RETURN(end, TalkWith(*job, cluster, options, input));
      if (end.signal != 0) return end;
      look = kLookFirst;
      continue;
    }
    if (job.ok() && end.generation == 0 && options.terminal && clock.Now() - begin > kLookMax)
      SayWhyItWaits(*job, said);
    (void)IsReady(wake, POLLIN, look);
    look = std::min(2 * look, kLookMax);
  }
}

InputFeeder::InputFeeder(const Args& args, std::string job) : stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  thread_ = std::thread([this, args, job = std::move(job)] {
    absl::StatusOr<Cluster> cluster = OpenCluster(args, Start::kNever);
    absl::Status status = cluster.status();
    if (status.ok()) status = RunRankConsoles(*cluster, {.job = job, .stop_fd = stop_.get()}).status();
    if (!status.ok())
      Complain(absl::StrCat("rank 0 gets no more input: ", SafeText(std::string(status.message()))));
  });
}

InputFeeder::~InputFeeder() {
  const uint64_t one = 1;
  (void)!write(stop_.get(), &one, sizeof(one));
  thread_.join();
}

}  // namespace gtrain::cli
