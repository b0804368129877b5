#include "runtime/keeper/consoles.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "runtime/keeper/poll_set.h"
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

bool Consoles::Session::HasNews() const {
  // Some of a turn's input may have been taken behind its answer: the client does not know of it.
  return taken > input_known || !out_kept.empty() || !err_kept.empty() || IsOver();
}

Consoles::Session* Consoles::Find(const std::string& id) {
  for (const auto& session : sessions_) {
    if (session->id == id) return session.get();
  }
  return nullptr;
}

// nullptr: the turn was refused, and its client told.
Consoles::Session* Consoles::FindOrOpen(Console& turn) {
  if (Session* session = Find(turn.session)) return session;
  const bool over = std::find(over_.begin(), over_.end(), turn.session) != over_.end();
  std::string refused = over ? "the session is over"
                        : turn.start && !turn.hang_up
                            ? Open(turn)
                            : "the session is not known here: its program was ended with its job, or because "
                              "nothing was heard of the client for " +
                                  std::to_string(kSilenceMs / 1000) + " s";
  if (refused.empty()) return Find(turn.session);
  ConsoleTurn answer;
  answer.id = turn.id;
  answer.ok = false;
  answer.out = std::move(refused);
  context_.agent.Tell(std::move(answer));
  return nullptr;
}

void Consoles::Take(Console& turn) {
  const bool begins = Find(turn.session) == nullptr;
  Session* session = FindOrOpen(turn);
  if (session == nullptr) return;
  if (session->asked != 0 && session->asked != turn.id) Answer(*session);  // nobody waits for it
  session->heard_ms = context_.now_ms;
  Drop(turn.out_seen, &session->out_kept, &session->out_at);
  Drop(turn.err_seen, &session->err_kept, &session->err_at);
  session->out_seen = turn.out_seen;
  // Input that was taken before, in a turn whose answer was lost, is not taken again.
  const uint64_t known = session->taken - std::min(session->taken, turn.input_offset);
  const bool fits = turn.input_offset <= session->taken && known <= turn.input.size();
  session->offered = fits ? turn.input.substr(known) : "";
  session->offered_end = fits && turn.input_end;
  session->asked = turn.id;
  session->input_known = turn.input_offset;
  // At its beginning the client waits to know that it is open.
  session->answer_by_ms = begins ? context_.now_ms : context_.now_ms + kTurnMs;
  if (session->terminal && turn.rows > 0 && turn.columns > 0) {
    const winsize size = {static_cast<unsigned short>(turn.rows), static_cast<unsigned short>(turn.columns),
                          0, 0};
    if (UniqueFd* in = InputOf(*session); in != nullptr) ioctl(in->get(), TIOCSWINSZ, &size);
  }
  if (!turn.hang_up) return;
  HangUp(*session);
  session->answer_by_ms = context_.now_ms;
}

// Returns why not; empty: it is open.
std::string Consoles::Open(Console& turn) {
  const RankProcess* rank = context_.generations.FindRank(turn.generation, turn.rank);
  if (rank == nullptr || rank->exit) return "rank " + std::to_string(turn.rank) + " is not running here";
  if (sessions_.size() >= kConsolesMax) {
    return std::to_string(kConsolesMax) +
           " consoles are open for the ranks of this job on this machine, the most there may be: wait or end "
           "some";
  }
  auto session = std::make_unique<Session>();
  session->id = turn.session;
  session->generation = turn.generation;
  session->rank = turn.rank;
  session->of_rank = turn.argv.empty();
  session->heard_ms = context_.now_ms;
  if (session->of_rank) {
    std::string refused = OpenRank(*session, *rank);
    if (!refused.empty()) return refused;
  } else if (!OpenProgram(*session, turn, *rank)) {
    return std::string("no program could be started: ") + strerror(errno);
  }
  sessions_.push_back(std::move(session));
  return "";
}

std::string Consoles::OpenRank(Session& session, const RankProcess& rank) const {
  const std::string name = "rank " + std::to_string(session.rank);
  if (!rank.in.valid()) {
    return name + (rank.spec.takes_input ? ": its stdin is at its end already"
                                         : " takes no input: it was launched without -i");
  }
  for (const auto& other : sessions_) {
    if (other->of_rank && other->generation == session.generation && other->rank == session.rank)
      return "another client gives " + name + " its input";
  }
  session.terminal = rank.spec.tty;
  return "";
}

bool Consoles::OpenProgram(Session& session, Console& turn, const RankProcess& rank) {
  session.terminal = turn.terminal;
  session.argv = std::move(turn.argv);
  session.env = rank.spec.env;
  if (turn.terminal) {
    std::erase_if(session.env, [](const auto& pair) { return pair.first == "TERM"; });
    session.env.emplace_back("TERM", turn.term.empty() ? "dumb" : turn.term);
  }
  return StartProgram(session, rank);
}

bool Consoles::StartProgram(Session& session, const RankProcess& rank) {
  SpawnRequest request{&session.argv, &session.env, rank.spec.cwd, rank.spec.cpus, UniqueFd(), UniqueFd()};
  if (session.terminal) {
    if (!MakeTerminal(&session.out, &request.out, Terminal::kWhole)) return false;
    request.in.reset(fcntl(request.out.get(), F_DUPFD_CLOEXEC, 0));
    session.in.reset(fcntl(session.out.get(), F_DUPFD_CLOEXEC, 0));
    if (!request.in.valid() || !session.in.valid()) return false;
    request.owns_terminal = true;
  } else if (!MakePipe(&request.in, &session.in) || !MakePipe(&session.out, &request.out) ||
             !MakePipe(&session.err, &request.err) || !SetNonBlocking(session.err.get()) ||
             !SetNonBlocking(session.in.get())) {
    return false;
  }
  if (!SetNonBlocking(session.out.get())) return false;
  std::vector<SpawnRequest> requests;
  requests.push_back(std::move(request));
  const std::string id = session.id;
  return children_.Start(
      session.generation, std::move(requests), nullptr,
      [this, id](const SpawnResult& result) { OnStarted(id, result); }, [this, id] { OnStarterDied(id); });
}

void Consoles::OnStarted(const std::string& id, const SpawnResult& result) {
  Session* session = Find(id);
  if (session == nullptr) return;
  session->pid = result.pid;
  if (result.failure.stage == 0) return;
  const RankProcess* rank = context_.generations.FindRank(session->generation, session->rank);
  const FailureWords words =
      DescribeFailure(result.failure, session->argv, session->env, rank == nullptr ? "" : rank->spec.cwd);
  std::string& text = session->terminal ? session->out_kept : session->err_kept;
  text += words.message + (session->terminal ? "\r\n" : "\n");
  if (result.pid > 0) return;  // its exit follows, with the code
  session->ended = true;
  session->status = words.code;
  session->ended_ms = context_.now_ms;
}

// The starter was killed before it came to this program.
void Consoles::OnStarterDied(const std::string& id) {
  Session* session = Find(id);
  if (session == nullptr || session->pid > 0 || session->ended) return;
  (session->terminal ? session->out_kept : session->err_kept) +=
      "the command was not started: the process that starts it was killed\n";
  session->ended = true;
  session->status = 128 + SIGKILL;
  session->ended_ms = context_.now_ms;
}

bool Consoles::OnDied(const siginfo_t& info) {
  for (const auto& session : sessions_) {
    if (session->of_rank || session->pid != info.si_pid) continue;
    session->pid = -1;
    session->ended = true;
    session->status = info.si_code == CLD_EXITED ? info.si_status : 128 + info.si_status;
    session->ended_ms = context_.now_ms;
    session->in.reset();
    session->in_waits.clear();
    return true;
  }
  return false;
}

std::optional<uint64_t> Consoles::GenerationOf(pid_t child) {
  for (const auto& session : sessions_) {
    if (session->pid == child) return session->generation;
  }
  return std::nullopt;
}

// nullptr: its input goes nowhere any more.
UniqueFd* Consoles::InputOf(Session& session) {
  UniqueFd* in = &session.in;
  if (session.of_rank) {
    RankProcess* rank = context_.generations.FindRank(session.generation, session.rank);
    if (rank == nullptr) return nullptr;
    in = &rank->in;
  }
  return in->valid() ? in : nullptr;
}

// Adds only descriptors of streams that have room: a descriptor that nobody reads would be ready at once, for
// ever.
void Consoles::AddFds(std::vector<pollfd>* fds) {
  for (const auto& session : sessions_) {
    if (session->out_kept.size() < kConsoleBytes) AddFd(fds, session->out.get());
    if (session->err_kept.size() < kConsoleBytes) AddFd(fds, session->err.get());
    if (UniqueFd* in = InputOf(*session); in != nullptr && !session->in_waits.empty())
      AddFd(fds, in->get(), POLLOUT);
  }
}

void Consoles::PumpInput(Session& session) {
  UniqueFd* in = InputOf(session);
  while (TakeInput(session, &in)) {
  }
  if (in == nullptr || !session.in_end || !session.in_waits.empty()) return;
  if (!session.terminal) return in->reset();
  session.in_end = false;  // once
  session.offered_end = false;
  (void)!write(in->get(), &kEndOfTransmission, 1);
}

// Takes what there is room for and writes what `in` takes. True: some was written, and more is offered.
bool Consoles::TakeInput(Session& session, UniqueFd** in) {
  // A program that reads no more takes everything, so that its client comes to its own end. A rank takes
  // nothing then: the client keeps it for the next generation.
  size_t room = kConsoleBytes - session.in_waits.size();
  if (*in == nullptr) room = session.of_rank ? 0 : session.offered.size();
  const size_t bytes = std::min(room, session.offered.size());
  if (*in != nullptr) session.in_waits.append(session.offered, 0, bytes);
  session.offered.erase(0, bytes);
  session.taken += bytes;
  if (session.offered.empty() && session.offered_end) session.in_end = true;
  bool more = false;
  while (*in != nullptr && !session.in_waits.empty()) {
    const ssize_t n = write((*in)->get(), session.in_waits.data(), session.in_waits.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) break;
    if (n < 0) {
      (*in)->reset();
      *in = nullptr;
      session.in_waits.clear();
      break;
    }
    session.in_waits.erase(0, static_cast<size_t>(n));
    more = !session.offered.empty();
  }
  return more;
}

// The output of a rank with a terminal is in its log's tail.
void Consoles::LookAtRank(Session& session) {
  RankProcess* rank = context_.generations.FindRank(session.generation, session.rank);
  if (rank == nullptr) {
    session.ended = true;
    return;
  }
  if (session.terminal) {
    const uint64_t total = rank->out.total();
    const uint64_t fresh = std::min<uint64_t>(total - std::min(total, session.out_seen), kConsoleBytes);
    session.out_kept = rank->out.LastBytes(static_cast<size_t>(fresh));
    session.out_at = total - session.out_kept.size();
  }
  if (!rank->exit || (session.terminal && rank->out.alive())) return;
  session.ended = true;
  session.status = StatusOf(*rank->exit);
}

void Consoles::ReadProgram(Session& session) {
  const int64_t now = context_.now_ms;
  const bool out = Read(&session.out, &session.out_kept);
  const bool err = Read(&session.err, &session.err_kept);
  if (out || err) session.read_ms = now;
  const bool quiet = now - std::max(session.ended_ms, session.read_ms) > kAfterEndMs;
  const bool room = session.out_kept.size() < kConsoleBytes && session.err_kept.size() < kConsoleBytes;
  if (!session.ended || !quiet || !room) return;
  session.out.reset();
  session.err.reset();
}

void Consoles::KillIfDue(const Session& session) {
  if (session.kill_at_ms == 0 || session.ended || context_.now_ms < session.kill_at_ms || session.pid <= 0)
    return;
  kill(-session.pid, SIGKILL);
  for (const Descendant& found : LivingDescendants(getpid())) {
    if (found.top == session.pid) SignalProcess(found.process, SIGKILL);
  }
}

void Consoles::Pump() {
  const int64_t now = context_.now_ms;
  for (auto& owned : sessions_) {
    Session& session = *owned;
    PumpInput(session);
    if (!session.of_rank) {
      ReadProgram(session);
    } else if (session.asked != 0) {
      LookAtRank(session);
    }
    if (session.asked != 0 && (session.HasNews() || now >= session.answer_by_ms)) Answer(session);
    if (now - session.heard_ms > kSilenceMs) HangUp(session);
    KillIfDue(session);
  }
  // One that was hung up goes when its program is gone; a client that has its end hangs up, too.
  std::erase_if(sessions_, [this](const auto& session) {
    const bool gone = session->kill_at_ms != 0 && (session->ended || session->of_rank);
    if (!gone || session->asked != 0) return false;
    over_.push_back(session->id);
    if (over_.size() > kConsolesOverMax) over_.pop_front();
    return true;
  });
}

void Consoles::Answer(Session& session) {
  ConsoleTurn answer;
  answer.id = std::exchange(session.asked, 0);
  answer.out = session.out_kept;
  answer.out_at = session.out_at;
  answer.err = session.err_kept;
  answer.taken = session.taken;
  answer.over = session.IsOver();
  answer.status = session.status;
  context_.agent.Tell(std::move(answer));
}

void Consoles::HangUp(Session& session) {
  if (session.kill_at_ms != 0) return;
  session.kill_at_ms = context_.now_ms + kHangUpMs;
  session.in_waits.clear();
  session.offered.clear();
  if (session.of_rank) {
    RankProcess* rank = context_.generations.FindRank(session.generation, session.rank);
    if (rank == nullptr || rank->exit) return;
    rank->in.reset();
    if (session.terminal && rank->pid > 0) kill(-rank->pid, SIGHUP);
    return;
  }
  session.in.reset();
  session.out.reset();  // of a terminal the last: the kernel tells its foreground, too
  session.err.reset();
  if (session.pid > 0) kill(-session.pid, SIGHUP);
}

// Its client never came, or was lost with an agent.
void Consoles::CloseLonelyInputs() {
  for (auto& [generation, record] : context_.generations) {
    for (auto& [number, rank] : record.ranks) {
      if (!rank->in.valid()) continue;
      for (const auto& session : sessions_) {
        if (session->of_rank && session->generation == generation && session->rank == number)
          rank->in_heard_ms = context_.now_ms;
      }
      if (context_.now_ms - rank->in_heard_ms > kLonelyMs) rank->in.reset();
    }
  }
}

bool Consoles::InputWaits() const {
  for (const auto& [generation, record] : context_.generations) {
    for (const auto& [number, rank] : record.ranks) {
      if (rank->in.valid()) return true;
    }
  }
  return false;
}

}  // namespace gtrain::keeper
