#include "runtime/keeper/kept_ranks.h"

#include <dirent.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <utility>

#include "runtime/keeper/posix.h"
#include "runtime/keeper/rank_protocol.h"
#include "runtime/keeper/ranks.h"

namespace gtrain::keeper {

namespace {

constexpr int64_t kLooksMax = 10;  // at how long they have waited, in the longest time that they may

// The body of kKeeperMember.
std::string Environment(const StartRank& start) {
  std::string text;
  for (const auto& [name, value] : start.env) {
    text += name + "=" + value;
    text.push_back('\0');
  }
  return text;
}

// What of the order to start a process holds for one that runs already: it has its program, its terminal and
// its limits, and the files whose names it read from its environment.
void TakeOver(StartRank& spec, StartRank& start) {
  spec.generation = start.generation;
  spec.rank = start.rank;
  spec.token = std::move(start.token);
  spec.env = std::move(start.env);
  spec.out_path = std::move(start.out_path);
  spec.err_path = std::move(start.err_path);
  spec.cpus = std::move(start.cpus);
  spec.waits = start.waits;
}

// By a signal (SIGSTOP): what it is told it hears when another one lets it go on.
bool IsStopped(pid_t pid) {
  ProcessEntry process;
  return ReadProcess(pid, &process) && process.stopped;
}

// Its threads run where its new place is; where that is bound to nothing, where the keeper itself may.
// Returns where the kernel lets it run, if it is bound and that is elsewhere.
std::vector<int32_t> BindThreads(pid_t pid, const std::vector<int32_t>& cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int32_t cpu : cpus) {
    if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(static_cast<size_t>(cpu), &set);
  }
  if (cpus.empty() && sched_getaffinity(0, sizeof(set), &set) != 0) return {};
  const std::string tasks = "/proc/" + std::to_string(pid) + "/task";
  DIR* const folder = opendir(tasks.c_str());
  if (folder == nullptr) return {};
  while (const dirent* entry = readdir(folder)) {
    const int thread = atoi(entry->d_name);
    if (thread > 0) sched_setaffinity(thread, sizeof(set), &set);
  }
  closedir(folder);
  cpu_set_t got;
  const bool as_bound =
      cpus.empty() || (sched_getaffinity(pid, sizeof(got), &got) == 0 && CPU_EQUAL(&set, &got));
  return as_bound ? std::vector<int32_t>() : CpusOf(pid);
}

}  // namespace

void KeptRanks::Take(GenerationRecord& record) {
  const uint64_t generation = record.begin.generation;
  for (auto it = record.ranks.begin(); it != record.ranks.end();) {
    RankProcess& rank = *it->second;
    if (rank.exit || !rank.LetsGo()) {
      ++it;
      continue;
    }
    const int number = next_++;
    connections_.Rename({generation, it->first}, {kNoGeneration, number});
    ranks_.LetGo(rank);
    rank.relays.clear();  // they were about a generation that is over
    rank.relay_bytes = 0;
    kept_[number] = {std::move(it->second), generation, context_.now_ms};
    it = record.ranks.erase(it);
  }
}

std::map<int, KeptRanks::Waiting>::iterator KeptRanks::Find(const Kept& born) {
  return std::find_if(kept_.begin(), kept_.end(), [&](const auto& item) {
    return item.second.rank->born == born && item.second.kill_at_ms == 0;
  });
}

bool KeptRanks::GoOn(GenerationRecord& record, StartRank& start) {
  const auto it = Find(Kept{start.born, start.born_rank});
  if (it == kept_.end()) return false;
  RankConnection* connection = connections_.Of(kNoGeneration, it->first);
  const bool joins = !start.waits;
  // Nobody can tell it: End comes to it.
  if (joins && (connection == nullptr || !it->second.rank->released || IsStopped(it->second.rank->pid)))
    return false;
  std::unique_ptr<RankProcess> rank = std::move(it->second.rank);
  connections_.Rename({kNoGeneration, it->first}, {start.generation, start.rank});
  kept_.erase(it);
  if (joins) connection->Send(kKeeperMember, Environment(start));
  const std::vector<int32_t> cpus = rank->spec.cpus;
  TakeOver(rank->spec, start);
  std::vector<int32_t> other_cpus;
  if (rank->spec.cpus != cpus) other_cpus = BindThreads(rank->pid, rank->spec.cpus);
  if (joins) rank->released = false;
  outputs_.GoOn(*rank);
  record.others_reports = record.others_reports || !rank->spec.report_path.empty();
  ranks_.Take(*rank);
  context_.agent.Tell(
      Started{rank->spec.generation, rank->spec.rank, rank->pid, rank->start_time, std::move(other_cpus)});
  if (!joins && rank->released) context_.agent.Tell(Ready{rank->spec.generation, rank->spec.rank});
  record.ranks[rank->spec.rank] = std::move(rank);
  return true;
}

Exited KeptRanks::TakeDeath(const Kept& born) {
  const auto it =
      std::find_if(deaths_.begin(), deaths_.end(), [&](const auto& death) { return death.first == born; });
  Exited lost;
  lost.cause = Cause::kLost;
  lost.message = "its process, which was started as rank " + std::to_string(born.born_rank) +
                 " of generation " + std::to_string(born.born) +
                 (Find(born) != kept_.end() ? ", does not answer any more" : ", is not there any more");
  if (it == deaths_.end()) return lost;
  // A code of 0 or 75 as well: the rank has not done its part in a generation that it never heard of.
  lost.pid = it->second.pid;
  lost.tail = it->second.tail;
  lost.message += ": " + it->second.message + " while it waited for this generation";
  return lost;
}

void KeptRanks::LeaveOut(uint64_t generation) {
  deaths_.clear();
  End(generation, kEndingGraceMs);
}

void KeptRanks::End(uint64_t generation, int64_t grace_ms) {
  std::vector<ProcessEntry> processes;
  for (auto& [number, waiting] : kept_) {
    if (waiting.generation <= generation) End(waiting, grace_ms, &processes);
  }
}

void KeptRanks::End(Waiting& waiting, int64_t grace_ms, std::vector<ProcessEntry>* processes) {
  const int64_t kill_at_ms = std::max<int64_t>(1, context_.now_ms + grace_ms);
  ending_ += waiting.kill_at_ms == 0 ? 1 : 0;
  waiting.kill_at_ms = waiting.kill_at_ms == 0 ? kill_at_ms : std::min(waiting.kill_at_ms, kill_at_ms);
  ranks_.Term(*waiting.rank, processes);
}

void KeptRanks::Advance() {
  EndOrphans();
  EndForgotten();
  if (ending_ == 0) return;
  for (auto& [number, waiting] : kept_) {
    if (waiting.kill_at_ms == 0 || context_.now_ms < waiting.kill_at_ms || waiting.killed) continue;
    waiting.killed = true;
    kill(-waiting.rank->pid, SIGKILL);
    kill(waiting.rank->pid, SIGKILL);
  }
}

std::vector<Kept> KeptRanks::List(bool ready) const {
  std::vector<Kept> list;
  for (const auto& [number, waiting] : kept_) {
    if (waiting.kill_at_ms == 0 && waiting.rank->released == ready) list.push_back(waiting.rank->born);
  }
  return list;
}

RankProcess* KeptRanks::Find(int number) {
  const auto it = kept_.find(number);
  return it == kept_.end() ? nullptr : it->second.rank.get();
}

std::optional<int> KeptRanks::NumberOf(const Kept& born) const {
  for (const auto& [number, waiting] : kept_) {
    if (waiting.rank->born == born) return number;
  }
  return std::nullopt;
}

// Heads end what waits in vain after ten minutes, and a lease what has no agent. Agents that come and go, and
// that no head takes, do neither.
void KeptRanks::EndForgotten() {
  if (kept_.empty() || context_.now_ms < next_look_ms_) return;
  const int64_t longest_ms = context_.options.longest_wait_ms;
  next_look_ms_ = context_.now_ms + longest_ms / kLooksMax;
  std::vector<ProcessEntry> processes;
  for (auto& [number, waiting] : kept_) {
    if (waiting.kill_at_ms == 0 && context_.now_ms - waiting.since_ms >= longest_ms)
      End(waiting, kEndingGraceMs, &processes);
  }
}

// Nothing else would find them before a generation ends. One look at all processes, however many have died.
void KeptRanks::EndOrphans() {
  if (dead_.empty()) return;
  for (const Descendant& found : LivingDescendants(getpid())) {
    if (dead_.contains(ProcessEnvironment(found.process.pid, "GTRAIN_TOKEN")))
      SignalProcess(found.process, SIGKILL);
  }
  dead_.clear();
}

bool KeptRanks::OwnsToken(const std::string& token) const {
  return !token.empty() && std::any_of(kept_.begin(), kept_.end(), [&](const auto& item) {
    return item.second.rank->born_token == token && item.second.kill_at_ms == 0;
  });
}

// The rank as which it was to go on is lost, if a head counts on it. The log has what it said last.
bool KeptRanks::OnDied(const siginfo_t& info) {
  const auto it = std::find_if(kept_.begin(), kept_.end(),
                               [&](const auto& item) { return item.second.rank->pid == info.si_pid; });
  if (it == kept_.end()) return false;
  Waiting& waiting = it->second;
  for (LogStream* stream : {&waiting.rank->out, &waiting.rank->err}) stream->Pump(context_.now_ms, 16 << 20);
  if (waiting.kill_at_ms == 0) {
    fprintf(stderr, "gtrain-keeper: process %d of rank %d ended between two generations, with %s %d\n",
            info.si_pid, waiting.rank->spec.rank, info.si_code == CLD_EXITED ? "code" : "signal",
            info.si_status);
    deaths_.emplace_back(waiting.rank->born, DescribeDeath(*waiting.rank, info));
  } else {
    --ending_;
  }
  for (LogStream* stream : {&waiting.rank->out, &waiting.rank->err}) {
    stream->Close(context_.now_ms);
  }
  if (RankConnection* connection = connections_.Of(kNoGeneration, it->first)) connection->broken = true;
  if (!waiting.rank->born_token.empty()) dead_.insert(waiting.rank->born_token);
  kept_.erase(it);
  return true;
}

std::optional<uint64_t> KeptRanks::GenerationOf(pid_t child) {
  for (const auto& [number, waiting] : kept_) {
    if (waiting.rank->pid == child) return kNoGeneration;
  }
  return std::nullopt;
}

}  // namespace gtrain::keeper
