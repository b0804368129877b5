// Life and death of processes.
//
// An exit is what waitid says, never what a pipe says (fault P7); its record is on disk before the zombie is
// reaped, so a keeper that dies in between loses nothing. A generation ends in phases: kEnding (asked, within
// the grace), kKilling (SIGKILL to every descendant until a scan finds none), kGone. The keeper is the
// subreaper of all, so whatever escaped by double fork and setsid is still its descendant (fault P6).
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <utility>

#include "base/folder.h"
#include "runtime/keeper/agent_protocol.h"
#include "runtime/keeper/keeper.h"
#include "runtime/keeper/posix.h"

namespace gtrain::keeper {

namespace {

constexpr int64_t kDrainMs = 2000;
constexpr int64_t kGiveUpMs = 10000;
constexpr int64_t kUncleanLogsMs = 2000;  // and when kGiveUpMs went by before: the head waits 15 s for all
constexpr int64_t kLogsMs = 8000;         // a generation that is over waits this long for its logs
constexpr int64_t kScanEveryMs = 15;
constexpr size_t kOutputFrameMax = 64u << 10;
constexpr size_t kAgentOutSoft = 1u << 20;  // beyond this, output waits: it is in the file anyway
constexpr int64_t kReportsMs = 1000;
constexpr uint64_t kReportBacklogMax = 16u << 20;
constexpr uint64_t kReportPunchStep = 1u << 20;
constexpr size_t kHelperOutputMax = (1u << 20) - 1024;  // and what is said beside it
constexpr size_t kHelpersMax = 16;

std::string Number(uint64_t value) { return std::to_string(value); }

bool IsOrdinaryStopSignal(int signal) { return signal == SIGTERM || signal == SIGKILL || signal == SIGINT; }

std::string GroupName(const GenerationRecord& record) {
  return Number(static_cast<uint64_t>(getpid())) + "-" + Number(record.begin.generation);
}

// A shell that died of the signal that its program, in the same process group, still saves for.
bool ItsGroupStillSaves(const GenerationRecord& record, const RankProcess& rank) {
  if (!record.ordered || record.mode != End::kStop || record.phase != Phase::kEnding) return false;
  if (!rank.exit || rank.exit->signal != SIGTERM || rank.exit->pid <= 1) return false;
  return kill(static_cast<pid_t>(-rank.exit->pid), 0) == 0 ||
         std::any_of(rank.apart.begin(), rank.apart.end(), [](const ProcessEntry& before) {
           ProcessEntry now;
           return ReadProcess(before.pid, &now) && now.start_time == before.start_time && !now.zombie;
         });
}

// Every descendant has an ancestor among our children, so without children there is none.
bool NoChildren() {
  siginfo_t info = {};
  return waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 && errno == ECHILD;
}

}  // namespace

// ---------------------------------------------------------------- start

// Everything but the process: it is started with the others of this turn.
void Keeper::PrepareStart(GenerationRecord& record, RankProcess& rank) {
  const StartRank& spec = rank.spec;
  if (spec.argv.empty()) return FailStart(rank, {"the command is empty", "", 127});
  for (auto [stream, path] : {std::pair{&rank.out, &spec.out_path}, std::pair{&rank.err, &spec.err_path}}) {
    Terminal terminal = Terminal::kNone;
    if (spec.tty && stream == &rank.out) terminal = spec.takes_input ? Terminal::kWhole : Terminal::kRaw;
    if (!stream->Open(*path, options_.log_limits, terminal, now_, &log_writer_) ||
        !stream->Watch(&stream_set_)) {
      return FailStart(
          rank, {"cannot open the log file " + *path +
                 (terminal != Terminal::kNone ? ", or a terminal for it" : "") + ": " + strerror(errno)});
    }
  }
  if (!spec.report_path.empty()) {
    const auto [folder, name] = OpenFolderOf(spec.report_path);
    if (folder.valid()) unlinkat(folder.get(), name.c_str(), 0);  // of a try to start this generation before
    if (!record.reports.valid()) {
      record.reports.reset(fcntl(folder.get(), F_DUPFD_CLOEXEC, 0));
      WatchReports(record);
    }
  }
  if (spec.memory_limit > 0) {
    rank.cgroup.Create(GroupName(record) + "-" + Number(static_cast<uint64_t>(spec.rank)),
                       {spec.memory_limit, record.begin.processes_max});
  }
  rank.out_write = rank.out.TakeWriteEnd();
  rank.err_write = rank.err.TakeWriteEnd();
  if (spec.takes_input && !PrepareInput(rank))
    return FailStart(rank, {std::string("cannot make its stdin: ") + strerror(errno)});
  record.to_start.push_back(spec.rank);
}

void Keeper::StartPrepared(GenerationRecord& record) {
  if (record.to_start.empty()) return;
  if (record.phase != Phase::kLive) {
    for (int number : record.to_start) FailStart(*record.ranks[number], {"not started: " + record.reason});
    return record.to_start.clear();
  }
  record.cgroup.Create(GroupName(record), {0, record.begin.processes_max});
  std::vector<SpawnRequest> requests;
  for (int number : record.to_start) {
    RankProcess& rank = *record.ranks[number];
    requests.push_back({&rank.spec.argv, &rank.spec.env, rank.spec.cwd, rank.spec.cpus,
                        std::move(rank.out_write), std::move(rank.err_write),
                        rank.spec.memory_limit > 0 ? &rank.cgroup : nullptr, std::move(rank.in_read),
                        rank.spec.takes_input && rank.spec.tty});
  }
  auto starting = std::make_unique<Starting>();
  starting->generation = record.begin.generation;
  starting->ranks = std::move(record.to_start);
  record.to_start.clear();
  if (starting->batch.Start(std::move(requests), {"GTRAIN_KEEPER_SOCKET", rank_socket_}, &record.cgroup)) {
    starting_.push_back(std::move(starting));
    return;
  }
  const std::string why = std::string("cannot start a process: ") + strerror(errno);
  for (int number : starting->ranks) FailStart(*record.ranks[number], {why});
}

void Keeper::FailStart(RankProcess& rank, const FailureWords& words) {
  Exited exit;
  exit.generation = rank.spec.generation;
  exit.rank = rank.spec.rank;
  exit.pid = rank.pid;
  exit.cause = Cause::kStartFailed;
  exit.code = words.code;
  exit.message = words.message;
  exit.tail = words.detail;
  rank.exit = std::move(exit);
  rank.in.reset();
  rank.in_read.reset();
  rank.out_write.reset();
  rank.err_write.reset();
  RecordExit(rank);
}

void Keeper::TakeStarted() {
  for (auto& starting : starting_) {
    for (const SpawnResult& result : starting->batch.Take()) {
      if (!starting->console.empty()) {
        ConsoleStarted(starting->console, result);
      } else if (starting->helper != 0) {
        for (auto& helper : helpers_) {
          if (helper->id == starting->helper) HelperStarted(*helper, result);
        }
      } else if (result.index < starting->ranks.size()) {
        RankProcess* rank = FindRank(starting->generation, starting->ranks[result.index]);
        if (rank != nullptr) RankStarted(*rank, result);
      }
    }
  }
}

void Keeper::RankStarted(RankProcess& rank, const SpawnResult& result) {
  if (rank.exit) return;
  rank.pid = result.pid;
  rank.start_time = result.start_time;
  if (rank.pid > 0) rank_of_pid_[rank.pid] = {rank.spec.generation, rank.spec.rank};
  if (result.failure.stage != 0) {
    return FailStart(rank, DescribeFailure(result.failure, rank.spec.argv, rank.spec.env, rank.spec.cwd));
  }
  Tell(Started{rank.spec.generation, rank.spec.rank, rank.pid, rank.start_time});
  const GenerationRecord* record = FindGeneration(rank.spec.generation);
  std::vector<ProcessEntry> processes;
  if (record->phase != Phase::kLive && record->term_at_ms == 0) TermRank(rank, &processes);  // missed it
}

// Its results are all taken. What it did not come to was never started.
void Keeper::StarterDied(Starting& starting) {
  if (!starting.console.empty()) ConsoleNotStarted(starting.console);
  for (auto& helper : helpers_) {
    if (helper->id == starting.helper && helper->pid < 0) {
      std::string& text = helper->apart ? helper->err : helper->output;
      text = "the command was not started: the process that starts it was killed\n";
      HelperDied(*helper, CLD_KILLED, SIGKILL);
    }
  }
  for (int number : starting.ranks) {
    RankProcess* rank = FindRank(starting.generation, number);
    if (rank == nullptr || rank->exit || rank->pid > 0) continue;
    FailStart(*rank, {"not started: the process that starts ranks was killed"});
  }
}

// ---------------------------------------------------------------- exit

// Takes every zombie: ranks and helpers with their status recorded first, adopted orphans at once (fault
// P11).
void Keeper::Reap() {
  more_zombies_ = true;
  for (int i = 0; i < 4096; ++i) {
    siginfo_t info = {};
    more_zombies_ = waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0;
    if (!more_zombies_) break;
    if (!KnownDied(info)) {
      TakeStarted();  // it may be a rank whose start we have not read yet
      KnownDied(info);
    }
    siginfo_t done = {};
    waitid(P_PID, static_cast<id_t>(info.si_pid), &done, WEXITED | WNOHANG);
  }
  helpers_.erase(
      std::remove_if(helpers_.begin(), helpers_.end(), [](const auto& helper) { return helper->done; }),
      helpers_.end());
}

bool Keeper::KnownDied(const siginfo_t& info) {
  RankProcess* rank = nullptr;
  GenerationRecord* record = GenerationOfPid(info.si_pid, &rank);
  rank_of_pid_.erase(info.si_pid);
  if (record != nullptr) {
    RankDied(*record, *rank, info);
    return true;
  }
  if (WriterDied(info)) return true;
  for (auto& helper : helpers_) {
    if (helper->pid != info.si_pid) continue;
    HelperDied(*helper, info.si_code, info.si_status);
    return true;
  }
  if (ConsoleDied(info)) return true;
  for (auto it = starting_.begin(); it != starting_.end(); ++it) {
    if ((*it)->batch.pid() != info.si_pid) continue;
    TakeStarted();
    const std::unique_ptr<Starting> starting = std::move(*it);
    starting_.erase(it);
    StarterDied(*starting);
    return true;
  }
  return false;
}

void Keeper::RankDied(GenerationRecord& record, RankProcess& rank, const siginfo_t& info) {
  rank.out.Pump(now_, 16 << 20);  // what a dead process wrote is all in the pipe already
  rank.err.Pump(now_, 16 << 20);
  rank.drain_until_ms = now_ + kDrainMs;
  if (rank.exit) {  // failed to start: told already
    rank.pid = -1;
    ++record.ended;
    return;
  }
  rank.in.reset();
  HearLastWords(rank);
  Exited exit;
  Describe(record, rank, info, &exit);
  rank.exit = std::move(exit);
  rank.pid = -1;
  TailReport(record, rank);
  SendOutput(record.begin.generation, rank);
  RecordExit(rank);
}

// The kernel counts its kills by group; ranks without a limit share one.
bool Keeper::KilledByOom(GenerationRecord& record, RankProcess& rank) {
  if (rank.spec.memory_limit > 0) return rank.cgroup.OomKills() > 0;
  if (record.cgroup.OomKills() <= record.oom_kills) return false;
  ++record.oom_kills;
  return true;
}

void Keeper::Describe(GenerationRecord& record, RankProcess& rank, const siginfo_t& info, Exited* exit) {
  exit->generation = record.begin.generation;
  exit->rank = rank.spec.rank;
  exit->pid = rank.pid;
  exit->tail = rank.err.total() > 0 ? rank.err.LastBytes(kTailBytes) : rank.out.LastBytes(kTailBytes);
  const bool signalled = info.si_code != CLD_EXITED;
  const bool ours = record.ordered && record.phase != Phase::kLive;
  (signalled ? exit->signal : exit->code) = info.si_status;
  if (signalled && info.si_status == SIGKILL && KilledByOom(record, rank)) {
    exit->cause = Cause::kOom;
    exit->message = "killed by the kernel: out of memory";
    const std::string limit = Number(rank.spec.memory_limit >> 20) + " MiB";
    if (rank.spec.memory_limit > 0 && rank.cgroup.MetItsLimit()) {
      exit->message += " (limit " + limit + "; raise resources.memory)";
    } else if (rank.spec.memory_limit > 0) {
      exit->message +=
          " (below its limit of " + limit + ": the machine, or the container of its agent, has no more)";
    }
  } else if (signalled && ours && IsOrdinaryStopSignal(info.si_status)) {
    exit->cause = Cause::kStopped;
    exit->message = "ended by gtrain with " + SignalName(info.si_status) + ": " + record.reason;
  } else if (signalled) {
    exit->cause = Cause::kSignal;
    exit->message = "killed by " + SignalName(info.si_status);
  } else if (ours && info.si_status != 0 && info.si_status != 75) {
    exit->cause = Cause::kStopped;
    exit->message =
        "exited with code " + std::to_string(info.si_status) + " while it was ended: " + record.reason;
  } else {
    exit->cause = Cause::kExited;
    exit->message = "exited with code " + std::to_string(info.si_status);
  }
}

// One file a generation, appended to: a record that was cut off by the keeper's own death is not read.
void Keeper::RecordExit(RankProcess& rank) {
  GenerationRecord* record = FindGeneration(rank.spec.generation);
  ++record->unacked;
  if (rank.pid < 0) ++record->ended;
  std::string bytes;
  AppendFrame(Report(*rank.exit), &bytes);
  const std::string path = "exits/" + Number(rank.spec.generation);
  UniqueFd file(open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file.valid() || write(file.get(), bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) {
    fprintf(stderr, "gtrain-keeper: cannot write %s: %s\n", path.c_str(), strerror(errno));
  }
  Tell(*rank.exit);
}

// ---------------------------------------------------------------- streams

void Keeper::CloseDrained() {
  for (auto& [generation, record] : generations_) {
    for (auto& [number, rank] : record.ranks) {
      if (!rank->exit || now_ < rank->drain_until_ms || ItsGroupStillSaves(record, *rank)) continue;
      rank->out.Close(now_);  // a grandchild may hold the pipe for ever (fault P7)
      rank->err.Close(now_);
    }
  }
}

void Keeper::SendOutput() {
  for (auto& [generation, record] : generations_) {
    for (auto& [number, rank] : record.ranks) SendOutput(generation, *rank);
  }
}

void Keeper::SendOutput(uint64_t generation, RankProcess& rank) {
  if (!attached_) return;
  for (bool is_stderr : {false, true}) {
    LogStream& stream = is_stderr ? rank.err : rank.out;
    uint64_t& sent = is_stderr ? rank.err_sent : rank.out_sent;
    int& refused = is_stderr ? rank.err_refused : rank.out_refused;
    stream.LookAfter(now_);
    if ((stream.total() == sent && stream.refused() == refused) || agent_out_.size() > kAgentOutSoft)
      continue;
    const size_t fresh = static_cast<size_t>(std::min<uint64_t>(stream.total() - sent, kOutputFrameMax));
    sent = stream.total();
    refused = stream.refused();
    Tell(Output{generation, rank.spec.rank, is_stderr, stream.file_offset(), stream.dropped(),
                stream.LastBytes(fresh), refused});
  }
}

// One watch for the reports of all ranks, which lie in one folder. What a program writes through a mapping
// of the file, or another machine writes, wakes nobody (inotify(7)): it is read when something else does, the
// lease every ten seconds at the latest.
void Keeper::WatchReports(GenerationRecord& record) {
  reports_written_ = true;  // by a rank that was quicker than this
  if (!report_events_.valid()) return;
  record.reports_watch = inotify_add_watch(report_events_.get(),
                                           ("/proc/self/fd/" + std::to_string(record.reports.get())).c_str(),
                                           IN_CREATE | IN_MODIFY | IN_MOVED_TO);
}

void Keeper::TailReports() {
  char events[16 << 10];
  while (report_events_.valid() && read(report_events_.get(), events, sizeof(events)) > 0)
    reports_written_ = true;
  const bool all = std::exchange(reports_written_, false) || now_ - reports_read_ms_ >= kReportsMs;
  if (all) reports_read_ms_ = now_;
  for (auto& [generation, record] : generations_) {
    if (!all && record.reports_watch >= 0) continue;
    for (auto& [number, rank] : record.ranks) {
      if (!rank->exit || rank->report.valid()) TailReport(record, *rank);
    }
  }
}

// $GTRAIN_REPORT is an ordinary file that the program makes, so it never waits for its reader. What was
// forwarded becomes a hole.
void Keeper::TailReport(GenerationRecord& record, RankProcess& rank) {
  if (!rank.report.valid()) {
    const std::string name = rank.spec.report_path.substr(rank.spec.report_path.rfind('/') + 1);
    rank.report.reset(
        openat(record.reports.get(), name.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  }
  struct stat info;
  if (!rank.report.valid() || fstat(rank.report.get(), &info) != 0 || !S_ISREG(info.st_mode)) return;
  const uint64_t size = static_cast<uint64_t>(info.st_size);
  if (size < rank.report_offset) rank.report_offset = 0;  // the program truncated it
  if (size - rank.report_offset > kReportBacklogMax) rank.report_offset = size - kReportBacklogMax;
  char buffer[64 << 10];
  while (attached_ && rank.report_offset < size) {
    if (agent_out_.size() >= kAgentOutSoft) {
      reports_written_ = true;  // and not all was read
      break;
    }
    const ssize_t n =
        pread(rank.report.get(), buffer, sizeof(buffer), static_cast<off_t>(rank.report_offset));
    if (n <= 0) break;
    rank.report_offset += static_cast<uint64_t>(n);
    Tell(ReportBytes{record.begin.generation, rank.spec.rank, std::string(buffer, static_cast<size_t>(n))});
  }
  if (rank.report_offset - std::min(rank.report_offset, rank.report_punched) < kReportPunchStep) return;
  rank.report_punched = rank.report_offset & ~uint64_t{4095};
  fallocate(rank.report.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
            static_cast<off_t>(rank.report_punched));
}

// ---------------------------------------------------------------- helpers (gtrain exec)

void Keeper::Do(Exec& exec) {
  auto fail = [&](const std::string& why) { Tell(ExecDone{exec.id, false, 0, why}); };
  RankProcess* rank = FindRank(exec.generation, exec.rank);
  if (rank == nullptr || rank->exit)
    return fail("rank " + std::to_string(exec.rank) + " is not running here");
  if (exec.argv.empty()) return fail("no command was given");
  if (helpers_.size() >= kHelpersMax) {
    return fail(std::to_string(kHelpersMax) +
                " commands run beside the ranks of this job on this machine, the most there may be: wait or "
                "end some");
  }
  auto helper = std::make_unique<Helper>();
  UniqueFd write_end, err_end;
  if (!MakePipe(&helper->output_fd, &write_end) || (exec.apart && !MakePipe(&helper->err_fd, &err_end)))
    return fail(strerror(errno));
  SetNonBlocking(helper->output_fd.get());
  if (exec.apart) SetNonBlocking(helper->err_fd.get());
  helper->argv = exec.argv;
  helper->id = exec.id;
  helper->apart = exec.apart;
  helper->generation = exec.generation;
  helper->limit_ms = static_cast<int64_t>(std::clamp<uint64_t>(exec.timeout_ms, 1, 600000));
  helper->deadline_ms = now_ + helper->limit_ms;
  std::vector<SpawnRequest> requests;
  requests.push_back({&helper->argv, &rank->spec.env, rank->spec.cwd, rank->spec.cpus, std::move(write_end),
                      std::move(err_end)});
  auto starting = std::make_unique<Starting>();
  starting->generation = exec.generation;
  starting->helper = exec.id;
  if (!starting->batch.Start(std::move(requests), {"GTRAIN_KEEPER_SOCKET", rank_socket_}, nullptr)) {
    return fail(strerror(errno));
  }
  starting_.push_back(std::move(starting));
  helpers_.push_back(std::move(helper));
}

void Keeper::HelperStarted(Helper& helper, const SpawnResult& result) {
  helper.pid = result.pid;
  if (result.failure.stage == 0) return;
  std::string& text = helper.apart ? helper.err : helper.output;
  text = "cannot run " + helper.argv[0] + ": " + strerror(result.failure.error) + "\n";
}

void Keeper::PumpHelper(Helper& helper) {
  char buffer[64 << 10];
  for (auto [fd, text] :
       {std::pair{&helper.output_fd, &helper.output}, std::pair{&helper.err_fd, &helper.err}}) {
    for (int i = 0; i < 16 && fd->valid(); ++i) {
      const ssize_t n = read(fd->get(), buffer, sizeof(buffer));
      if (n < 0) break;
      if (n == 0) fd->reset();
      const size_t kept =
          std::min(kHelperOutputMax - std::min(kHelperOutputMax, text->size()), static_cast<size_t>(n));
      text->append(buffer, kept);
      helper.left_out += static_cast<size_t>(n) - kept;
    }
  }
  if (now_ > helper.deadline_ms && !helper.timed_out && helper.pid > 0) {
    helper.timed_out = true;
    kill(-helper.pid, SIGKILL);
    kill(helper.pid, SIGKILL);
  }
}

void Keeper::HelperDied(Helper& helper, int code, int status) {
  PumpHelper(helper);
  std::string& last = helper.apart ? helper.err : helper.output;
  if (helper.left_out > 0) {
    last += "\n[gtrain: " + Number(helper.left_out) + " bytes of output were left out: at most " +
            Number(kHelperOutputMax >> 10) + " KiB are kept]\n";
  }
  if (helper.timed_out) {
    last += "\n[gtrain: ended: it ran longer than its limit of " + std::to_string(helper.limit_ms) + " ms]\n";
  }
  Tell(ExecDone{helper.id, true, code == CLD_EXITED ? status : 128 + status, std::move(helper.output),
                std::move(helper.err), helper.timed_out});
  helper.pid = -1;
  helper.done = true;
}

// ---------------------------------------------------------------- the end of a generation

void Keeper::End_(GenerationRecord& record, End mode, int64_t grace_ms, const std::string& reason,
                  bool ordered) {
  if (record.phase == Phase::kWriting || record.phase == Phase::kGone) return;
  if (record.ordered && mode <= record.mode && record.phase != Phase::kLive) return;  // only ever harder
  const bool asked = record.ordered;
  record.ordered = ordered;
  record.mode = mode;
  record.reason = reason;
  record.kill_at_ms = now_ + (mode == End::kStopNow ? 0 : grace_ms);
  if (record.phase != Phase::kKilling) record.phase = Phase::kEnding;
  if (asked && mode == End::kStopNow) return;
  ToRanks(record, mode == End::kReform ? kKeeperRevoked : kKeeperStop, reason);
  const bool wait_for_sdk =
      mode == End::kStop;  // they were asked to save; the signal comes near the end of the grace
  record.term_at_ms = wait_for_sdk ? now_ + grace_ms - std::min<int64_t>(5000, grace_ms / 4) : 0;
  TermRanks(record, !wait_for_sdk);
}

void Keeper::TermRanks(GenerationRecord& record, bool also_sdk) {
  std::vector<ProcessEntry> processes;
  for (auto& [number, rank] : record.ranks) {
    if (rank->exit || rank->pid <= 0) continue;
    if (!also_sdk && ConnectionOf(record.begin.generation, number) != nullptr) continue;
    TermRank(*rank, &processes);
  }
}

// Once, however often and by whichever way a generation is ended: to many programs a second SIGTERM says not
// to save. The rank leads its process group, which therefore hears it whole; where there is no such group,
// the rank alone does. A shell may run its program in another group (`timeout`, `set -m`).
void Keeper::TermRank(RankProcess& rank, std::vector<ProcessEntry>* processes) {
  if (std::exchange(rank.termed, true)) return;
  for (const pid_t pid : HearersOf(rank.pid, SIGTERM, processes)) {
    ProcessEntry entry;
    if (pid == rank.pid || getpgid(pid) == rank.pid || !ReadProcess(pid, &entry)) continue;
    rank.apart.push_back(entry);
    kill(pid, SIGTERM);
  }
  if (kill(-rank.pid, SIGTERM) != 0) kill(rank.pid, SIGTERM);
}

void Keeper::AdvanceEnding(GenerationRecord& record) {
  if (record.phase == Phase::kGone) return;
  if (record.phase == Phase::kWriting) return AwaitLogs(record);
  const bool exited = record.ended == record.ranks.size();
  if (record.phase == Phase::kLive) {
    if (!exited || record.ranks.size() < record.begin.ranks || record.ranks.empty()) return;
    End_(record, End::kReform, kDrainMs, "all ranks have exited", false);
    record.ordered = false;
  }
  if (record.phase == Phase::kEnding) {
    if (record.term_at_ms != 0 && now_ >= record.term_at_ms) {
      record.term_at_ms = 0;
      TermRanks(record, true);
    }
    const auto drained = [&] {
      return std::none_of(record.ranks.begin(), record.ranks.end(), [&record](const auto& item) {
        return item.second->out.alive() || item.second->err.alive() ||
               ItsGroupStillSaves(record, *item.second);
      });
    };
    const bool hurry = record.ordered && record.mode != End::kStop;
    if (now_ < record.kill_at_ms && !(exited && (hurry || drained()))) return;
    record.phase = Phase::kKilling;
    record.give_up_ms = now_ + kGiveUpMs;
  }
  KillLeftovers(record);
}

// Whose is a descendant? Its ancestor just below us is a rank or a helper, or an orphan that carries our
// environment.
bool Keeper::Owns(const GenerationRecord& record, pid_t pid, pid_t top) {
  RankProcess* rank = nullptr;
  if (const GenerationRecord* other = GenerationOfPid(top, &rank)) return other == &record;
  for (const WriterProcess& writer : writers_) {
    if (writer.pid == top) return false;  // of no generation
  }
  for (const auto& helper : helpers_) {
    if (helper->pid == top) return helper->generation == record.begin.generation;
  }
  for (const auto& console : consoles_) {
    if (console->pid == top) return console->generation == record.begin.generation;
  }
  for (const auto& starting : starting_) {
    if (starting->batch.pid() == top) return starting->generation == record.begin.generation;
  }
  const auto live = std::count_if(generations_.begin(), generations_.end(),
                                  [](const auto& item) { return item.second.phase < Phase::kWriting; });
  if (live <= 1) return true;
  const std::string generation = ProcessEnvironment(pid, "GTRAIN_GENERATION");
  return generation.empty() || generation == Number(record.begin.generation);
}

void Keeper::KillLeftovers(GenerationRecord& record) {
  const auto exited = [&record] { return record.ended == record.ranks.size(); };
  if (exited() && NoChildren()) return FinishGeneration(record, true, "");
  if (now_ < record.next_scan_ms) return;
  record.next_scan_ms = now_ + kScanEveryMs;
  record.cgroup.Kill();
  for (auto& [number, rank] : record.ranks) rank->cgroup.Kill();
  size_t left = 0;
  std::string names;
  const std::vector<Descendant> living = LivingDescendants(getpid());
  TakeStarted();  // whose starter has ended: a rank that nobody knows yet would be taken for anybody's
  for (const Descendant& found : living) {
    if (!Owns(record, found.process.pid, found.top)) continue;
    ++left;
    if (left <= 5) names += " " + std::to_string(found.process.pid);
    SignalProcess(found.process, SIGKILL);
  }
  Reap();
  if (left == 0 && exited()) return FinishGeneration(record, true, "");
  if (now_ < record.give_up_ms) return;
  FinishGeneration(record, false,
                   Number(left) + " processes survived SIGKILL for " + Number(kGiveUpMs / 1000) +
                       " s (uninterruptible sleep?): pids" + names);
}

void Keeper::FinishGeneration(GenerationRecord& record, bool clean, const std::string& message) {
  record.phase = Phase::kWriting;
  record.written_by_ms = now_ + (clean ? kLogsMs : kUncleanLogsMs);
  record.clean = clean;
  record.gone_message = message;
  for (auto& [number, rank] : record.ranks) {
    rank->out.Pump(now_, 16 << 20);
    rank->err.Pump(now_, 16 << 20);
    rank->out.Close(now_);
    rank->err.Close(now_);
    rank->cgroup.Remove();  // what the rank said stays until the generation is forgotten
  }
  record.cgroup.Remove();
  for (auto& connection : connections_) {
    if (connection->rank >= 0 && connection->generation == record.begin.generation) connection->broken = true;
  }
  record.arenas.clear();
  TailReports();
  SendOutput();
  for (auto& [number, rank] : record.ranks) rank->report.reset();
  record.reports.reset();
  AwaitLogs(record);
}

void Keeper::AwaitLogs(GenerationRecord& record) {
  if (!log_writer_.Idle() && now_ < record.written_by_ms) return;
  for (auto& [number, rank] : record.ranks)
    SendOutput(record.begin.generation, *rank);  // the disk's last word
  record.phase = Phase::kGone;
  Tell(Gone{record.begin.generation, record.clean, record.gone_message});
}

}  // namespace gtrain::keeper
