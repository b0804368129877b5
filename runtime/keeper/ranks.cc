#include "runtime/keeper/ranks.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <utility>
#include <vector>

#include "runtime/keeper/agent_protocol.h"

namespace gtrain::keeper {

namespace {

bool IsOrdinaryStopSignal(int signal) { return signal == SIGTERM || signal == SIGKILL || signal == SIGINT; }

std::string GroupName(const GenerationRecord& record) {
  return std::to_string(getpid()) + "-" + std::to_string(record.begin.generation);
}

// The kernel counts its kills by group; ranks without a limit share one.
bool KilledByOom(const RankProcess& rank) {
  if (rank.spec.memory_limit > 0) return rank.cgroup.OomKills() > 0;
  if (rank.group == nullptr || rank.group->cgroup.OomKills() <= rank.group->oom_kills) return false;
  ++rank.group->oom_kills;
  return true;
}

std::string DescribeOom(const RankProcess& rank) {
  const std::string text = "killed by the kernel: out of memory";
  if (rank.spec.memory_limit == 0) return text;
  const std::string limit = std::to_string(rank.spec.memory_limit >> 20) + " MiB";
  if (rank.cgroup.MetItsLimit()) return text + " (limit " + limit + "; raise resources.memory)";
  return text + " (below its limit of " + limit +
         ": the machine, or the container of its agent, has no more)";
}

// Of a generation that is being ended most exits are what gtrain did.
Exited DescribeExit(const GenerationRecord& record, const RankProcess& rank, const siginfo_t& info) {
  Exited exit = DescribeDeath(rank, info);
  if (!record.ordered || record.phase == Phase::kLive) return exit;
  if (exit.cause == Cause::kSignal && IsOrdinaryStopSignal(exit.signal)) {
    exit.cause = Cause::kStopped;
    exit.message = "ended by gtrain with " + SignalName(exit.signal) + ": " + record.reason;
  } else if (exit.cause == Cause::kExited && exit.code != 0 && exit.code != 75) {
    exit.cause = Cause::kStopped;
    exit.message = "exited with code " + std::to_string(exit.code) + " while it was ended: " + record.reason;
  }
  return exit;
}

}  // namespace

std::vector<int32_t> CpusOf(pid_t pid) {
  cpu_set_t set;
  std::vector<int32_t> cpus;
  if (sched_getaffinity(pid, sizeof(set), &set) != 0) return cpus;
  for (int32_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(static_cast<size_t>(cpu), &set)) cpus.push_back(cpu);
  }
  return cpus;
}

Exited DescribeDeath(const RankProcess& rank, const siginfo_t& info) {
  Exited exit;
  exit.generation = rank.spec.generation;
  exit.rank = rank.spec.rank;
  exit.pid = rank.pid;
  exit.tail = rank.err.total() > 0 ? rank.err.LastBytes(kTailBytes) : rank.out.LastBytes(kTailBytes);
  const bool signalled = info.si_code != CLD_EXITED;
  (signalled ? exit.signal : exit.code) = info.si_status;
  if (signalled && info.si_status == SIGKILL && KilledByOom(rank)) {
    exit.cause = Cause::kOom;
    exit.message = DescribeOom(rank);
  } else if (signalled) {
    exit.cause = Cause::kSignal;
    exit.message = "killed by " + SignalName(info.si_status);
  } else {
    exit.cause = Cause::kExited;
    exit.message = "exited with code " + std::to_string(info.si_status);
  }
  return exit;
}

void Ranks::Prepare(GenerationRecord& record, RankProcess& rank) {
  const StartRank& spec = rank.spec;
  if (spec.argv.empty()) return FailStart(rank, {"the command is empty", "", 127});
  for (auto [stream, path] : {std::pair{&rank.out, &spec.out_path}, std::pair{&rank.err, &spec.err_path}}) {
    Terminal terminal = Terminal::kNone;
    if (spec.tty && stream == &rank.out) terminal = spec.takes_input ? Terminal::kWhole : Terminal::kRaw;
    if (outputs_.OpenStream(*stream, *path, terminal)) continue;
    return FailStart(
        rank, {"cannot open the log file " + *path +
               (terminal != Terminal::kNone ? ", or a terminal for it" : "") + ": " + strerror(errno)});
  }
  outputs_.OpenReport(record, rank);
  if (spec.memory_limit > 0) {
    rank.cgroup.Create(GroupName(record) + "-" + std::to_string(static_cast<uint64_t>(spec.rank)),
                       {spec.memory_limit, record.begin.processes_max});
  }
  rank.out_write = rank.out.TakeWriteEnd();
  rank.err_write = rank.err.TakeWriteEnd();
  if (spec.takes_input && !PrepareInput(rank))
    return FailStart(rank, {std::string("cannot make its stdin: ") + strerror(errno)});
  record.to_start.push_back(spec.rank);
}

bool Ranks::PrepareInput(RankProcess& rank) {
  rank.in_heard_ms = context_.now_ms;
  if (!rank.spec.tty) return MakePipe(&rank.in_read, &rank.in) && SetNonBlocking(rank.in.get());
  rank.in = rank.out.OpenKeyboard();
  rank.in_read.reset(fcntl(rank.out_write.get(), F_DUPFD_CLOEXEC, 0));
  rank.err_write.reset();  // all three are the terminal
  return rank.in.valid() && rank.in_read.valid();
}

void Ranks::StartPrepared(GenerationRecord& record) {
  const std::vector<int> numbers = std::exchange(record.to_start, {});
  if (numbers.empty()) return;
  if (record.phase != Phase::kLive) {
    for (int number : numbers) FailStart(*record.ranks[number], {"not started: " + record.reason});
    return;
  }
  record.group->cgroup.Create(GroupName(record), {0, record.begin.processes_max});
  std::vector<SpawnRequest> requests;
  for (int number : numbers) {
    RankProcess& rank = *record.ranks[number];
    rank.group = record.group;
    requests.push_back({&rank.spec.argv, &rank.spec.env, rank.spec.cwd, rank.spec.cpus,
                        std::move(rank.out_write), std::move(rank.err_write),
                        rank.spec.memory_limit > 0 ? &rank.cgroup : nullptr, std::move(rank.in_read),
                        rank.spec.takes_input && rank.spec.tty});
  }
  const uint64_t generation = record.begin.generation;
  const auto started = [this, generation, numbers](const SpawnResult& result) {
    if (result.index >= numbers.size()) return;
    RankProcess* rank = context_.generations.FindRank(generation, numbers[result.index]);
    if (rank != nullptr) OnStarted(*rank, result);
  };
  const auto starter_died = [this, generation, numbers] { OnStarterDied(generation, numbers); };
  if (children_.Start(generation, std::move(requests), &record.group->cgroup, started, starter_died)) return;
  const std::string why = std::string("cannot start a process: ") + strerror(errno);
  for (int number : numbers) FailStart(*record.ranks[number], {why});
}

void Ranks::FailStart(RankProcess& rank, const FailureWords& words) {
  Exited exit;
  exit.pid = rank.pid;
  exit.cause = Cause::kStartFailed;
  exit.code = words.code;
  exit.message = words.message;
  exit.tail = words.detail;
  NeverRuns(rank, std::move(exit));
}

void Ranks::NeverRuns(RankProcess& rank, Exited exit) {
  exit.generation = rank.spec.generation;
  exit.rank = rank.spec.rank;
  rank.exit = std::move(exit);
  rank.in.reset();
  rank.in_read.reset();
  rank.out_write.reset();
  rank.err_write.reset();
  RecordExit(rank);
}

void Ranks::OnStarted(RankProcess& rank, const SpawnResult& result) {
  if (rank.exit) return;
  rank.pid = result.pid;
  rank.start_time = result.start_time;
  if (rank.pid > 0) rank_of_pid_[rank.pid] = {rank.spec.generation, rank.spec.rank};
  if (result.failure.stage != 0) {
    return FailStart(rank, DescribeFailure(result.failure, rank.spec.argv, rank.spec.env, rank.spec.cwd));
  }
  context_.agent.Tell(Started{rank.spec.generation, rank.spec.rank, rank.pid, rank.start_time,
                              result.not_as_bound ? CpusOf(rank.pid) : std::vector<int32_t>()});
  const GenerationRecord* record = context_.generations.Find(rank.spec.generation);
  std::vector<ProcessEntry> processes;
  if (record->phase != Phase::kLive && record->term_at_ms == 0) Term(rank, &processes);  // missed it
}

// Its results are all taken. A rank that it did not come to was never started.
void Ranks::OnStarterDied(uint64_t generation, const std::vector<int>& ranks) {
  for (int number : ranks) {
    RankProcess* rank = context_.generations.FindRank(generation, number);
    if (rank == nullptr || rank->exit || rank->pid > 0) continue;
    FailStart(*rank, {"not started: the process that starts ranks was killed"});
  }
}

// Once, however often and by whichever way a generation is ended: to many programs a second SIGTERM says not
// to save. The rank leads its process group, which therefore hears it whole; where there is no such group,
// the rank alone does. A shell may run its program in another group (`timeout`, `set -m`).
void Ranks::Term(RankProcess& rank, std::vector<ProcessEntry>* processes) {
  if (std::exchange(rank.termed, true)) return;
  for (const pid_t pid : HearersOf(rank.pid, SIGTERM, processes)) {
    ProcessEntry entry;
    if (pid == rank.pid || getpgid(pid) == rank.pid || !ReadProcess(pid, &entry)) continue;
    rank.apart.push_back(entry);
    kill(pid, SIGTERM);
  }
  if (kill(-rank.pid, SIGTERM) != 0) kill(rank.pid, SIGTERM);
}

// nullptr: it is no rank of ours. A forgotten generation may have left a process that nothing could kill.
GenerationRecord* Ranks::Find(pid_t pid, RankProcess** rank) {
  const auto it = rank_of_pid_.find(pid);
  if (it == rank_of_pid_.end()) return nullptr;
  const auto [generation, number] = it->second;
  *rank = context_.generations.FindRank(generation, number);
  return *rank != nullptr && (*rank)->pid == pid ? context_.generations.Find(generation) : nullptr;
}

std::optional<uint64_t> Ranks::GenerationOf(pid_t child) {
  RankProcess* rank = nullptr;
  const GenerationRecord* record = Find(child, &rank);
  return record == nullptr ? std::nullopt : std::optional(record->begin.generation);
}

bool Ranks::OnDied(const siginfo_t& info) {
  RankProcess* rank = nullptr;
  GenerationRecord* record = Find(info.si_pid, &rank);
  rank_of_pid_.erase(info.si_pid);
  if (record == nullptr) return false;
  Exit(*record, *rank, info);
  return true;
}

void Ranks::Exit(GenerationRecord& record, RankProcess& rank, const siginfo_t& info) {
  rank.out.Pump(context_.now_ms, 16 << 20);  // all that a dead process wrote is in the pipe already
  rank.err.Pump(context_.now_ms, 16 << 20);
  rank.drain_until_ms = context_.now_ms + kDrainMs;
  if (rank.exit) {  // failed to start: told already
    rank.pid = -1;
    ++record.ended;
    return;
  }
  rank.in.reset();
  socket_.HearLastWords(rank);
  rank.exit = DescribeExit(record, rank, info);
  rank.pid = -1;
  outputs_.TailReport(record, rank);
  outputs_.Send(record.begin.generation, rank);
  RecordExit(rank);
}

// One file a generation, appended to: a record that was cut off by the keeper's own death is not read.
void Ranks::RecordExit(RankProcess& rank) {
  GenerationRecord* record = context_.generations.Find(rank.spec.generation);
  ++record->unacked;
  if (rank.pid < 0) ++record->ended;
  std::string bytes;
  AppendFrame(Report(*rank.exit), &bytes);
  const std::string path = "exits/" + std::to_string(rank.spec.generation);
  UniqueFd file(open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file.valid() || write(file.get(), bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) {
    fprintf(stderr, "gtrain-keeper: cannot write %s: %s\n", path.c_str(), strerror(errno));
  }
  context_.agent.Tell(*rank.exit);
}

}  // namespace gtrain::keeper
