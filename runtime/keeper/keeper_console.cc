// Consoles: a client gives input to a program beside a rank, or to a rank itself, and gets the output.
//
// A client speaks in turns (Console). What it sends and what it gets carries offsets: of input this side says
// how much it took, of output the client says how much it saw, and until then it is kept. So a turn may come
// twice, late or never, by another agent or another head. Each side holds at most kConsoleBytes of each
// stream; a client that does not read makes the program wait, not the keeper. The exception is a rank with a
// terminal: its output goes to its log first, and who reads slower than it writes misses some of it here.
//
// A client that is silent is gone: its program gets the end of its input and SIGHUP, and SIGKILL four seconds
// later; a rank gets the end of its stdin, and one with a terminal SIGHUP.
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "runtime/keeper/keeper.h"
#include "runtime/keeper/posix.h"

namespace gtrain::keeper {

namespace {

constexpr size_t kConsoleBytes = 64u << 10;
constexpr size_t kConsolesMax = 16;
constexpr size_t kConsolesOverMax = 64;
constexpr int64_t kTurnMs = 3000;      // a turn waits that long for something to tell
constexpr int64_t kSilenceMs = 15000;  // of a client that is gone
constexpr int64_t kHangUpMs = 4000;    // SIGHUP to SIGKILL
constexpr int64_t kLonelyMs = 60000;   // a rank that takes input and has no client
constexpr int64_t kAfterEndMs = 2000;  // who else holds its stdout is not waited for (fault P7)

constexpr char kEndOfTransmission = '\x04';  // what a terminal takes for the end of the input

int StatusOf(const Exited& exit) { return exit.signal != 0 ? 128 + exit.signal : exit.code; }

// Drops what was seen; `at` is where `kept` begins.
void Drop(uint64_t seen, std::string* kept, uint64_t* at) {
  const size_t bytes = static_cast<size_t>(std::min<uint64_t>(kept->size(), seen - std::min(seen, *at)));
  kept->erase(0, bytes);
  *at += bytes;
}

// Reads while there is room; true: something came.
bool Read(UniqueFd* fd, std::string* kept) {
  char buffer[16 << 10];
  bool any = false;
  while (fd->valid() && kept->size() < kConsoleBytes) {
    const ssize_t n = read(fd->get(), buffer, std::min(sizeof(buffer), kConsoleBytes - kept->size()));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) break;
    if (n <= 0) {  // the end of a pipe; of a terminal it is the error EIO
      fd->reset();
      break;
    }
    kept->append(buffer, static_cast<size_t>(n));
    any = true;
  }
  return any;
}

}  // namespace

bool Keeper::PrepareInput(RankProcess& rank) {
  rank.in_heard_ms = now_;
  if (!rank.spec.tty) return MakePipe(&rank.in_read, &rank.in) && SetNonBlocking(rank.in.get());
  rank.in = rank.out.OpenKeyboard();
  rank.in_read.reset(fcntl(rank.out_write.get(), F_DUPFD_CLOEXEC, 0));
  rank.err_write.reset();  // all three are the terminal
  return rank.in.valid() && rank.in_read.valid();
}

ConsoleSession* Keeper::FindConsole(const std::string& id) {
  for (const auto& console : consoles_) {
    if (console->id == id) return console.get();
  }
  return nullptr;
}

void Keeper::Do(Console& turn) {
  ConsoleSession* console = FindConsole(turn.session);
  const bool begins = console == nullptr;
  if (begins) {
    const bool over =
        std::find(consoles_over_.begin(), consoles_over_.end(), turn.session) != consoles_over_.end();
    std::string refused =
        over ? "the session is over"
        : turn.start && !turn.hang_up
            ? OpenConsole(turn)
            : "the session is not known here: its program was ended with its job, or because "
              "nothing was heard of the client for " +
                  std::to_string(kSilenceMs / 1000) + " s";
    if (!refused.empty()) {
      ConsoleTurn answer;
      answer.id = turn.id;
      answer.ok = false;
      answer.out = std::move(refused);
      return Tell(std::move(answer));
    }
    console = FindConsole(turn.session);
  }
  if (console->asked != 0 && console->asked != turn.id) AnswerConsole(*console);  // nobody waits for it
  console->heard_ms = now_;
  Drop(turn.out_seen, &console->out_kept, &console->out_at);
  Drop(turn.err_seen, &console->err_kept, &console->err_at);
  console->out_seen = turn.out_seen;
  // What was taken before, in a turn whose answer was lost, is not taken again.
  const uint64_t known = console->taken - std::min(console->taken, turn.input_offset);
  const bool fits = turn.input_offset <= console->taken && known <= turn.input.size();
  console->offered = fits ? turn.input.substr(known) : "";
  console->offered_end = fits && turn.input_end;
  console->asked = turn.id;
  console->input_known = turn.input_offset;
  console->answer_by_ms = begins ? now_ : now_ + kTurnMs;  // the client waits to know that it is open
  if (console->terminal && turn.rows > 0 && turn.columns > 0) {
    const winsize size = {static_cast<unsigned short>(turn.rows), static_cast<unsigned short>(turn.columns),
                          0, 0};
    if (UniqueFd* in = InputOf(*console); in != nullptr) ioctl(in->get(), TIOCSWINSZ, &size);
  }
  if (!turn.hang_up) return;
  HangUp(*console);
  console->answer_by_ms = now_;
}

// Why not; empty: it is open.
std::string Keeper::OpenConsole(Console& turn) {
  RankProcess* rank = FindRank(turn.generation, turn.rank);
  const std::string name = "rank " + std::to_string(turn.rank);
  if (rank == nullptr || rank->exit) return name + " is not running here";
  if (consoles_.size() >= kConsolesMax) {
    return std::to_string(kConsolesMax) +
           " consoles are open for the ranks of this job on this machine, the most there may be: wait or end "
           "some";
  }
  auto console = std::make_unique<ConsoleSession>();
  console->id = turn.session;
  console->generation = turn.generation;
  console->rank = turn.rank;
  console->of_rank = turn.argv.empty();
  console->heard_ms = now_;
  if (console->of_rank) {
    if (!rank->in.valid()) {
      return name + (rank->spec.takes_input ? ": its stdin is at its end already"
                                            : " takes no input: it was launched without -i");
    }
    for (const auto& other : consoles_) {
      if (other->of_rank && other->generation == turn.generation && other->rank == turn.rank)
        return "another client gives " + name + " its input";
    }
    console->terminal = rank->spec.tty;
  } else {
    console->terminal = turn.terminal;
    console->argv = std::move(turn.argv);
    console->env = rank->spec.env;
    if (turn.terminal) {
      std::erase_if(console->env, [](const auto& pair) { return pair.first == "TERM"; });
      console->env.emplace_back("TERM", turn.term.empty() ? "dumb" : turn.term);
    }
    if (!StartConsole(*console, *rank)) return std::string("no program could be started: ") + strerror(errno);
  }
  consoles_.push_back(std::move(console));
  return "";
}

bool Keeper::StartConsole(ConsoleSession& console, const RankProcess& rank) {
  SpawnRequest request{&console.argv, &console.env, rank.spec.cwd, rank.spec.cpus, UniqueFd(), UniqueFd()};
  if (console.terminal) {
    if (!MakeTerminal(&console.out, &request.out, Terminal::kWhole)) return false;
    request.in.reset(fcntl(request.out.get(), F_DUPFD_CLOEXEC, 0));
    console.in.reset(fcntl(console.out.get(), F_DUPFD_CLOEXEC, 0));
    if (!request.in.valid() || !console.in.valid()) return false;
    request.owns_terminal = true;
  } else if (!MakePipe(&request.in, &console.in) || !MakePipe(&console.out, &request.out) ||
             !MakePipe(&console.err, &request.err) || !SetNonBlocking(console.err.get()) ||
             !SetNonBlocking(console.in.get())) {
    return false;
  }
  if (!SetNonBlocking(console.out.get())) return false;
  std::vector<SpawnRequest> requests;
  requests.push_back(std::move(request));
  auto starting = std::make_unique<Starting>();
  starting->generation = console.generation;
  starting->console = console.id;
  if (!starting->batch.Start(std::move(requests), {"GTRAIN_KEEPER_SOCKET", rank_socket_}, nullptr))
    return false;
  starting_.push_back(std::move(starting));
  return true;
}

void Keeper::ConsoleStarted(const std::string& id, const SpawnResult& result) {
  ConsoleSession* console = FindConsole(id);
  if (console == nullptr) return;
  console->pid = result.pid;
  if (result.failure.stage == 0) return;
  const RankProcess* rank = FindRank(console->generation, console->rank);
  const FailureWords words =
      DescribeFailure(result.failure, console->argv, console->env, rank == nullptr ? "" : rank->spec.cwd);
  std::string& text = console->terminal ? console->out_kept : console->err_kept;
  text += words.message + (console->terminal ? "\r\n" : "\n");
  if (result.pid > 0) return;  // its exit follows, with the code
  console->ended = true;
  console->status = words.code;
  console->ended_ms = now_;
}

// As ConsoleStarted, when the starter was killed before it came to it.
void Keeper::ConsoleNotStarted(const std::string& id) {
  ConsoleSession* console = FindConsole(id);
  if (console == nullptr || console->pid > 0 || console->ended) return;
  (console->terminal ? console->out_kept : console->err_kept) +=
      "the command was not started: the process that starts it was killed\n";
  console->ended = true;
  console->status = 128 + SIGKILL;
  console->ended_ms = now_;
}

bool Keeper::ConsoleDied(const siginfo_t& info) {
  for (const auto& console : consoles_) {
    if (console->of_rank || console->pid != info.si_pid) continue;
    console->pid = -1;
    console->ended = true;
    console->status = info.si_code == CLD_EXITED ? info.si_status : 128 + info.si_status;
    console->ended_ms = now_;
    console->in.reset();
    console->in_waits.clear();
    return true;
  }
  return false;
}

// Where its input goes; nullptr: nowhere any more.
UniqueFd* Keeper::InputOf(ConsoleSession& console) {
  UniqueFd* in = &console.in;
  if (console.of_rank) {
    RankProcess* rank = FindRank(console.generation, console.rank);
    if (rank == nullptr) return nullptr;
    in = &rank->in;
  }
  return in->valid() ? in : nullptr;
}

// Only what there is room for: a descriptor that nobody reads would be ready at once, for ever.
void Keeper::AddConsoleFds() {
  for (const auto& console : consoles_) {
    if (console->out.valid() && console->out_kept.size() < kConsoleBytes)
      poll_fds_.push_back({console->out.get(), POLLIN, 0});
    if (console->err.valid() && console->err_kept.size() < kConsoleBytes)
      poll_fds_.push_back({console->err.get(), POLLIN, 0});
    if (UniqueFd* in = InputOf(*console); in != nullptr && !console->in_waits.empty())
      poll_fds_.push_back({in->get(), POLLOUT, 0});
  }
}

void Keeper::PumpInput(ConsoleSession& console) {
  UniqueFd* in = InputOf(console);
  for (bool more = true; more;) {
    // A program that reads no more takes everything, so that its client comes to its own end. A rank takes
    // nothing then: the client keeps it for the next generation.
    size_t room = kConsoleBytes - console.in_waits.size();
    if (in == nullptr) room = console.of_rank ? 0 : console.offered.size();
    const size_t bytes = std::min(room, console.offered.size());
    if (in != nullptr) console.in_waits.append(console.offered, 0, bytes);
    console.offered.erase(0, bytes);
    console.taken += bytes;
    if (console.offered.empty() && console.offered_end) console.in_end = true;
    more = false;
    while (in != nullptr && !console.in_waits.empty()) {
      const ssize_t n = write(in->get(), console.in_waits.data(), console.in_waits.size());
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno == EAGAIN) break;
      if (n < 0) {
        in->reset();
        in = nullptr;
        console.in_waits.clear();
        break;
      }
      console.in_waits.erase(0, static_cast<size_t>(n));
      more = !console.offered.empty();
    }
  }
  if (in == nullptr || !console.in_end || !console.in_waits.empty()) return;
  if (!console.terminal) return in->reset();
  console.in_end = false;  // once
  console.offered_end = false;
  (void)!write(in->get(), &kEndOfTransmission, 1);
}

// What a rank with a terminal wrote is in its log's tail.
void Keeper::LookAtRank(ConsoleSession& console) {
  RankProcess* rank = FindRank(console.generation, console.rank);
  if (rank == nullptr) {
    console.ended = true;
    return;
  }
  if (console.terminal) {
    const uint64_t total = rank->out.total();
    const uint64_t fresh = std::min<uint64_t>(total - std::min(total, console.out_seen), kConsoleBytes);
    console.out_kept = rank->out.LastBytes(static_cast<size_t>(fresh));
    console.out_at = total - console.out_kept.size();
  }
  if (!rank->exit || (console.terminal && rank->out.alive())) return;
  console.ended = true;
  console.status = StatusOf(*rank->exit);
}

void Keeper::PumpConsoles() {
  for (auto& owned : consoles_) {
    ConsoleSession& console = *owned;
    PumpInput(console);
    if (console.of_rank) {
      if (console.asked != 0) LookAtRank(console);
    } else {
      const bool out = Read(&console.out, &console.out_kept);
      const bool err = Read(&console.err, &console.err_kept);
      if (out || err) console.read_ms = now_;
      const bool quiet = now_ - std::max(console.ended_ms, console.read_ms) > kAfterEndMs;
      const bool room = console.out_kept.size() < kConsoleBytes && console.err_kept.size() < kConsoleBytes;
      if (console.ended && quiet && room) {
        console.out.reset();
        console.err.reset();
      }
    }
    const bool over = console.ended && !console.out.valid() && !console.err.valid();
    // Some of a turn's input may have been taken behind its answer: the client does not know of it.
    const bool news =
        console.taken > console.input_known || !console.out_kept.empty() || !console.err_kept.empty() || over;
    if (console.asked != 0 && (news || now_ >= console.answer_by_ms)) AnswerConsole(console);
    if (now_ - console.heard_ms > kSilenceMs) HangUp(console);
    if (console.kill_at_ms == 0 || console.ended || now_ < console.kill_at_ms || console.pid <= 0) continue;
    kill(-console.pid, SIGKILL);
    for (const Descendant& found : LivingDescendants(getpid())) {
      if (found.top == console.pid) SignalProcess(found.process, SIGKILL);
    }
  }
  // One that was hung up goes when its program is gone; a client that has its end hangs up, too.
  std::erase_if(consoles_, [this](const auto& console) {
    const bool gone = console->kill_at_ms != 0 && (console->ended || console->of_rank);
    if (!gone || console->asked != 0) return false;
    consoles_over_.push_back(console->id);
    if (consoles_over_.size() > kConsolesOverMax) consoles_over_.pop_front();
    return true;
  });
}

void Keeper::AnswerConsole(ConsoleSession& console) {
  ConsoleTurn answer;
  answer.id = std::exchange(console.asked, 0);
  answer.out = console.out_kept;
  answer.out_at = console.out_at;
  answer.err = console.err_kept;
  answer.taken = console.taken;
  answer.over = console.ended && !console.out.valid() && !console.err.valid();
  answer.status = console.status;
  Tell(std::move(answer));
}

void Keeper::HangUp(ConsoleSession& console) {
  if (console.kill_at_ms != 0) return;
  console.kill_at_ms = now_ + kHangUpMs;
  console.in_waits.clear();
  console.offered.clear();
  if (console.of_rank) {
    RankProcess* rank = FindRank(console.generation, console.rank);
    if (rank == nullptr || rank->exit) return;
    rank->in.reset();
    if (console.terminal && rank->pid > 0) kill(-rank->pid, SIGHUP);
    return;
  }
  console.in.reset();
  console.out.reset();  // of a terminal the last: the kernel tells its foreground, too
  console.err.reset();
  if (console.pid > 0) kill(-console.pid, SIGHUP);
}

// A rank whose client never came, or was lost with an agent, does not wait for input for ever.
void Keeper::CloseLonelyInputs() {
  for (auto& [generation, record] : generations_) {
    for (auto& [number, rank] : record.ranks) {
      if (!rank->in.valid()) continue;
      for (const auto& console : consoles_) {
        if (console->of_rank && console->generation == generation && console->rank == number)
          rank->in_heard_ms = now_;
      }
      if (now_ - rank->in_heard_ms > kLonelyMs) rank->in.reset();
    }
  }
}

bool Keeper::InputWaits() const {
  for (const auto& [generation, record] : generations_) {
    for (const auto& [number, rank] : record.ranks) {
      if (rank->in.valid()) return true;
    }
  }
  return false;
}

}  // namespace gtrain::keeper
