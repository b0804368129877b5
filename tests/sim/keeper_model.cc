#include "tests/sim/keeper_model.h"

#include <algorithm>

#include "base/check.h"
#include "base/probe.h"
#include "nlohmann/json.hpp"
#include "tests/sim/checker.h"

namespace gtrain::sim {
namespace {

constexpr int64_t kGiveUp = 10 * kSec;
constexpr size_t kRelaysMax = 256;
constexpr int64_t kEndingGrace = 5 * kSec;  // where nobody says how much there is
constexpr int64_t kQuit = 15 * kSec;
constexpr int64_t kLongest = 15 * kMin;  // that a process waits

// Once it has joined; of one that went on, since it was started.
bool HasSession(const RankProcess& process) {
  return process.worker.has_value() && (process.up || process.stays);
}

// It waits beside its generation and could go on.
bool IsReady(const RankProcess& process) { return process.waits && process.released && process.alive; }

// Its generation waits for it no more, and it may be in the next one.
bool LetsGo(const RankProcess& process) {
  const bool may_come = process.waits && !process.released;
  return process.alive && !process.termed && ((process.released && !process.asked) || may_come);
}

std::string Variable(const keeper::StartRank& start, const std::string& wanted) {
  for (const auto& [name, value] : start.env) {
    if (name == wanted) return value;
  }
  return "";
}

uint64_t TimelineOf(const keeper::BeginGeneration& begin) {
  const auto note = nlohmann::json::parse(begin.note, nullptr, false);
  return note.is_object() ? note.value("timeline", uint64_t{0}) : 0;
}

}  // namespace

void KeeperModel::Tell(keeper::Report report) {
  if (agent_) agent_(std::move(report));
}

void KeeperModel::TellGone(uint64_t number, bool clean, const std::string& message) {
  Tell(keeper::Gone{number, clean, message, ListKept(true), ListKept(false)});
}

void KeeperModel::Attach(std::function<void(keeper::Report)> agent, int64_t lease) {
  agent_ = std::move(agent);
  lease_over_ = false;
  lease_ = lease;
  ++attach_;
  Tell(Describe());
  for (auto& [number, generation] : generations_) {
    bool later = false;
    for (auto& [rank, info] : generation.ranks) {
      for (const keeper::RelayUp& relay : info.relays) Tell(relay);
      const RankProcess& process = *info.process;
      const bool ready = process.waits ? IsReady(process) : process.stays && process.alive;
      if (ready && !info.exit) Tell(keeper::Ready{number, rank});
      if (!info.exit || info.acked || info.relays.empty()) continue;
      Tell(*info.exit);
      later = true;
    }
    if (later && generation.phase == Phase::kGone) TellGone(number, generation.clean, "");
  }
}

void KeeperModel::Detach() {
  agent_ = nullptr;
  agent_seen_ = kernel_.now();
  ++attach_;
  if (lease_ == 0) return;  // never
  kernel_.After(lease_ + kSec, [self = shared_from_this(), attach = attach_] {
    if (self->alive_ && self->attach_ == attach) self->CheckLease();
  });
}

void KeeperModel::CheckLease() {
  lease_over_ = true;
  EndKept(UINT64_MAX, kEndingGrace);
  for (auto& [number, generation] : generations_) {
    if (generation.phase != Phase::kLive) continue;
    highest_revoked_ = std::max(highest_revoked_, number);
    checker_.LeaseEnds(job_, number);
    End(number, generation, {keeper::End::kReform, kEndingGrace});
  }
}

void KeeperModel::CheckFence() {
  if (!alive_ || kernel_.now() <= fence_until_) return;
  for (auto& [number, generation] : generations_) {
    const bool may_write =
        std::any_of(generation.ranks.begin(), generation.ranks.end(), [](const auto& item) {
          const RankProcess& process = *item.second.process;
          return !item.second.exit && !process.waits && !HasSession(process);
        });
    if (generation.phase != Phase::kLive || !may_write) continue;
    ++kernel_.counts["fence ended ranks"];
    GT_PROBE("keeper.fence_ends_ranks");
    highest_revoked_ = std::max(highest_revoked_, number);
    checker_.LeaseEnds(job_, number);
    End(number, generation, {keeper::End::kReform, kEndingGrace});
  }
}

keeper::State KeeperModel::Describe() const {
  keeper::State state;
  state.job = job_.value;
  state.highest_revoked = highest_revoked_;
  state.highest_stopped = highest_stopped_;
  for (const auto& [number, generation] : generations_) {
    keeper::GenerationHeld held;
    held.generation = number;
    held.note = generation.begin.note;
    held.ending = generation.phase != Phase::kLive;
    held.gone = generation.phase == Phase::kGone;
    held.clean = generation.clean;
    for (const auto& [rank, info] : generation.ranks) {
      if (info.exit && !info.acked && !info.relays.empty()) {  // told after what it said
        held.ranks.push_back({rank, info.process->pid, 1, true, info.process->worker.has_value()});
        held.gone = false;
        continue;
      }
      held.ranks.push_back({rank, info.exit ? -1 : info.process->pid, 1, !info.exit && info.process->pid > 0,
                            HasSession(*info.process)});
      if (info.exit && !info.acked) held.unacked.push_back(*info.exit);
    }
    state.generations.push_back(std::move(held));
  }
  state.kept = ListKept(true);
  state.coming = ListKept(false);
  return state;
}

void KeeperModel::Do(const keeper::Command& command) {
  if (!alive_) return;
  if (const auto* begin = std::get_if<keeper::BeginGeneration>(&command)) {
    if (generations_.contains(begin->generation)) return;
    const bool over = begin->generation <= highest_revoked_;
    if (quitting_ && !over) return;
    Generation& generation = generations_[begin->generation];
    generation.begin = *begin;
    if (!over) return;
    GT_PROBE("keeper.end_before_begin");
    generation.phase = Phase::kGone;
    TellGone(begin->generation, true, "it was over before it began");
  } else if (const auto* start = std::get_if<keeper::StartRank>(&command)) {
    const auto it = generations_.find(start->generation);
    if (it != generations_.end() && it->second.phase == Phase::kLive &&
        !it->second.ranks.contains(start->rank)) {
      if (!GoOn(it->second, *start) && start->born > 0) NeverRuns(it->second, *start);
      if (!it->second.ranks.contains(start->rank)) PrepareStart(it->second, *start);
      // Those that no rank of the newest generation goes on with are not needed.
      if (it->second.ranks.size() < it->second.begin.ranks) return;
      deaths_.clear();
      EndKept(start->generation, kEndingGrace);
    }
  } else if (const auto* end = std::get_if<keeper::EndGeneration>(&command)) {
    highest_revoked_ = std::max(highest_revoked_, end->generation);
    if (end->mode != keeper::End::kReform) highest_stopped_ = std::max(highest_stopped_, end->generation);
    for (auto& [number, generation] : generations_) {
      if (number <= end->generation) {
        End(number, generation, {end->mode, static_cast<int64_t>(end->grace_ms) * kMs, end->keep});
      }
    }
    if (!end->keep) EndKept(end->generation, static_cast<int64_t>(end->grace_ms) * kMs);
    if (!generations_.contains(end->generation)) TellGone(end->generation, true, "it never began here");
  } else if (const auto* relay = std::get_if<keeper::Relay>(&command)) {
    const auto it = generations_.find(relay->generation);
    if (it == generations_.end() || !it->second.ranks.contains(relay->rank)) return;
    ranks_.FromAgent(it->second.ranks.at(relay->rank).process, relay->json);
  } else if (const auto* ack = std::get_if<keeper::AckRelay>(&command)) {
    const auto it = generations_.find(ack->generation);
    if (it == generations_.end() || !it->second.ranks.contains(ack->rank)) return;
    std::erase_if(it->second.ranks.at(ack->rank).relays,
                  [&](const auto& held) { return held.id == ack->id; });
  } else if (const auto* exit = std::get_if<keeper::AckExit>(&command)) {
    const auto it = generations_.find(exit->generation);
    if (it == generations_.end() || !it->second.ranks.contains(exit->rank)) return;
    Rank& rank = it->second.ranks.at(exit->rank);
    if (rank.exit) rank.acked = true;
  } else if (const auto* signal = std::get_if<keeper::SignalRank>(&command)) {
    const auto it = generations_.find(signal->generation);
    if (it == generations_.end() || !it->second.ranks.contains(signal->rank)) return;
    const RankPtr process = it->second.ranks.at(signal->rank).process;
    if (signal->signal == 9 && process->alive && !process->stuck)
      ranks_.KillProcess(process, keeper::Cause::kSignal, 0, 9);
  } else if (const auto* notice = std::get_if<keeper::Notice>(&command)) {
    const auto it = generations_.find(notice->generation);
    if (it == generations_.end() || it->second.phase != Phase::kLive) return;
    for (const auto& [number, rank] : it->second.ranks) {
      if (rank.exit) continue;
      ranks_.Notice(rank.process, notice->seconds, notice->signal);
    }
  } else if (const auto* forget = std::get_if<keeper::Forget>(&command)) {
    const auto it = generations_.find(forget->generation);
    if (it != generations_.end() && it->second.phase == Phase::kGone) generations_.erase(it);
  } else if (const auto* fence = std::get_if<keeper::Fence>(&command)) {
    fence_until_ = std::max(fence_until_, fence->until_ms * kMs);
    kernel_.At(fence_until_ + 1, [self = shared_from_this()] { self->CheckFence(); });
  } else if (std::holds_alternative<keeper::Quit>(command)) {
    quitting_ = true;
    quit_by_ = kernel_.now() + kQuit;
    for (auto& [number, generation] : generations_) End(number, generation, {keeper::End::kStopNow});
    if (!kept_.empty()) kernel_.At(quit_by_, [self = shared_from_this()] { self->Advance(0); });
    EndKept(UINT64_MAX, 0);
    Advance(0);
  }
}

// The process of a rank is there a moment later. If the generation ended before, the rank is never started.
void KeeperModel::PrepareStart(Generation& generation, const keeper::StartRank& start) {
  Rank& rank = generation.ranks[start.rank];
  rank.process = std::make_shared<RankProcess>();
  rank.process->alive = false;
  kernel_.After(kernel_.Between(0, 5 * kMs), [self = shared_from_this(), start, process = rank.process] {
    const auto it = self->generations_.find(start.generation);
    if (!self->alive_ || it == self->generations_.end()) return;
    Rank& prepared = it->second.ranks.at(start.rank);
    if (prepared.process != process || prepared.exit) return;
    if (it->second.phase == Phase::kLive) return self->Start(it->second, start);
    self->Exited(start.generation, start.rank,
                 {start.generation, start.rank, -1, keeper::Cause::kStartFailed, 126, 0, "not started", ""});
  });
}

void KeeperModel::Start(Generation& generation, const keeper::StartRank& start) {
  Rank& rank = generation.ranks.at(start.rank);
  rank.process->alive = true;
  rank.process->job = job_;
  rank.process->generation = start.generation;
  rank.process->rank = start.rank;
  rank.process->machine = machine_;
  const uint64_t number = start.generation;
  const int which = start.rank;
  Connect(rank.process, number, which);
  rank.process->in_place = Variable(start, "GTRAIN_ELASTIC") == "in-place";
  if (start.waits) {
    GT_PROBE("keeper.starts_beside");
    ranks_.SpawnBeside(rank.process, std::atoi(Variable(start, "WORLD_SIZE").c_str()));
  } else {
    ranks_.Spawn(rank.process, std::atoi(Variable(start, "WORLD_SIZE").c_str()),
                 TimelineOf(generation.begin));
  }
  const int64_t pid = rank.process->pid;
  kernel_.After(kernel_.Between(kMs, 30 * kMs), [keeper = shared_from_this(), number, which, pid] {
    const auto it = keeper->generations_.find(number);
    if (it == keeper->generations_.end() || it->second.ranks[which].exit) return;
    keeper->Tell(keeper::Started{number, which, pid, 1});
  });
  if (fence_until_ > 0 && kernel_.now() > fence_until_) {
    kernel_.After(kernel_.Between(5 * kMs, 100 * kMs),
                  [keeper = shared_from_this()] { keeper->CheckFence(); });
  }
}

// What the process says is said by this rank from now on.
void KeeperModel::Connect(const RankPtr& process, uint64_t number, int which) {
  const std::weak_ptr<KeeperModel> self = shared_from_this();
  process->relay = [self, number, which](const std::string& json) {
    if (const auto keeper = self.lock()) keeper->Relay(number, which, json);
  };
  process->report = [self, number, which](const std::string& line) {
    const auto keeper = self.lock();
    if (keeper && keeper->alive_) keeper->Tell(keeper::ReportBytes{number, which, line});
  };
  process->exited = [self, number, which](keeper::Exited exit) {
    if (const auto keeper = self.lock()) keeper->Exited(number, which, std::move(exit));
  };
  process->let_go = [self, weak = std::weak_ptr(process)] {
    const auto keeper = self.lock();
    const auto released = weak.lock();
    if (keeper && released) keeper->Released(released);
  };
}

// ---------------------------------------------------------------- between two generations

// Nothing that it says belongs to its generation any more.
void KeeperModel::Released(const RankPtr& process) {
  if (process->waits) {
    const bool answers = std::exchange(process->asked, false);
    ComesUp(process);
    if (answers)
      kernel_.After(kMs,
                    [self = shared_from_this(), number = process->generation] { self->Advance(number); });
    return;
  }
  const auto it = generations_.find(process->generation);
  if (!alive_ || it == generations_.end() || !it->second.ranks.contains(process->rank)) return;
  if (it->second.ranks.at(process->rank).process != process) return;
  process->released = process->stays;
  kernel_.After(kMs, [self = shared_from_this(), number = process->generation] { self->Advance(number); });
}

void KeeperModel::ComesUp(const RankPtr& process) {
  if (!alive_ || !process->stays || std::exchange(process->released, true)) return;
  checker_.ComesUp(*process);
  if (!process->kept) Tell(keeper::Ready{process->generation, process->rank});
}

// Takes the processes that have let go of the generation out of it.
void KeeperModel::Take(Generation& generation) {
  const std::weak_ptr<KeeperModel> self = shared_from_this();
  for (auto it = generation.ranks.begin(); it != generation.ranks.end();) {
    const RankPtr process = it->second.process;
    if (it->second.exit || !LetsGo(*process)) {
      ++it;
      continue;
    }
    GT_PROBE("keeper.keeps_process");
    process->kept = true;
    process->relay = process->report = [](const std::string&) {};
    if (!process->waits) process->let_go = nullptr;
    process->exited = [self, weak = std::weak_ptr(process)](const keeper::Exited& exit) {
      const auto keeper = self.lock();
      const auto died = weak.lock();
      if (keeper && died) keeper->KeptDied(died, exit);
    };
    checker_.RankKept(*process);
    kept_.push_back({process, generation.begin.generation});
    kernel_.After(kLongest, [self = shared_from_this(), process, generation = generation.begin.generation] {
      if (self->alive_ && process->kept) self->EndWaiting(process, generation);
    });
    it = generation.ranks.erase(it);
  }
  if (lease_over_) EndKept(UINT64_MAX, kEndingGrace);
}

bool KeeperModel::GoOn(Generation& generation, const keeper::StartRank& start) {
  const auto it = std::find_if(kept_.begin(), kept_.end(), [&](const Waiting& waiting) {
    return waiting.process->born == keeper::Kept{start.born, start.born_rank} && !waiting.ending;
  });
  if (it == kept_.end()) {
    if (start.born > 0) GT_PROBE("keeper.has_no_such_process");
    return false;
  }
  const RankPtr process = it->process;
  if (!start.waits && (process->deaf || process->stopped || !process->released))
    return false;  // nobody can tell it
  kept_.erase(it);
  if (start.waits) {
    WaitOn(process, generation, start);
    return true;
  }
  GT_PROBE("keeper.process_goes_on");
  generation.ranks[start.rank].process = process;
  Connect(process, start.generation, start.rank);
  Tell(keeper::Started{start.generation, start.rank, process->pid, 1});
  ranks_.GoOn(process, start.generation, start.rank, std::atoi(Variable(start, "WORLD_SIZE").c_str()),
              TimelineOf(generation.begin));
  return true;
}

// The process that was to be this rank is not there: the rank is lost.
void KeeperModel::NeverRuns(Generation& generation, const keeper::StartRank& start) {
  const keeper::Kept born{start.born, start.born_rank};
  keeper::Exited exit;
  exit.cause = keeper::Cause::kLost;
  for (const auto& [who, how] : deaths_) exit.pid = who == born ? how.pid : exit.pid;
  exit.generation = start.generation;
  exit.rank = start.rank;
  Rank& rank = generation.ranks[start.rank];
  rank.process = std::make_shared<RankProcess>();
  rank.process->alive = false;
  checker_.RankNeverRuns(job_, start.generation);
  Exited(start.generation, start.rank, std::move(exit));
}

// It waits beside another generation.
void KeeperModel::WaitOn(const RankPtr& process, Generation& generation, const keeper::StartRank& start) {
  GT_PROBE("keeper.process_waits_on");
  generation.ranks[start.rank].process = process;
  process->kept = false;
  process->waits = true;  // also one that was a member
  process->generation = start.generation;
  process->rank = start.rank;
  Connect(process, start.generation, start.rank);
  checker_.WaitsOn(*process);
  Tell(keeper::Started{start.generation, start.rank, process->pid, 1});
  if (IsReady(*process)) Tell(keeper::Ready{start.generation, start.rank});
}

// Ends those that were in no generation later than this.
void KeeperModel::EndKept(uint64_t generation, int64_t grace) {
  for (Waiting& waiting : kept_) {
    if (waiting.generation > generation) continue;
    GT_PROBE("keeper.ends_kept_process");
    if (!std::exchange(waiting.ending, true) && grace > 0) ranks_.Term(waiting.process, false);
    kernel_.After(grace, [self = shared_from_this(), process = waiting.process] {
      if (self->alive_ && process->kept && !process->stuck)
        self->ranks_.KillProcess(process, keeper::Cause::kStopped, 0, 9);
    });
  }
}

// It has waited for longer than any head lets it.
void KeeperModel::EndWaiting(const RankPtr& process, uint64_t generation) {
  for (Waiting& waiting : kept_) {
    if (waiting.process != process || waiting.generation != generation || waiting.ending) continue;
    GT_PROBE("keeper.ends_who_waits_too_long");
    waiting.ending = true;
    ranks_.Term(process, false);
    kernel_.After(kEndingGrace, [self = shared_from_this(), process] {
      if (self->alive_ && process->kept && !process->stuck)
        self->ranks_.KillProcess(process, keeper::Cause::kStopped, 0, 9);
    });
  }
}

// The rank as which it was to go on is lost, if a head counts on it.
void KeeperModel::KeptDied(const RankPtr& process, const keeper::Exited& exit) {
  std::erase_if(kept_, [&](const Waiting& waiting) {
    if (waiting.process == process && !waiting.ending) {
      GT_PROBE("keeper.kept_process_dies");
      deaths_.emplace_back(process->born, exit);
    }
    return waiting.process == process;
  });
  kernel_.After(20 * kMs, [self = shared_from_this()] { self->Advance(0); });
}

std::vector<keeper::Kept> KeeperModel::ListKept(bool ready) const {
  std::vector<keeper::Kept> list;
  for (const Waiting& waiting : kept_) {
    if (!waiting.ending && waiting.process->released == ready) list.push_back(waiting.process->born);
  }
  return list;
}

// ---------------------------------------------------------------- ranks

void KeeperModel::Relay(uint64_t number, int which, const std::string& json) {
  const auto it = generations_.find(number);
  if (!alive_ || it == generations_.end()) return;
  Rank& rank = it->second.ranks[which];
  const bool progress = json.find("\"progress\"") != std::string::npos;
  if (progress) {  // the newest replaces what no agent has taken
    std::erase_if(rank.relays,
                  [](const auto& held) { return held.json.find("\"progress\"") != std::string::npos; });
  }
  if (json.find("\"joined\"") != std::string::npos && rank.process->stays) Tell(keeper::Ready{number, which});
  rank.relays.push_back({number, which, next_relay_++, json});
  if (rank.relays.size() > kRelaysMax) rank.relays.pop_front();
  Tell(rank.relays.back());
}

size_t KeeperModel::relays_held() const {
  size_t most = 0;
  for (const auto& [number, generation] : generations_) {
    for (const auto& [which, rank] : generation.ranks) most = std::max(most, rank.relays.size());
  }
  return most;
}

void KeeperModel::Exited(uint64_t number, int which, keeper::Exited exit) {
  const auto it = generations_.find(number);
  if (!alive_ || it == generations_.end()) return;
  Rank& rank = it->second.ranks[which];
  const bool ours = it->second.ordered && it->second.phase != Phase::kLive;
  const bool by_signal = exit.cause == keeper::Cause::kSignal && (exit.signal == 9 || exit.signal == 15);
  const bool by_code = exit.cause == keeper::Cause::kExited && exit.code != 0 && exit.code != 75;
  if (ours && (by_signal || by_code)) exit.cause = keeper::Cause::kStopped;
  rank.exit = std::move(exit);
  Tell(*rank.exit);
  kernel_.After(20 * kMs, [self = shared_from_this(), number] { self->Advance(number); });
}

void KeeperModel::End(uint64_t number, Generation& generation, const How& how) {
  const keeper::End mode = how.mode;
  if (generation.phase == Phase::kGone) return;
  const bool harder = mode > generation.mode || (generation.keep && !how.keep);
  if (generation.ordered && !harder && generation.phase != Phase::kLive) return;
  generation.ordered = true;
  generation.keep = how.keep && mode == keeper::End::kReform;
  generation.mode = mode;
  generation.phase = Phase::kEnding;
  const uint64_t kill = ++generation.kill_number;
  // Where processes go on from generation to generation, all ranks are needed to save.
  const bool goes_on = std::ranges::any_of(
      generation.ranks, [](const auto& item) { return item.second.process->stays && !item.second.exit; });
  const std::vector<RankPtr> processes = [&] {
    std::vector<RankPtr> list;
    for (auto& [which, rank] : generation.ranks) {
      const RankProcess& process = *rank.process;
      const bool spared = generation.keep && (process.stays || process.waits) && process.alive;
      if (spared && !process.waits && !process.asked_to_end) ranks_.Revoke(rank.process);
      if (spared && process.waits && process.released) ranks_.Ask(rank.process);
      if (spared) continue;
      list.push_back(rank.process);
    }
    return list;
  }();
  // Where nothing runs any more, or never did, there is nothing to wait for.
  kernel_.After(20 * kMs, [self = shared_from_this(), number] { self->Advance(number); });
  const int64_t grace = mode == keeper::End::kStopNow ? 0 : how.grace;
  if (mode == keeper::End::kStop && grace > 0) {
    // SDK ranks are told to save; the others, and those that wait beside them, get SIGTERM.
    for (const RankPtr& process : processes)
      ranks_.Term(process, (process->worker || goes_on) && !process->waits);
  } else if (grace > 0) {
    for (const RankPtr& process : processes) ranks_.Term(process, false);
  }
  for (const RankPtr& process : processes) {
    process->asked_to_end = true;
    process->over = process->over || mode != keeper::End::kStop;
  }
  kernel_.After(grace, [self = shared_from_this(), number, kill] {
    const auto it = self->generations_.find(number);
    if (self->alive_ && it != self->generations_.end() && it->second.kill_number == kill)
      self->KillAll(number);
  });
}

void KeeperModel::KillAll(uint64_t number) {
  Generation& generation = generations_.at(number);
  if (generation.phase == Phase::kGone) return;
  if (generation.keep) Take(generation);
  std::vector<RankPtr> processes;
  for (auto& [which, rank] : generation.ranks) processes.push_back(rank.process);
  for (const RankPtr& process : processes) {
    if (!process->stuck) ranks_.KillProcess(process, keeper::Cause::kStopped, 0, 9);
  }
  kernel_.After(20 * kMs, [self = shared_from_this(), number] { self->Advance(number); });
  kernel_.After(kGiveUp, [self = shared_from_this(), number] {
    const auto it = self->generations_.find(number);
    if (self->alive_ && it != self->generations_.end() && it->second.phase != Phase::kGone)
      self->Finish(number, false);
  });
}

// All ranks of a generation have exited: it ends by itself.
void KeeperModel::Advance(uint64_t number) {
  if (!alive_) return;
  const auto it = generations_.find(number);
  if (it != generations_.end() && it->second.phase != Phase::kGone) {
    Generation& generation = it->second;
    const bool let_go = std::ranges::all_of(
        generation.ranks, [](const auto& item) { return item.second.exit || LetsGo(*item.second.process); });
    if (generation.phase == Phase::kEnding && generation.keep && let_go) Take(generation);
    const bool exited = std::all_of(generation.ranks.begin(), generation.ranks.end(),
                                    [](const auto& item) { return item.second.exit.has_value(); });
    const bool whole = generation.ranks.size() >= generation.begin.ranks && !generation.ranks.empty();
    if (exited && (generation.phase == Phase::kEnding || whole)) Finish(number, true);
  }
  if (!quitting_) return;
  for (const auto& [other, generation] : generations_) {
    if (generation.phase != Phase::kGone) return;
  }
  if (!kept_.empty() && kernel_.now() < quit_by_) return;
  alive_ = false;
  if (left) left();
}

void KeeperModel::Finish(uint64_t number, bool clean) {
  Generation& generation = generations_.at(number);
  generation.phase = Phase::kGone;
  generation.clean = clean;
  TellGone(number, clean, clean ? "" : "a process survived SIGKILL");
  Advance(0);
}

std::vector<RankPtr> KeeperModel::Processes() const {
  std::vector<RankPtr> list;
  for (const auto& [number, generation] : generations_) {
    for (const auto& [which, rank] : generation.ranks) {
      if (rank.process->alive) list.push_back(rank.process);
    }
  }
  for (const Waiting& waiting : kept_) list.push_back(waiting.process);
  return list;
}

std::vector<keeper::Exited> KeeperModel::Die() {
  alive_ = false;
  agent_ = nullptr;
  std::vector<keeper::Exited> records;
  for (const auto& [number, generation] : generations_) {
    for (const auto& [which, rank] : generation.ranks) {
      if (rank.exit && !rank.acked) records.push_back(*rank.exit);
    }
  }
  for (const RankPtr& process : Processes()) ranks_.Orphan(process);
  return records;
}

}  // namespace gtrain::sim
