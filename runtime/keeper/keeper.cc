// The loop: poll everything, take signals, feed the agent's commands, pump the ranks' streams, advance what
// is ending. Frames to the agent are appended to one buffer; bulky ones (output) are skipped while it is
// long, so a slow agent costs memory only for what must not be lost.
#include "runtime/keeper/keeper.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "runtime/keeper/agent_protocol.h"
#include "runtime/keeper/posix.h"

namespace gtrain::keeper {

namespace {

constexpr size_t kAgentOutMax = 128u << 20;  // an agent this far behind is dropped; it will attach again
constexpr int64_t kTickMs = 100;
constexpr int64_t kSleepMs = 60000;
constexpr int64_t kQuitMs = 15000;
constexpr int64_t kLookMs = 1000;
// A rank that writes fast wakes us once in this time, not for each of its blocks; none of it waits longer.
constexpr int64_t kStreamsMs = 1;
constexpr size_t kStreamsLoud = 256u << 10;  // so much at once: it may be faster than that

}  // namespace

Keeper::Keeper(KeeperOptions options) : options_(std::move(options)) {}

bool Keeper::Listen(const std::string& path, const std::string& name, UniqueFd* fd) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return false;
  memcpy(address.sun_path, path.c_str(), path.size() + 1);
  unlink(path.c_str());
  fd->reset(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd->valid() || bind(fd->get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
      listen(fd->get(), 1024) != 0) {
    fprintf(stderr, "gtrain-keeper: cannot listen on %s (%s): %s\n", path.c_str(), name.c_str(),
            strerror(errno));
    return false;
  }
  return true;
}

// Ranks connect by path, and a path in sockaddr_un holds 107 bytes: a deep state directory needs a short
// stand-in.
bool Keeper::PlaceRankSocket() {
  rank_socket_ = options_.dir + "/rank.sock";
  if (rank_socket_.size() >= sizeof(sockaddr_un::sun_path)) {
    const char* base = getenv("XDG_RUNTIME_DIR");
    const bool usable = base != nullptr && base[0] == '/' && strlen(base) < 60 && access(base, W_OK) == 0;
    std::string dir = std::string(usable ? base : "/tmp") + "/gtrain-XXXXXX";
    if (mkdtemp(dir.data()) == nullptr) {
      fprintf(stderr, "gtrain-keeper: cannot make a short directory for the rank socket: %s\n",
              strerror(errno));
      return false;
    }
    rank_socket_ = dir + "/rank.sock";
    WriteFileAtomic("rank-dir", dir);
  }
  return Listen(rank_socket_, "ranks", &rank_listen_);
}

bool Keeper::Start() {
  now_ = agent_seen_ms_ = last_tick_ms_ = NowMs();
  char self_path[4096];
  const ssize_t length = readlink("/proc/self/exe", self_path, sizeof(self_path));
  writer_program_.assign(self_path, static_cast<size_t>(length > 0 ? length : 0));
  writer_program_ = writer_program_.substr(0, writer_program_.rfind('/') + 1) + "gtrain-writer";
  if (chdir(options_.dir.c_str()) != 0) {
    fprintf(stderr, "gtrain-keeper: cannot enter %s: %s\n", options_.dir.c_str(), strerror(errno));
    return false;
  }
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  sigset_t mask;
  sigemptyset(&mask);
  for (int signal : {SIGCHLD, SIGTERM, SIGINT, SIGHUP, SIGPIPE, SIGQUIT}) sigaddset(&mask, signal);
  sigprocmask(SIG_BLOCK, &mask, nullptr);
  signal(SIGXFSZ,
         SIG_IGN);  // beyond `ulimit -f` a write is refused, as by a full disk, and nobody dies of it
  signals_.reset(signalfd(-1, &mask, SFD_NONBLOCK | SFD_CLOEXEC));
  if (!signals_.valid() || !stream_set_.Open() || !connection_set_.Open()) return false;
  report_events_.reset(inotify_init1(IN_NONBLOCK | IN_CLOEXEC));
  mkdir("exits", 0700);
  Cgroup::SweepStale();
  Cgroup::WarmUp();
  ProcessEntry self;
  ReadProcess(getpid(), &self);
  WriteFileAtomic("pid", std::to_string(getpid()) + " " + std::to_string(self.start_time) + "\n");
  WriteFileAtomic("job", options_.job);  // after the pid: without one it would say that we left nobody
  return PlaceRankSocket() && Listen("agent.sock", "agent", &agent_listen_);  // last: it says we are ready
}

// Connections and streams are many: they have sets of their own, and only the ready ones are read. The few
// others are tried in every turn.
void Keeper::CollectPollFds() {
  poll_fds_.clear();
  auto add = [this](int fd, bool out = false) {
    if (fd >= 0) poll_fds_.push_back({fd, static_cast<short>(POLLIN | (out ? POLLOUT : 0)), 0});
  };
  if (NowMs() >= streams_from_ms_) add(stream_set_.fd());
  add(connection_set_.fd());
  add(signals_.get());
  add(fence_timer_.get());
  if (!tick_wanted_) add(report_events_.get());  // a program may write often: the next tick reads it all
  add(agent_listen_.get());
  add(rank_listen_.get());
  for (const auto& [generation, record] : generations_) {
    if (record.phase == Phase::kWriting) add(log_writer_.idle_fd());
  }
  add(agent_.get(), !agent_out_.empty());
  for (const auto& starting : starting_) add(starting->batch.fd());
  for (const auto& helper : helpers_) {
    add(helper->output_fd.get());
    add(helper->err_fd.get());
  }
  AddConsoleFds();
}

void Keeper::PumpReady() {
  if (now_ >= streams_from_ms_) {
    size_t read = 0;
    bool roomy = true;
    stream_set_.ForReady([&](LogStream& stream) {
      read += stream.Pump(now_);
      roomy = roomy && stream.roomy();
    });
    if (read > 0 && read < kStreamsLoud && roomy) streams_from_ms_ = now_ + kStreamsMs;
  }
  connection_set_.ForReady([](RankConnection& connection) {
    connection.ready = !connection.broken;
    if (connection.broken) connection.set->Remove(connection.fd.get());  // until the next sweep
  });
}

int Keeper::WaitMs() const {
  const int64_t streams_ms = streams_from_ms_ - NowMs();
  const int others_ms = WaitForOthersMs();
  return streams_ms > 0 ? static_cast<int>(std::min<int64_t>(streams_ms, others_ms)) : others_ms;
}

int Keeper::WaitForOthersMs() const {
  if (arena_bytes_faulting_ > 0 || more_zombies_) return 0;
  bool writing = false;
  for (const auto& [generation, record] : generations_) {
    if (record.phase == Phase::kEnding || record.phase == Phase::kKilling) return 20;
    writing = writing || record.phase == Phase::kWriting;
  }
  if (!writers_wanted_.empty()) return 20;
  if (writing && !tick_wanted_) return kTickMs;
  if (tick_wanted_)
    return static_cast<int>(std::clamp<int64_t>(last_tick_ms_ + kTickMs - NowMs(), 0, kTickMs));
  return static_cast<int>(attached_ ? kSleepMs : kLookMs);
}

int Keeper::Run() {
  while (true) {
    CollectPollFds();
    if (poll(poll_fds_.data(), poll_fds_.size(), WaitMs()) != 0) tick_wanted_ = true;
    now_ = NowMs();
    Turn(now_);
    if (quitting_ && ((!AnyLive() && writers_.empty()) || now_ > quit_by_ms_)) break;
    const bool idle = !AnyLive() && writers_.empty() && !agent_.valid();
    if (idle && now_ - agent_seen_ms_ > IdleExitMs()) break;
  }
  KillWriters();
  WriteAgent();
  unlink("agent.sock");
  unlink(rank_socket_.c_str());
  // Orphans of our ranks are our children: without children nobody is left, and the agent need not look.
  siginfo_t child;
  if (waitid(P_ALL, 0, &child, WEXITED | WNOHANG | WNOWAIT) != 0 && errno == ECHILD) unlink("pid");
  const std::string dir = rank_socket_.substr(0, rank_socket_.rfind('/'));
  if (dir != options_.dir) rmdir(dir.c_str());
  return 0;
}

void Keeper::Turn(int64_t now) {
  PumpReady();
  DrainSignals();
  for (auto& helper : helpers_) PumpHelper(*helper);
  TakeStarted();
  Reap();
  AcceptAgent();
  ReadAgent();
  for (auto& [generation, record] : generations_) StartPrepared(record);
  AcceptRanks();
  for (size_t i = 0; i < connections_.size(); ++i) {
    if (std::exchange(connections_[i]->ready, false)) ReadRank(*connections_[i]);
  }
  FaultArenas();
  StartWriters();
  for (auto& [generation, record] : generations_) AdvanceEnding(record);
  PumpConsoles();
  if (now - last_tick_ms_ >= kTickMs) Tick();
  for (auto& connection : connections_) WriteRank(*connection);
  WriteAgent();
}

// What a turn that found something leaves to do, for all ranks together and not more often than this.
void Keeper::Tick() {
  last_tick_ms_ = now_;
  const bool writing = !log_writer_.Idle();  // asked first: what the disk refuses until then is seen below
  const uint64_t handed = log_writer_.handed();
  CloseDrained();
  TailReports();
  SendOutput();
  CheckLease();
  CheckFence();
  CloseLonelyInputs();
  if (!attached_ && !quitting_ && now_ >= next_look_ms_) LookAfterSockets();
  SweepConnections();
  tick_wanted_ = writing || log_writer_.handed() != handed || MoreToDo();
}

// Something waits for its time, or for room. Without it the keeper sleeps until something happens.
bool Keeper::MoreToDo() const {
  if (quitting_ || reports_written_ || !helpers_.empty() || !consoles_.empty() || InputWaits()) return true;
  if (fence_until_ms_ != 0 && !fence_timer_.valid()) return true;
  for (const auto& connection : connections_) {
    if (connection->broken || connection->rank < 0) return true;
  }
  for (const WriterProcess& writer : writers_) {
    if (writer.pid <= 0) return true;
  }
  for (const auto& [generation, record] : generations_) {
    if (record.phase == Phase::kWriting) return true;
    if (record.phase == Phase::kLive && record.reports.valid() && record.reports_watch < 0) return true;
    for (const auto& [number, rank] : record.ranks) {
      const bool drains = rank->exit && (rank->out.alive() || rank->err.alive());
      const bool told = rank->out.total() == rank->out_sent && rank->err.total() == rank->err_sent &&
                        rank->out.refused() == rank->out_refused && rank->err.refused() == rank->err_refused;
      if (drains || !rank->out.settled() || !rank->err.settled() || (attached_ && !told)) return true;
    }
  }
  return false;
}

void Keeper::DrainSignals() {
  signalfd_siginfo info;
  while (read(signals_.get(), &info, sizeof(info)) == sizeof(info)) {
    if (info.ssi_signo != SIGTERM || quitting_) continue;
    Quit quit{"the keeper got SIGTERM"};
    Do(quit);
  }
}

bool Keeper::AnyLive() const {
  return std::any_of(generations_.begin(), generations_.end(),
                     [](const auto& item) { return item.second.phase != Phase::kGone; });
}

int64_t Keeper::IdleExitMs() const {
  const bool stopped = std::all_of(generations_.begin(), generations_.end(), [](const auto& item) {
    return item.second.ordered && item.second.mode != End::kReform;
  });
  if (!stopped || generations_.empty()) return options_.idle_exit_ms;
  return std::min(options_.idle_exit_ms, options_.stopped_exit_ms);
}

// ---------------------------------------------------------------- the agent

void Keeper::AcceptAgent() {
  while (true) {
    UniqueFd fd(accept4(agent_listen_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd.valid()) return;
    if (!IsAgentOrKeeper(fd.get())) {  // fault X6
      if (!std::exchange(refused_agent_, true))
        fprintf(stderr, "gtrain-keeper: refused a process that is no agent of this user\n");
      continue;
    }
    DropAgent();  // the newest agent is the one that lives
    agent_ = std::move(fd);
  }
}

void Keeper::DropAgent() {
  if (attached_) agent_seen_ms_ = now_;
  agent_.reset();
  agent_in_.clear();
  agent_out_.clear();
  attached_ = false;
}

void Keeper::ReadAgent() {
  char buffer[64 << 10];
  bool ended = false;
  while (agent_.valid() && agent_in_.size() < kAgentFrameBytesMax + sizeof(AgentFrame)) {
    ssize_t n = read(agent_.get(), buffer, sizeof(buffer));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) break;
    if (n <= 0) {
      ended = true;
      break;
    }
    agent_in_.append(buffer, static_cast<size_t>(n));
  }
  size_t used = 0;
  while (agent_.valid()) {
    Command command;
    const Take take = TakeFrame(agent_in_, &used, &command);
    if (take == Take::kBroken) ended = true;
    if (take != Take::kMessage) break;
    Handle(std::move(command));
  }
  agent_in_.erase(0, used);
  if (ended) DropAgent();
}

void Keeper::WriteAgent() {
  while (agent_.valid() && !agent_out_.empty()) {
    ssize_t n = send(agent_.get(), agent_out_.data(), agent_out_.size(), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) {
      if (agent_out_.size() > kAgentOutMax) DropAgent();
      return;
    }
    if (n <= 0) return DropAgent();
    agent_out_.erase(0, static_cast<size_t>(n));
  }
}

void Keeper::Tell(Report report) {
  if (attached_) AppendFrame(std::move(report), &agent_out_);
}

void Keeper::Handle(Command command) {
  if (!attached_ && !std::holds_alternative<Attach>(command)) return DropAgent();
  std::visit([this](auto& value) { Do(value); }, command);
}

// What a rank said before it ended comes before its exit at every agent: until then it counts as running.
bool Keeper::ToldAfterRelays(const RankProcess& rank) const {
  return rank.exit && !rank.acked && !rank.relays.empty();
}

State Keeper::Describe() const {
  State state;
  state.job = options_.job;
  state.pid = getpid();
  state.highest_revoked = highest_revoked_;
  state.highest_stopped = highest_stopped_;
  for (const auto& [generation, record] : generations_) {
    GenerationHeld held;
    held.generation = generation;
    held.note = record.begin.note;
    held.ending = record.phase != Phase::kLive;
    held.gone = record.phase == Phase::kGone;
    held.clean = record.clean;
    for (const auto& [number, rank] : record.ranks) {
      if (ToldAfterRelays(*rank)) {
        held.ranks.push_back({number, rank->exit->pid, rank->start_time, true, rank->sdk});
        held.gone = false;
        continue;
      }
      const pid_t pid = rank->exit ? rank->pid : std::max(rank->pid, 0);  // 0: about to start
      held.ranks.push_back({number, pid, rank->start_time, !rank->exit && pid > 0, rank->sdk});
      if (rank->exit && !rank->acked) held.unacked.push_back(*rank->exit);
    }
    state.generations.push_back(std::move(held));
  }
  return state;
}

void Keeper::Do(Attach& attach) {
  attached_ = true;
  if (!Compatible(attach.protocol, kAgentProtocol)) {
    State who;  // so that the agent can say why it leaves
    who.job = options_.job;
    who.pid = getpid();
    Tell(std::move(who));
    WriteAgent();
    attached_ = false;  // it was no agent of ours: the lease goes on running out
    return DropAgent();
  }
  lease_ms_ = attach.lease_ms;
  reports_written_ = true;                       // while nobody was told
  if (attach.protocol < 3) fence_until_ms_ = 0;  // an agent that went back a version extends none
  Tell(Describe());
  for (auto& [generation, record] : generations_) {
    bool later = false;
    for (auto& [number, rank] : record.ranks) {
      for (const RelayUp& relay : rank->relays) Tell(relay);
      if (ToldAfterRelays(*rank)) {
        Tell(*rank->exit);
        later = true;
      }
      rank->out_sent = rank->err_sent = 0;  // the new agent gets the tails again
      rank->out_refused = rank->err_refused = 0;
    }
    if (later && record.phase == Phase::kGone) Tell(Gone{generation, record.clean, record.gone_message});
  }
}

void Keeper::Do(BeginGeneration& begin) {
  if (generations_.count(begin.generation) > 0) return;
  if (begin.generation <= highest_revoked_) {
    // Its end was heard before its begin, and the agent waits for the word that nothing of it is here.
    GenerationRecord& record = generations_[begin.generation];
    record.begin = std::move(begin);
    record.phase = Phase::kGone;
    return Tell(Gone{record.begin.generation, true, "it was over before it began"});
  }
  LookAfterSockets();
  if (quitting_) return;
  generations_[begin.generation].begin = std::move(begin);
}

void Keeper::Do(StartRank& start) {
  GenerationRecord* record = FindGeneration(start.generation);
  if (record == nullptr || record->phase != Phase::kLive || record->ranks.count(start.rank) > 0) return;
  auto& rank = record->ranks[start.rank];
  rank = std::make_unique<RankProcess>();
  rank->spec = std::move(start);
  PrepareStart(*record, *rank);
}

void Keeper::Do(EndGeneration& end) {
  highest_revoked_ = std::max(highest_revoked_, end.generation);
  if (end.mode != End::kReform) highest_stopped_ = std::max(highest_stopped_, end.generation);
  for (auto& [generation, record] : generations_) {
    if (generation > end.generation) break;
    End_(record, end.mode, static_cast<int64_t>(end.grace_ms), end.reason, true);
  }
  // Its begin was lost with a connection or is not here yet, and begins nothing any more.
  if (generations_.count(end.generation) == 0) Tell(Gone{end.generation, true, "it never began here"});
}

void Keeper::Do(Relay& relay) {
  RankConnection* connection = ConnectionOf(relay.generation, relay.rank);
  if (connection != nullptr) ToRank(*connection, kKeeperFromAgent, relay.json);
}

void Keeper::Do(AckRelay& ack) {
  RankProcess* rank = FindRank(ack.generation, ack.rank);
  if (rank == nullptr) return;
  for (auto it = rank->relays.begin(); it != rank->relays.end(); ++it) {
    if (it->id != ack.id) continue;
    rank->relay_bytes -= it->json.size();
    rank->relays.erase(it);
    return;
  }
}

void Keeper::Do(AckExit& ack) {
  RankProcess* rank = FindRank(ack.generation, ack.rank);
  if (rank == nullptr || !rank->exit || rank->acked) return;
  rank->acked = true;
  const bool all = --FindGeneration(ack.generation)->unacked == 0;
  if (all) unlink(("exits/" + std::to_string(ack.generation)).c_str());
}

void Keeper::Do(Notice& notice) {
  GenerationRecord* record = FindGeneration(notice.generation);
  if (record == nullptr || record->phase != Phase::kLive) return;
  const bool known = notice.number != 0 && notice.number <= record->noticed;
  record->noticed = std::max(record->noticed, notice.number);
  const uint32_t seconds = notice.seconds;
  ToRanks(*record, kKeeperNotice, std::string(reinterpret_cast<const char*>(&seconds), sizeof(seconds)));
  std::vector<ProcessEntry> processes;
  for (auto& [number, rank] : record->ranks) {
    if (rank->exit) continue;
    WriteFileAtomic(rank->spec.notice_path, std::to_string(seconds) + "\n");
    const bool told = ConnectionOf(notice.generation, number) != nullptr;
    // To the program alone: its helpers (data loaders) would die of a signal they do not know.
    if (notice.signal <= 0 || known || told || rank->pid <= 0) continue;
    for (const pid_t pid : HearersOf(rank->pid, notice.signal, &processes)) kill(pid, notice.signal);
  }
}

void Keeper::Do(SignalRank& signal) {
  RankProcess* rank = FindRank(signal.generation, signal.rank);
  if (rank != nullptr && !rank->exit && rank->pid > 0) kill(rank->pid, signal.signal);
}

void Keeper::Do(Forget& forget) {
  GenerationRecord* record = FindGeneration(forget.generation);
  if (record == nullptr || record->phase != Phase::kGone) return;
  unlink(("exits/" + std::to_string(forget.generation)).c_str());
  if (record->reports_watch >= 0) inotify_rm_watch(report_events_.get(), record->reports_watch);
  generations_.erase(forget.generation);
}

void Keeper::Do(Quit& quit) {
  quitting_ = true;
  quit_by_ms_ = now_ + kQuitMs;
  for (auto& [generation, record] : generations_) End_(record, End::kStopNow, 0, quit.reason, true);
}

void Keeper::CheckLease() {
  if (attached_ || lease_ms_ == 0 || now_ - agent_seen_ms_ <= static_cast<int64_t>(lease_ms_)) return;
  const std::string reason = "no agent came back for " + std::to_string(lease_ms_ / 1000) + " s";
  for (auto& [generation, record] : generations_) {
    if (record.phase != Phase::kLive) continue;
    highest_revoked_ = std::max(highest_revoked_, generation);
    End_(record, End::kReform, 5000, reason, true);
  }
}

void Keeper::Do(Fence& fence) {
  fence_until_ms_ = std::max(fence_until_ms_, fence.until_ms);
  if (!fence_timer_.valid()) fence_timer_.reset(timerfd_create(CLOCK_BOOTTIME, TFD_NONBLOCK | TFD_CLOEXEC));
  itimerspec at = {};
  at.it_value.tv_sec = fence_until_ms_ / 1000 + 1;
  timerfd_settime(fence_timer_.get(), TFD_TIMER_ABSTIME, &at, nullptr);
}

// What the head counts on holds whether an agent is there or not, whether it runs or was stopped.
void Keeper::CheckFence() {
  uint64_t times = 0;
  while (fence_timer_.valid() && read(fence_timer_.get(), &times, sizeof(times)) > 0) {
  }
  if (fence_until_ms_ == 0 || BootMs() <= fence_until_ms_) return;
  for (auto& [generation, record] : generations_) {
    const bool may_write = std::any_of(record.ranks.begin(), record.ranks.end(), [](const auto& item) {
      return !item.second->sdk && !item.second->exit;
    });
    if (record.phase != Phase::kLive || !may_write) continue;
    highest_revoked_ = std::max(highest_revoked_, generation);
    End_(record, End::kReform, 5000, "no word from the head for as long as a lease lasts", true);
  }
}

// A file system that does not answer has not lost it.
bool Keeper::DirectoryIsGone() const {
  struct stat there;
  struct stat here;
  if (stat(options_.dir.c_str(), &there) != 0) return errno == ENOENT || errno == ENOTDIR;
  return stat(".", &here) == 0 && (there.st_ino != here.st_ino || there.st_dev != here.st_dev);
}

// Agents and ranks find us by two sockets. Whoever removed them (a cleaner of /tmp, a hand) meant no harm to
// the ranks, so they are made anew. Without our directory no agent can ever find us, and what we started may
// not run on unseen. They are looked for only while there is no agent, and before ranks start that need one:
// a file system that hangs would hold us up.
void Keeper::LookAfterSockets() {
  next_look_ms_ = now_ + kLookMs;
  const auto is_missing = [](const char* path) { return access(path, F_OK) != 0 && errno == ENOENT; };
  const bool missing = is_missing("agent.sock") || is_missing(rank_socket_.c_str());
  // Without an agent, one look may fall into the middle of the removal of the directory.
  const bool missed_before = std::exchange(sockets_missed_, missing);
  if (!missing || (!attached_ && !missed_before)) return;
  if (DirectoryIsGone()) {
    Quit quit{"the keeper's directory " + options_.dir + " was removed"};
    return Do(quit);
  }
  const std::string rank_dir = rank_socket_.substr(0, rank_socket_.rfind('/'));
  if (rank_dir != options_.dir) mkdir(rank_dir.c_str(), 0700);
  // What fails is tried again at the next look.
  if (!Listen("agent.sock", "agent", &agent_listen_)) agent_listen_.reset();
  if (!Listen(rank_socket_, "ranks", &rank_listen_)) rank_listen_.reset();
}

RankProcess* Keeper::FindRank(uint64_t generation, int rank) {
  GenerationRecord* record = FindGeneration(generation);
  if (record == nullptr) return nullptr;
  const auto it = record->ranks.find(rank);
  return it == record->ranks.end() ? nullptr : it->second.get();
}

GenerationRecord* Keeper::FindGeneration(uint64_t generation) {
  const auto it = generations_.find(generation);
  return it == generations_.end() ? nullptr : &it->second;
}

// nullptr: it is no rank of ours. A forgotten generation may have left a process that nothing could kill.
GenerationRecord* Keeper::GenerationOfPid(pid_t pid, RankProcess** rank) {
  const auto it = rank_of_pid_.find(pid);
  if (it == rank_of_pid_.end()) return nullptr;
  const auto [generation, number] = it->second;
  *rank = FindRank(generation, number);
  return *rank != nullptr && (*rank)->pid == pid ? FindGeneration(generation) : nullptr;
}

}  // namespace gtrain::keeper
