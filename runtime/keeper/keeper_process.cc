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
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <set>

#include "runtime/keeper/agent_protocol.h"
#include "runtime/keeper/keeper.h"
#include "runtime/keeper/posix.h"

namespace gtrain::keeper {

namespace {

constexpr int64_t kDrainMs = 2000;
constexpr int64_t kGiveUpMs = 10000;
constexpr int64_t kScanEveryMs = 15;
constexpr size_t kOutputFrameMax = 64u << 10;
constexpr size_t kAgentOutSoft = 1u << 20;  // beyond this, output waits: it is in the file anyway
constexpr uint64_t kReportBacklogMax = 16u << 20;
constexpr uint64_t kReportPunchStep = 1u << 20;
constexpr size_t kHelperOutputMax = 1u << 20;

std::string Number(uint64_t value) { return std::to_string(value); }

bool IsOrdinaryStopSignal(int signal) { return signal == SIGTERM || signal == SIGKILL || signal == SIGINT; }

}  // namespace

// ---------------------------------------------------------------- start

void Keeper::StartProcess(GenerationRecord& record, RankProcess& rank) {
  const StartRank& spec = rank.spec;
  if (spec.argv.empty()) return FailStart(rank, "the command is empty", 127);
  for (auto [stream, path] : {std::pair{&rank.out, &spec.out_path}, std::pair{&rank.err, &spec.err_path}}) {
    if (!stream->Open(*path, options_.log_limits, now_)) {
      return FailStart(rank, "cannot open the log file " + *path + ": " + strerror(errno), 126);
    }
  }
  if (!spec.report_path.empty()) {
    rank.report.reset(
        open(spec.report_path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644));
  }
  rank.cgroup.Create(Number(static_cast<uint64_t>(getpid())) + "-" + Number(record.begin.generation) + "-" +
                         Number(static_cast<uint64_t>(spec.rank)),
                     spec.memory_limit);
  const UniqueFd out = rank.out.TakeWriteEnd(), err = rank.err.TakeWriteEnd();
  SpawnRequest request{&spec.argv, &spec.env,   {{"GTRAIN_KEEPER_SOCKET", rank_socket_}},
                       spec.cwd,   spec.cpus,   out.get(),
                       err.get(),  &rank.cgroup};
  Spawned spawned = Spawn(request);
  if (spawned.pid < 0) {
    return FailStart(rank, std::string("cannot start a process: ") + strerror(spawned.error), 126);
  }
  rank.pid = spawned.pid;
  rank.pidfd = std::move(spawned.pidfd);
  rank.status = std::move(spawned.status);
  ProcessEntry entry;
  if (ReadProcess(rank.pid, &entry)) rank.start_time = entry.start_time;
}

void Keeper::FailStart(RankProcess& rank, const std::string& message, int code) {
  Exited exit;
  exit.generation = rank.spec.generation;
  exit.rank = rank.spec.rank;
  exit.pid = rank.pid;
  exit.cause = Cause::kStartFailed;
  exit.code = code;
  exit.message = message;
  rank.exit = std::move(exit);
  rank.status.reset();
  RecordExit(rank);
}

// Has exec happened? End of file on the status pipe says yes.
void Keeper::CheckSpawn(RankProcess& rank) {
  if (!rank.status.valid() || rank.exit) return;
  SpawnFailure failure;
  const ssize_t n = read(rank.status.get(), &failure, sizeof(failure));
  if (n < 0) return;
  if (n == 0) {
    rank.status.reset();
    Tell(Started{rank.spec.generation, rank.spec.rank, rank.pid, rank.start_time});
    return;
  }
  SpawnRequest request;
  request.argv = &rank.spec.argv;
  request.env = &rank.spec.env;
  request.cwd = rank.spec.cwd;
  int code = 0;
  const std::string message = DescribeFailure(failure, request, &code);
  FailStart(rank, message, code);
}

// ---------------------------------------------------------------- exit

// Takes every zombie: ranks and helpers with their status recorded first, adopted orphans at once (fault
// P11).
void Keeper::Reap() {
  for (auto& [generation, record] : generations_) {
    for (auto& [number, rank] : record.ranks) CheckSpawn(*rank);
  }
  for (int i = 0; i < 4096; ++i) {
    siginfo_t info = {};
    if (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) break;
    for (auto& [generation, record] : generations_) {
      for (auto& [number, rank] : record.ranks) {
        if (rank->pid == info.si_pid) RankDied(record, *rank, info);
      }
    }
    for (auto& helper : helpers_) {
      if (helper->pid == info.si_pid) HelperDied(*helper, info.si_code, info.si_status);
    }
    siginfo_t done = {};
    waitid(P_PID, static_cast<id_t>(info.si_pid), &done, WEXITED | WNOHANG);
  }
  helpers_.erase(
      std::remove_if(helpers_.begin(), helpers_.end(), [](const auto& helper) { return helper->pid < 0; }),
      helpers_.end());
}

void Keeper::RankDied(GenerationRecord& record, RankProcess& rank, const siginfo_t& info) {
  CheckSpawn(rank);
  rank.out.Pump(now_, 16 << 20);  // what a dead process wrote is all in the pipe already
  rank.err.Pump(now_, 16 << 20);
  rank.drain_until_ms = now_ + kDrainMs;
  if (rank.exit) {  // failed to start: told already
    rank.pid = -1;
    return;
  }
  Exited exit;
  Describe(record, rank, info, &exit);
  rank.exit = std::move(exit);
  rank.pid = -1;
  rank.pidfd.reset();
  TailReports();
  SendOutput();
  RecordExit(rank);
}

void Keeper::Describe(GenerationRecord& record, RankProcess& rank, const siginfo_t& info, Exited* exit) {
  exit->generation = record.begin.generation;
  exit->rank = rank.spec.rank;
  exit->pid = rank.pid;
  exit->tail = rank.err.total() > 0 ? rank.err.LastBytes(kTailBytes) : rank.out.LastBytes(kTailBytes);
  const bool signalled = info.si_code != CLD_EXITED;
  const bool ours = record.ordered && record.phase != Phase::kLive;
  (signalled ? exit->signal : exit->code) = info.si_status;
  if (signalled && info.si_status == SIGKILL && rank.cgroup.OomKills() > 0) {
    exit->cause = Cause::kOom;
    exit->message = "killed by the kernel: out of memory";
    if (rank.spec.memory_limit > 0) {
      exit->message += " (limit " + Number(rank.spec.memory_limit >> 20) + " MiB; raise resources.memory)";
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

void Keeper::RecordExit(RankProcess& rank) {
  std::string bytes;
  AppendFrame(Report(*rank.exit), &bytes);
  WriteFileAtomic("exits/" + Number(rank.spec.generation) + "-" + std::to_string(rank.spec.rank), bytes);
  Tell(*rank.exit);
}

// ---------------------------------------------------------------- streams

void Keeper::PumpStreams() {
  for (auto& [generation, record] : generations_) {
    for (auto& [number, rank] : record.ranks) {
      rank->out.Pump(now_);
      rank->err.Pump(now_);
      if (rank->exit && now_ >= rank->drain_until_ms) {  // a grandchild may hold the pipe for ever (fault P7)
        rank->out.Close(now_);
        rank->err.Close(now_);
      }
    }
  }
  for (auto& helper : helpers_) PumpHelper(*helper);
}

void Keeper::SendOutput() {
  if (!attached_) return;
  for (auto& [generation, record] : generations_) {
    for (auto& [number, rank] : record.ranks) {
      for (bool is_stderr : {false, true}) {
        const LogStream& stream = is_stderr ? rank->err : rank->out;
        uint64_t& sent = is_stderr ? rank->err_sent : rank->out_sent;
        if (stream.total() == sent || agent_out_.size() > kAgentOutSoft) continue;
        const size_t fresh = static_cast<size_t>(std::min<uint64_t>(stream.total() - sent, kOutputFrameMax));
        sent = stream.total();
        Tell(Output{generation, number, is_stderr, stream.file_offset(), stream.dropped(),
                    stream.LastBytes(fresh)});
      }
    }
  }
}

// $GTRAIN_REPORT is an ordinary file, so a rank never waits for its reader. What was forwarded becomes a
// hole.
void Keeper::TailReports() {
  if (!attached_ && last_tick_ms_ % 1000 >= 100) return;
  for (auto& [generation, record] : generations_) {
    for (auto& [number, rank] : record.ranks) {
      struct stat info;
      if (!rank->report.valid() || fstat(rank->report.get(), &info) != 0) continue;
      const uint64_t size = static_cast<uint64_t>(info.st_size);
      if (size < rank->report_offset) rank->report_offset = 0;  // the program truncated it
      if (size - rank->report_offset > kReportBacklogMax) rank->report_offset = size - kReportBacklogMax;
      char buffer[64 << 10];
      while (attached_ && rank->report_offset < size && agent_out_.size() < kAgentOutSoft) {
        const ssize_t n =
            pread(rank->report.get(), buffer, sizeof(buffer), static_cast<off_t>(rank->report_offset));
        if (n <= 0) break;
        rank->report_offset += static_cast<uint64_t>(n);
        Tell(ReportBytes{generation, number, std::string(buffer, static_cast<size_t>(n))});
      }
      if (rank->report_offset - std::min(rank->report_offset, rank->report_punched) >= kReportPunchStep) {
        rank->report_punched = rank->report_offset & ~uint64_t{4095};
        fallocate(rank->report.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                  static_cast<off_t>(rank->report_punched));
      }
    }
  }
}

// ---------------------------------------------------------------- helpers (gtrain exec)

void Keeper::Do(Exec& exec) {
  auto fail = [&](const std::string& why) { Tell(ExecDone{exec.id, false, 0, why}); };
  RankProcess* rank = FindRank(exec.generation, exec.rank);
  if (rank == nullptr || rank->exit)
    return fail("rank " + std::to_string(exec.rank) + " is not running here");
  if (exec.argv.empty() || helpers_.size() >= 16) return fail("no command, or too many helpers at once");
  auto helper = std::make_unique<Helper>();
  UniqueFd write_end;
  if (!MakePipe(&helper->output_fd, &write_end)) return fail(strerror(errno));
  SetNonBlocking(helper->output_fd.get());
  helper->argv = exec.argv;
  SpawnRequest request{&helper->argv,   &rank->spec.env, {{"GTRAIN_KEEPER_SOCKET", rank_socket_}},
                       rank->spec.cwd,  rank->spec.cpus, write_end.get(),
                       write_end.get(), nullptr};
  Spawned spawned = Spawn(request);
  if (spawned.pid < 0) return fail(strerror(spawned.error));
  helper->id = exec.id;
  helper->generation = exec.generation;
  helper->pid = spawned.pid;
  helper->pidfd = std::move(spawned.pidfd);
  helper->status = std::move(spawned.status);
  helper->deadline_ms = now_ + static_cast<int64_t>(std::clamp<uint64_t>(exec.timeout_ms, 1, 600000));
  helpers_.push_back(std::move(helper));
}

void Keeper::PumpHelper(Helper& helper) {
  SpawnFailure failure;
  if (helper.status.valid()) {
    const ssize_t n = read(helper.status.get(), &failure, sizeof(failure));
    if (n > 0) helper.output = "cannot run " + helper.argv[0] + ": " + strerror(failure.error);
    if (n >= 0) helper.status.reset();
  }
  char buffer[64 << 10];
  for (int i = 0; i < 16 && helper.output_fd.valid(); ++i) {
    const ssize_t n = read(helper.output_fd.get(), buffer, sizeof(buffer));
    if (n < 0) break;
    if (n == 0) helper.output_fd.reset();
    const size_t room = kHelperOutputMax - std::min(kHelperOutputMax, helper.output.size());
    helper.output.append(buffer, std::min(room, static_cast<size_t>(std::max<ssize_t>(n, 0))));
  }
  if (now_ > helper.deadline_ms && !helper.timed_out) {
    helper.timed_out = true;
    kill(-helper.pid, SIGKILL);
    PidfdSignal(helper.pidfd.get(), SIGKILL);
  }
}

void Keeper::HelperDied(Helper& helper, int code, int status) {
  PumpHelper(helper);
  if (helper.timed_out) helper.output += "\n[gtrain: ended: it ran longer than its limit]\n";
  Tell(ExecDone{helper.id, true, code == CLD_EXITED ? status : 128 + status, std::move(helper.output)});
  helper.pid = -1;
}

// ---------------------------------------------------------------- the end of a generation

void Keeper::End_(GenerationRecord& record, End mode, int64_t grace_ms, const std::string& reason,
                  bool ordered) {
  if (record.phase == Phase::kGone) return;
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
  for (auto& [number, rank] : record.ranks) {
    if (rank->exit || rank->pid <= 0) continue;
    if (!also_sdk && ConnectionOf(record.begin.generation, number) != nullptr) continue;
    kill(-rank->pid, SIGTERM);  // its process group; before its setsid there is none, so also:
    PidfdSignal(rank->pidfd.get(), SIGTERM);
  }
}

void Keeper::AdvanceEnding(GenerationRecord& record) {
  if (record.phase == Phase::kGone) return;
  bool exited = true, drained = true;
  for (auto& [number, rank] : record.ranks) {
    exited = exited && rank->exit && rank->pid < 0;
    drained = drained && !rank->out.alive() && !rank->err.alive();
  }
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
    const bool hurry = record.ordered && record.mode != End::kStop;
    if (!(exited && (drained || hurry)) && now_ < record.kill_at_ms) return;
    record.phase = Phase::kKilling;
    record.give_up_ms = now_ + kGiveUpMs;
  }
  KillLeftovers(record);
}

// Whose is a descendant? Its ancestor just below us is a rank or a helper, or an orphan that carries our
// environment.
bool Keeper::Owns(const GenerationRecord& record, pid_t pid, pid_t top) const {
  for (const auto& [generation, other] : generations_) {
    for (const auto& [number, rank] : other.ranks) {
      if (rank->pid == top) return &other == &record;
    }
  }
  for (const auto& helper : helpers_) {
    if (helper->pid == top) return helper->generation == record.begin.generation;
  }
  const auto live = std::count_if(generations_.begin(), generations_.end(),
                                  [](const auto& item) { return item.second.phase != Phase::kGone; });
  if (live <= 1) return true;
  const std::string generation = ProcessEnvironment(pid, "GTRAIN_GENERATION");
  return generation.empty() || generation == Number(record.begin.generation);
}

void Keeper::KillLeftovers(GenerationRecord& record) {
  if (now_ < record.next_scan_ms) return;
  record.next_scan_ms = now_ + kScanEveryMs;
  for (auto& [number, rank] : record.ranks) rank->cgroup.Kill();
  size_t left = 0;
  std::string names;
  for (const Descendant& found : LivingDescendants(getpid())) {
    if (!Owns(record, found.process.pid, found.top)) continue;
    ++left;
    if (left <= 5) names += " " + std::to_string(found.process.pid);
    SignalProcess(found.process, SIGKILL);
  }
  Reap();
  bool exited = true;
  for (auto& [number, rank] : record.ranks) exited = exited && rank->exit && rank->pid < 0;
  if (left == 0 && exited) return FinishGeneration(record, true, "");
  if (now_ < record.give_up_ms) return;
  FinishGeneration(record, false,
                   Number(left) + " processes survived SIGKILL for " + Number(kGiveUpMs / 1000) +
                       " s (uninterruptible sleep?): pids" + names);
}

void Keeper::FinishGeneration(GenerationRecord& record, bool clean, const std::string& message) {
  record.phase = Phase::kGone;
  record.clean = clean;
  record.gone_message = message;
  for (auto& [number, rank] : record.ranks) {
    rank->out.Pump(now_, 16 << 20);
    rank->err.Pump(now_, 16 << 20);
    rank->out.Close(now_);
    rank->err.Close(now_);
    rank->cgroup.Remove();
    rank->relays.clear();
  }
  for (auto& connection : connections_) {
    if (connection->rank >= 0 && connection->generation == record.begin.generation) connection->broken = true;
  }
  record.arenas.clear();
  TailReports();
  SendOutput();
  for (auto& [number, rank] : record.ranks) rank->report.reset();
  Tell(Gone{record.begin.generation, clean, message});
}

}  // namespace gtrain::keeper
