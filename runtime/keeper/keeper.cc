#include "runtime/keeper/keeper.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "runtime/keeper/posix.h"

namespace gtrain::keeper {

namespace {

constexpr int64_t kTickMs = 100;
constexpr int64_t kSleepMs = 60000;
constexpr int64_t kQuitMs = 15000;
constexpr int64_t kLookMs = 1000;

// True while messages that a rank sent before it ended must reach the agent before its exit: until then it
// counts as running.
bool ToldAfterRelays(const RankProcess& rank) { return rank.exit && !rank.acked && !rank.relays.empty(); }

GenerationHeld DescribeGeneration(const GenerationRecord& record) {
  GenerationHeld held;
  held.generation = record.begin.generation;
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
  return held;
}

}  // namespace

// ---------------------------------------------------------------- the loop

Keeper::Keeper(KeeperOptions options) : context_(std::move(options)) {
  rank_socket_.SetKept(&kept_);
  children_.AddOwner(&ranks_);
  children_.AddOwner(&kept_);
  children_.AddOwner(&writers_);
  children_.AddOwner(&helpers_);
  children_.AddOwner(&consoles_);
}

// Ranks connect by path, and a path in sockaddr_un holds 107 bytes: a deep state directory needs a short
// stand-in.
bool Keeper::PlaceRankSocket() {
  std::string& path = context_.rank_socket;
  path = context_.options.dir + "/rank.sock";
  if (path.size() >= sizeof(sockaddr_un::sun_path)) {
    const char* base = getenv("XDG_RUNTIME_DIR");
    const bool usable = base != nullptr && base[0] == '/' && strlen(base) < 60 && access(base, W_OK) == 0;
    std::string dir = std::string(usable ? base : "/tmp") + "/gtrain-XXXXXX";
    if (mkdtemp(dir.data()) == nullptr) {
      fprintf(stderr, "gtrain-keeper: cannot make a short directory for the rank socket: %s\n",
              strerror(errno));
      return false;
    }
    path = dir + "/rank.sock";
    WriteFileAtomic("rank-dir", dir);
  }
  return connections_.Listen();
}

bool Keeper::TakeSignals() {
  sigset_t mask;
  sigemptyset(&mask);
  for (int signal : {SIGCHLD, SIGTERM, SIGINT, SIGHUP, SIGPIPE, SIGQUIT}) sigaddset(&mask, signal);
  sigprocmask(SIG_BLOCK, &mask, nullptr);
  signal(SIGXFSZ,
         SIG_IGN);  // beyond `ulimit -f` a write is refused, as by a full disk, and nobody dies of it
  signals_.reset(signalfd(-1, &mask, SFD_NONBLOCK | SFD_CLOEXEC));
  return signals_.valid();
}

bool Keeper::Start() {
  const std::string& dir = context_.options.dir;
  context_.now_ms = last_tick_ms_ = NowMs();
  context_.agent.set_seen_ms(context_.now_ms);
  if (chdir(dir.c_str()) != 0) {
    fprintf(stderr, "gtrain-keeper: cannot enter %s: %s\n", dir.c_str(), strerror(errno));
    return false;
  }
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  if (!TakeSignals() || !outputs_.Open() || !connections_.Open()) return false;
  mkdir("exits", 0700);
  Cgroup::SweepStale();
  Cgroup::WarmUp();
  ProcessEntry self;
  ReadProcess(getpid(), &self);
  WriteFileAtomic("pid", std::to_string(getpid()) + " " + std::to_string(self.start_time) + "\n");
  WriteFileAtomic("job",
                  context_.options.job);  // after the pid: without one it would say that we left nobody
  return PlaceRankSocket() && context_.agent.Listen();  // last: it says we are ready
}

// Connections and streams are many: they have sets of their own, and only the ready ones are read. The few
// others are tried in every turn.
void Keeper::CollectPollFds() {
  poll_fds_.clear();
  AddFd(&poll_fds_, signals_.get());
  AddFd(&poll_fds_, fence_timer_.get());
  outputs_.AddFds(&poll_fds_);
  connections_.AddFds(&poll_fds_);
  context_.agent.AddFds(&poll_fds_);
  children_.AddFds(&poll_fds_);
  helpers_.AddFds(&poll_fds_);
  consoles_.AddFds(&poll_fds_);
}

int Keeper::WaitMs() const {
  const int64_t streams_ms = outputs_.StreamsWaitMs();
  const int others_ms = WaitForOthersMs();
  return streams_ms > 0 ? static_cast<int>(std::min<int64_t>(streams_ms, others_ms)) : others_ms;
}

int Keeper::WaitForOthersMs() const {
  const Generations& generations = context_.generations;
  if (arenas_.MoreToFault() || children_.more_zombies()) return 0;
  if (generations.AnyIn(Phase::kEnding) || generations.AnyIn(Phase::kKilling)) return 20;
  if (writers_.AnyWanted() || kept_.AnyEnding()) return 20;
  if (context_.tick_wanted)
    return static_cast<int>(std::clamp<int64_t>(last_tick_ms_ + kTickMs - NowMs(), 0, kTickMs));
  if (generations.AnyIn(Phase::kWriting)) return kTickMs;
  const int64_t most = context_.agent.attached() ? kSleepMs : kLookMs;
  return static_cast<int>(outputs_.LooksForReports() ? std::min(most, kReportsMs) : most);
}

int Keeper::Run() {
  while (true) {
    CollectPollFds();
    if (poll(poll_fds_.data(), poll_fds_.size(), WaitMs()) != 0) context_.tick_wanted = true;
    context_.now_ms = NowMs();
    Turn();
    if (IsDone()) break;
  }
  Leave();
  return 0;
}

bool Keeper::IsDone() const {
  const bool nothing_left = !context_.generations.AnyLive() && writers_.empty() && kept_.empty();
  if (quitting_ && (nothing_left || context_.now_ms > quit_by_ms_)) return true;
  return nothing_left && !context_.agent.connected() &&
         context_.now_ms - context_.agent.seen_ms() > IdleExitMs();
}

void Keeper::Leave() {
  writers_.End();
  context_.agent.Write(context_.now_ms);
  context_.agent.Unlisten();
  unlink(context_.rank_socket.c_str());
  // Orphans of our ranks are our children: without children nobody is left, and the agent need not look.
  siginfo_t child;
  if (waitid(P_ALL, 0, &child, WEXITED | WNOHANG | WNOWAIT) != 0 && errno == ECHILD) unlink("pid");
  const std::string dir = context_.rank_socket.substr(0, context_.rank_socket.rfind('/'));
  if (dir != context_.options.dir) rmdir(dir.c_str());
}

void Keeper::Turn() {
  outputs_.PumpStreams();
  connections_.MarkReady();
  DrainSignals();
  helpers_.Pump();
  children_.TakeStarted();
  children_.Reap();
  // Before ranks are heard: the memory of one that has just died is that of the next that asks for some.
  Sweep(Connections::Which::kOfTheDead);
  context_.agent.Accept(context_.now_ms);
  context_.agent.Read(context_.now_ms, [this](Command command) { Handle(std::move(command)); });
  for (auto& [generation, record] : context_.generations) ranks_.StartPrepared(record);
  connections_.Accept();
  rank_socket_.ReadReady();
  arenas_.Fault();
  writers_.StartWanted();
  for (auto& [generation, record] : context_.generations) endings_.Advance(record);
  kept_.Advance();
  consoles_.Pump();
  if (context_.now_ms - last_tick_ms_ >= kTickMs) Tick();
  connections_.WriteAll();
  context_.agent.Write(context_.now_ms);
}

// The work that a turn which found something leaves, for all ranks together and not more often than this.
void Keeper::Tick() {
  last_tick_ms_ = context_.now_ms;
  const LogWriter& logs = outputs_.logs();
  const bool writing = !logs.Idle();  // asked first: what the disk refuses until then is seen below
  const uint64_t handed = logs.handed();
  outputs_.CloseDrained();
  outputs_.TailReports();
  outputs_.Send();
  CheckLease();
  CheckFence();
  consoles_.CloseLonelyInputs();
  asks_.Expire();
  if (!context_.agent.attached() && !quitting_ && context_.now_ms >= next_look_ms_) LookAfterSockets();
  Sweep(Connections::Which::kAll);
  context_.tick_wanted = writing || logs.handed() != handed || MoreToDo();
}

void Keeper::Sweep(Connections::Which which) {
  connections_.Sweep(which, [this](const RankConnection& connection) { arenas_.FreeAllOf(connection); });
}

// Something waits for its time, or for room. Without it the keeper sleeps until something happens.
bool Keeper::MoreToDo() const {
  const bool fence_without_timer = fence_until_ms_ != 0 && !fence_timer_.valid();
  return quitting_ || fence_without_timer || !helpers_.empty() || !asks_.empty() || consoles_.MoreToDo() ||
         connections_.MoreToDo() || writers_.MoreToDo() || context_.generations.AnyIn(Phase::kWriting) ||
         outputs_.MoreToDo();
}

void Keeper::DrainSignals() {
  signalfd_siginfo info;
  while (read(signals_.get(), &info, sizeof(info)) == sizeof(info)) {
    if (info.ssi_signo != SIGTERM || quitting_) continue;
    Quit quit{"the keeper got SIGTERM"};
    Do(quit);
  }
}

int64_t Keeper::IdleExitMs() const {
  const Generations& generations = context_.generations;
  const bool stopped = std::all_of(generations.begin(), generations.end(), [](const auto& item) {
    return item.second.ordered && item.second.mode != End::kReform;
  });
  const KeeperOptions& options = context_.options;
  if (!stopped || generations.empty()) return options.idle_exit_ms;
  return std::min(options.idle_exit_ms, options.stopped_exit_ms);
}

// ---------------------------------------------------------------- what the agent says

void Keeper::Handle(Command command) {
  if (!context_.agent.attached() && !std::holds_alternative<Attach>(command))
    return context_.agent.Drop(context_.now_ms);
  std::visit([this](auto& value) { Do(value); }, command);
}

State Keeper::Describe() const {
  State state;
  state.job = context_.options.job;
  state.pid = getpid();
  state.highest_revoked = highest_revoked_;
  state.highest_stopped = highest_stopped_;
  for (const auto& [generation, record] : context_.generations)
    state.generations.push_back(DescribeGeneration(record));
  state.kept = kept_.List(true);
  state.coming = kept_.List(false);
  return state;
}

void Keeper::Do(Attach& attach) {
  AgentLink& agent = context_.agent;
  agent.set_attached(true);
  if (!Compatible(attach.protocol, kAgentProtocol)) {
    State who;  // so that the agent can say why it leaves
    who.job = context_.options.job;
    who.pid = getpid();
    agent.Tell(std::move(who));
    agent.Write(context_.now_ms);
    agent.set_attached(false);  // it was no agent of ours: the lease goes on running out
    return agent.Drop(context_.now_ms);
  }
  lease_ms_ = attach.lease_ms;
  outputs_.ReadReportsSoon();                    // while nobody was told
  if (attach.protocol < 3) fence_until_ms_ = 0;  // an agent that went back a version extends none
  agent.Tell(Describe());
  RepeatToNewAgent();
}

void Keeper::RepeatToNewAgent() {
  AgentLink& agent = context_.agent;
  for (auto& [generation, record] : context_.generations) {
    bool later = false;
    for (auto& [number, rank] : record.ranks) {
      for (const RelayUp& relay : rank->relays) agent.Tell(relay);
      if ((rank->spec.waits ? rank->released : rank->stays) && !rank->exit)
        agent.Tell(Ready{generation, number});
      if (ToldAfterRelays(*rank)) {
        agent.Tell(*rank->exit);
        later = true;
      }
      rank->out_sent = rank->err_sent = 0;  // the new agent gets the tails again
      rank->out_refused = rank->err_refused = 0;
    }
    if (later && record.phase == Phase::kGone)
      agent.Tell(kept_.TellOf(generation, record.clean, record.gone_message));
  }
}

void Keeper::Do(BeginGeneration& begin) {
  Generations& generations = context_.generations;
  if (generations.Find(begin.generation) != nullptr) return;
  if (begin.generation <= highest_revoked_) {
    // Its end was heard before its begin, and the agent waits for the word that nothing of it is here.
    GenerationRecord& record = generations.Add(std::move(begin));
    record.phase = Phase::kGone;
    return context_.agent.Tell(kept_.TellOf(record.begin.generation, true, "it was over before it began"));
  }
  LookAfterSockets();
  if (quitting_) return;
  generations.Add(std::move(begin));
}

void Keeper::Do(StartRank& start) {
  GenerationRecord* record = context_.generations.Find(start.generation);
  if (record == nullptr || record->phase != Phase::kLive || record->ranks.count(start.rank) > 0) return;
  if (!kept_.GoOn(*record, start)) {
    auto& rank = record->ranks[start.rank];
    rank = std::make_unique<RankProcess>();
    const Kept goes_on{start.born, start.born_rank};
    rank->born = {start.generation, start.rank};
    rank->born_token = start.token;
    rank->spec = std::move(start);
    // The others would wait for one that is started in its place, and go on without it at once.
    if (goes_on.born > 0)
      ranks_.NeverRuns(*rank, kept_.TakeDeath(goes_on));
    else
      ranks_.Prepare(*record, *rank);
  }
  if (record->ranks.size() == record->begin.ranks) kept_.LeaveOut(record->begin.generation);
}

void Keeper::Do(EndGeneration& end) {
  highest_revoked_ = std::max(highest_revoked_, end.generation);
  if (end.mode != End::kReform) highest_stopped_ = std::max(highest_stopped_, end.generation);
  for (auto& [generation, record] : context_.generations) {
    if (generation > end.generation) break;
    endings_.Begin(record, {end.mode, static_cast<int64_t>(end.grace_ms), end.reason, true, end.keep});
  }
  if (!end.keep) kept_.End(end.generation, static_cast<int64_t>(end.grace_ms));
  // Its begin was lost with a connection or is not here yet, and begins nothing any more.
  if (context_.generations.Find(end.generation) == nullptr)
    context_.agent.Tell(kept_.TellOf(end.generation, true, "it never began here"));
}

void Keeper::Do(Relay& relay) {
  RankConnection* connection = connections_.Of(relay.generation, relay.rank);
  if (connection != nullptr) connection->Send(kKeeperFromAgent, relay.json);
}

void Keeper::Do(AckRelay& ack) {
  RankProcess* rank = context_.generations.FindRank(ack.generation, ack.rank);
  if (rank == nullptr) return;
  for (auto it = rank->relays.begin(); it != rank->relays.end(); ++it) {
    if (it->id != ack.id) continue;
    rank->relay_bytes -= it->json.size();
    rank->relays.erase(it);
    return;
  }
}

void Keeper::Do(AckExit& ack) {
  RankProcess* rank = context_.generations.FindRank(ack.generation, ack.rank);
  if (rank == nullptr || !rank->exit || rank->acked) return;
  rank->acked = true;
  const bool all = --context_.generations.Find(ack.generation)->unacked == 0;
  if (all) unlink(("exits/" + std::to_string(ack.generation)).c_str());
}

void Keeper::Do(Notice& notice) {
  GenerationRecord* record = context_.generations.Find(notice.generation);
  if (record == nullptr || record->phase != Phase::kLive) return;
  const bool known = notice.number != 0 && notice.number <= record->noticed;
  record->noticed = std::max(record->noticed, notice.number);
  const uint32_t seconds = notice.seconds;
  connections_.SendToAll(notice.generation, kKeeperNotice,
                         std::string(reinterpret_cast<const char*>(&seconds), sizeof(seconds)));
  std::vector<ProcessEntry> processes;
  for (auto& [number, rank] : record->ranks) {
    if (rank->exit) continue;
    WriteFileAtomic(rank->spec.notice_path, std::to_string(seconds) + "\n");
    const bool told = connections_.Of(notice.generation, number) != nullptr;
    // The signal goes to the program alone: its helpers (data loaders) would die of a signal they do not
    // know.
    if (notice.signal <= 0 || known || told || rank->pid <= 0) continue;
    for (const pid_t pid : HearersOf(rank->pid, notice.signal, &processes)) kill(pid, notice.signal);
  }
}

void Keeper::Do(SignalRank& signal) {
  const RankProcess* rank = context_.generations.FindRank(signal.generation, signal.rank);
  if (rank != nullptr && !rank->exit && rank->pid > 0) kill(rank->pid, signal.signal);
}

void Keeper::Do(Forget& forget) {
  const GenerationRecord* record = context_.generations.Find(forget.generation);
  if (record == nullptr || record->phase != Phase::kGone) return;
  unlink(("exits/" + std::to_string(forget.generation)).c_str());
  outputs_.StopWatchingReports(*record);
  context_.generations.Forget(forget.generation);
}

void Keeper::Do(Quit& quit) {
  quitting_ = true;
  quit_by_ms_ = context_.now_ms + kQuitMs;
  for (auto& [generation, record] : context_.generations)
    endings_.Begin(record, {End::kStopNow, 0, quit.reason});
  kept_.End(UINT64_MAX, 0);
}

void Keeper::Do(Fence& fence) {
  fence_until_ms_ = std::max(fence_until_ms_, fence.until_ms);
  if (!fence_timer_.valid()) fence_timer_.reset(timerfd_create(CLOCK_BOOTTIME, TFD_NONBLOCK | TFD_CLOEXEC));
  itimerspec at = {};
  at.it_value.tv_sec = fence_until_ms_ / 1000 + 1;
  timerfd_settime(fence_timer_.get(), TFD_TIMER_ABSTIME, &at, nullptr);
}

// ---------------------------------------------------------------- without an agent

// Ends a generation that the head may take for ended.
void Keeper::Revoke(GenerationRecord& record, const std::string& reason) {
  highest_revoked_ = std::max(highest_revoked_, record.begin.generation);
  endings_.Begin(record, {End::kReform, kEndingGraceMs, reason});
}

void Keeper::CheckLease() {
  const int64_t silent_ms = context_.now_ms - context_.agent.seen_ms();
  if (context_.agent.attached() || lease_ms_ == 0 || silent_ms <= static_cast<int64_t>(lease_ms_)) return;
  const std::string reason = "no agent came back for " + std::to_string(lease_ms_ / 1000) + " s";
  kept_.End(UINT64_MAX, kEndingGraceMs);
  for (auto& [generation, record] : context_.generations) {
    if (record.phase == Phase::kLive) Revoke(record, reason);
  }
}

// The head relies on the fence, whether an agent is there or not, and whether it runs or was stopped.
void Keeper::CheckFence() {
  uint64_t times = 0;
  while (fence_timer_.valid() && read(fence_timer_.get(), &times, sizeof(times)) > 0) {
  }
  if (fence_until_ms_ == 0 || BootMs() <= fence_until_ms_) return;
  for (auto& [generation, record] : context_.generations) {
    const bool may_write = std::any_of(record.ranks.begin(), record.ranks.end(), [](const auto& item) {
      return !item.second->sdk && !item.second->exit && !item.second->spec.waits;
    });
    if (record.phase == Phase::kLive && may_write)
      Revoke(record, "no word from the head for as long as a lease lasts");
  }
}

// A file system that does not answer has not lost it.
bool Keeper::DirectoryIsGone() const {
  struct stat there;
  struct stat here;
  if (stat(context_.options.dir.c_str(), &there) != 0) return errno == ENOENT || errno == ENOTDIR;
  return stat(".", &here) == 0 && (there.st_ino != here.st_ino || there.st_dev != here.st_dev);
}

// Agents and ranks find us by two sockets. A cleaner of /tmp or a person that removed them meant no harm to
// the ranks, so they are made anew. Without our directory no agent can ever find us, and the processes that
// we started may not run on unseen. The sockets are looked for only while there is no agent, and before ranks
// start that need one: a file system that hangs would hold us up.
void Keeper::LookAfterSockets() {
  next_look_ms_ = context_.now_ms + kLookMs;
  const auto is_missing = [](const std::string& path) {
    return access(path.c_str(), F_OK) != 0 && errno == ENOENT;
  };
  const bool missing = is_missing(AgentLink::kSocket) || is_missing(context_.rank_socket);
  // Without an agent, one look may fall into the middle of the removal of the directory.
  const bool missed_before = std::exchange(sockets_missed_, missing);
  if (!missing || (!context_.agent.attached() && !missed_before)) return;
  const std::string& dir = context_.options.dir;
  if (DirectoryIsGone()) {
    Quit quit{"the keeper's directory " + dir + " was removed"};
    return Do(quit);
  }
  const std::string rank_dir = context_.rank_socket.substr(0, context_.rank_socket.rfind('/'));
  if (rank_dir != dir) mkdir(rank_dir.c_str(), 0700);
  context_.agent.Listen();  // what fails is tried again at the next look
  connections_.Listen();
}

}  // namespace gtrain::keeper
