#include "runtime/keeper/endings.h"

#include <errno.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "runtime/keeper/posix.h"
#include "runtime/keeper/rank_protocol.h"

namespace gtrain::keeper {

namespace {

constexpr int64_t kGiveUpMs = 10000;
constexpr int64_t kUncleanLogsMs = 2000;  // and when kGiveUpMs went by before: the head waits 15 s for all
constexpr int64_t kLogsMs = 8000;         // a generation that is over waits this long for its logs
constexpr int64_t kScanEveryMs = 15;

// Every descendant has an ancestor among our children, so without children there is none.
bool NoChildren() {
  siginfo_t info = {};
  return waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 && errno == ECHILD;
}

}  // namespace

void Endings::Begin(GenerationRecord& record, const How& how) {
  const auto& [mode, grace_ms, reason, ordered, keep] = how;
  if (record.phase == Phase::kWriting || record.phase == Phase::kGone) return;
  const bool harder = mode > record.mode || (record.keep && !keep);
  if (record.ordered && !harder && record.phase != Phase::kLive) return;
  const int64_t now = context_.now_ms;
  const bool asked = record.ordered;
  record.ordered = ordered;
  record.keep = keep && mode == End::kReform;
  record.mode = mode;
  record.reason = reason;
  record.kill_at_ms = now + (mode == End::kStopNow ? 0 : grace_ms);
  if (record.phase != Phase::kKilling) record.phase = Phase::kEnding;
  if (asked && mode == End::kStopNow) return;
  connections_.SendToAll(record.begin.generation, mode == End::kReform ? kKeeperRevoked : kKeeperStop,
                         reason);
  const bool wait_for_sdk =
      mode == End::kStop;  // they were asked to save; the signal comes near the end of the grace
  record.term_at_ms = wait_for_sdk ? now + grace_ms - std::min<int64_t>(5000, grace_ms / 4) : 0;
  TermRanks(record, !wait_for_sdk);
  // Those that wait beside it have let go long ago. The word that was just sent asks them, too.
  for (auto& [number, rank] : record.ranks) rank->asked = record.keep && rank->spec.waits && rank->released;
}

void Endings::TermRanks(GenerationRecord& record, bool also_sdk) {
  std::vector<ProcessEntry> processes;
  const bool goes_on = std::any_of(record.ranks.begin(), record.ranks.end(),
                                   [](const auto& item) { return item.second->stays && !item.second->exit; });
  for (auto& [number, rank] : record.ranks) {
    if (rank->exit || rank->pid <= 0 || (record.keep && (rank->stays || rank->MayCome()))) continue;
    // Where processes go on from generation to generation, one that was started in the place of another will
    // join them, and all of them are needed to save.
    const bool joins = goes_on || connections_.Of(record.begin.generation, number) != nullptr;
    if (!also_sdk && joins && !rank->spec.waits) continue;  // who waits has nothing to save
    ranks_.Term(*rank, &processes);
  }
}

void Endings::Advance(GenerationRecord& record) {
  if (record.phase == Phase::kGone) return;
  if (record.phase == Phase::kWriting) return AwaitLogs(record);
  if (record.phase == Phase::kLive) {
    if (!record.AllEnded() || record.ranks.size() < record.begin.ranks || record.ranks.empty()) return;
    Begin(record, {End::kReform, kDrainMs, "all ranks have exited", false});
    record.ordered = false;
  }
  if (record.phase == Phase::kEnding) {
    if (!GraceIsOver(record)) return;
    if (record.keep) kept_.Take(record);
    record.phase = Phase::kKilling;
    record.give_up_ms = context_.now_ms + kGiveUpMs;
  }
  KillLeftovers(record);
}

// SDK ranks get their SIGTERM on the way there.
bool Endings::GraceIsOver(GenerationRecord& record) {
  const int64_t now = context_.now_ms;
  if (record.term_at_ms != 0 && now >= record.term_at_ms) {
    record.term_at_ms = 0;
    TermRanks(record, true);
  }
  const auto drained = [&] {
    return std::none_of(record.ranks.begin(), record.ranks.end(), [&record](const auto& item) {
      return item.second->out.alive() || item.second->err.alive() || ItsGroupStillSaves(record, *item.second);
    });
  };
  const bool hurry = record.ordered && record.mode != End::kStop;
  return now >= record.kill_at_ms || (record.AllLetGo() && (hurry || drained()));
}

// A descendant is of the generation of its ancestor just below us, the `top`. An adopted orphan carries our
// environment, unless it has changed that.
bool Endings::Owns(const GenerationRecord& record, pid_t pid, pid_t top) const {
  if (const auto generation = children_.GenerationOf(top)) return *generation == record.begin.generation;
  if (record.keep && kept_.OwnsToken(ProcessEnvironment(pid, "GTRAIN_TOKEN"))) return false;
  const auto live = std::count_if(context_.generations.begin(), context_.generations.end(),
                                  [](const auto& item) { return item.second.phase < Phase::kWriting; });
  if (live <= 1) return true;
  const std::string generation = ProcessEnvironment(pid, "GTRAIN_GENERATION");
  return generation.empty() || generation == std::to_string(record.begin.generation);
}

void Endings::KillLeftovers(GenerationRecord& record) {
  const int64_t now = context_.now_ms;
  if (record.AllEnded() && NoChildren()) return Finish(record, true, "");
  if (now < record.next_scan_ms) return;
  record.next_scan_ms = now + kScanEveryMs;
  // Kept processes are in the same groups: there only those are killed that are found.
  if (!record.keep) {
    record.group->cgroup.Kill();
    for (auto& [number, rank] : record.ranks) {
      rank->cgroup.Kill();
      if (rank->group != nullptr) rank->group->cgroup.Kill();
    }
  }
  size_t left = 0;
  std::string names;
  const std::vector<Descendant> living = LivingDescendants(getpid());
  children_.TakeStarted();  // whose starter has ended: a rank nobody knows yet would be taken for anybody's
  for (const Descendant& found : living) {
    if (!Owns(record, found.process.pid, found.top)) continue;
    ++left;
    if (left <= 5) names += " " + std::to_string(found.process.pid);
    SignalProcess(found.process, SIGKILL);
  }
  children_.Reap();
  if (left == 0 && record.AllEnded()) return Finish(record, true, "");
  if (now < record.give_up_ms) return;
  Finish(record, false,
         std::to_string(left) + " processes survived SIGKILL for " + std::to_string(kGiveUpMs / 1000) +
             " s (uninterruptible sleep?): pids" + names);
}

void Endings::Finish(GenerationRecord& record, bool clean, const std::string& message) {
  const int64_t now = context_.now_ms;
  record.phase = Phase::kWriting;
  record.written_by_ms = now + (clean ? kLogsMs : kUncleanLogsMs);
  record.clean = clean;
  record.gone_message = message;
  for (auto& [number, rank] : record.ranks) {
    rank->out.Pump(now, 16 << 20);
    rank->err.Pump(now, 16 << 20);
    rank->out.Close(now);
    rank->err.Close(now);
    rank->cgroup.Remove();  // what the rank said stays until the generation is forgotten
  }
  if (!record.keep) record.group->cgroup.Remove();
  connections_.BreakAll(record.begin.generation);
  arenas_.EndGeneration(record.begin.generation);
  outputs_.TailReports();
  outputs_.Send();
  for (auto& [number, rank] : record.ranks) rank->report.reset();
  record.reports.reset();
  AwaitLogs(record);
}

void Endings::AwaitLogs(GenerationRecord& record) {
  if (!outputs_.logs().Idle() && context_.now_ms < record.written_by_ms) return;
  for (auto& [number, rank] : record.ranks)
    outputs_.Send(record.begin.generation, *rank);  // the disk's last word
  record.phase = Phase::kGone;
  context_.agent.Tell(kept_.TellOf(record.begin.generation, record.clean, record.gone_message));
}

}  // namespace gtrain::keeper
