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

}  // namespace

void KeeperModel::Tell(keeper::Report report) {
  if (agent_) agent_(std::move(report));
}

void KeeperModel::Attach(std::function<void(keeper::Report)> agent, int64_t lease) {
  agent_ = std::move(agent);
  lease_ = lease;
  ++attach_;
  Tell(Describe());
  for (auto& [number, generation] : generations_) {
    bool later = false;
    for (auto& [rank, info] : generation.ranks) {
      for (const keeper::RelayUp& relay : info.relays) Tell(relay);
      if (!info.exit || info.acked || info.relays.empty()) continue;
      Tell(*info.exit);
      later = true;
    }
    if (later && generation.phase == Phase::kGone) Tell(keeper::Gone{number, generation.clean, ""});
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
  for (auto& [number, generation] : generations_) {
    if (generation.phase != Phase::kLive) continue;
    highest_revoked_ = std::max(highest_revoked_, number);
    checker_.LeaseEnds(job_, number);
    End(number, generation, keeper::End::kReform, 5 * kSec, true);
  }
}

void KeeperModel::CheckFence() {
  if (!alive_ || kernel_.now() <= fence_until_) return;
  for (auto& [number, generation] : generations_) {
    const bool may_write =
        std::any_of(generation.ranks.begin(), generation.ranks.end(), [](const auto& item) {
          return !item.second.exit && !(item.second.process->worker.has_value() && item.second.process->up);
        });
    if (generation.phase != Phase::kLive || !may_write) continue;
    ++kernel_.counts["fence ended ranks"];
    GT_PROBE("keeper.fence_ends_ranks");
    highest_revoked_ = std::max(highest_revoked_, number);
    checker_.LeaseEnds(job_, number);
    End(number, generation, keeper::End::kReform, 5 * kSec, true);
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
                            info.process->worker.has_value() && info.process->up});
      if (info.exit && !info.acked) held.unacked.push_back(*info.exit);
    }
    state.generations.push_back(std::move(held));
  }
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
    Tell(keeper::Gone{begin->generation, true, "it was over before it began"});
  } else if (const auto* start = std::get_if<keeper::StartRank>(&command)) {
    const auto it = generations_.find(start->generation);
    if (it != generations_.end() && it->second.phase == Phase::kLive &&
        !it->second.ranks.contains(start->rank)) {
      PrepareStart(it->second, *start);
    }
  } else if (const auto* end = std::get_if<keeper::EndGeneration>(&command)) {
    highest_revoked_ = std::max(highest_revoked_, end->generation);
    if (end->mode != keeper::End::kReform) highest_stopped_ = std::max(highest_stopped_, end->generation);
    for (auto& [number, generation] : generations_) {
      if (number <= end->generation) {
        End(number, generation, end->mode, static_cast<int64_t>(end->grace_ms) * kMs, true);
      }
    }
    if (!generations_.contains(end->generation))
      Tell(keeper::Gone{end->generation, true, "it never began here"});
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
    for (auto& [number, generation] : generations_) End(number, generation, keeper::End::kStopNow, 0, true);
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
  const std::weak_ptr<KeeperModel> self = shared_from_this();
  const uint64_t number = start.generation;
  const int which = start.rank;
  rank.process->relay = [self, number, which](const std::string& json) {
    if (const auto keeper = self.lock()) keeper->Relay(number, which, json);
  };
  rank.process->report = [self, number, which](const std::string& line) {
    const auto keeper = self.lock();
    if (keeper && keeper->alive_) keeper->Tell(keeper::ReportBytes{number, which, line});
  };
  rank.process->exited = [self, number, which](keeper::Exited exit) {
    if (const auto keeper = self.lock()) keeper->Exited(number, which, std::move(exit));
  };
  int world = 0;
  for (const auto& [name, value] : start.env) {
    if (name == "WORLD_SIZE") world = std::atoi(value.c_str());
  }
  const auto note = nlohmann::json::parse(generation.begin.note, nullptr, false);
  ranks_.Spawn(rank.process, world, note.is_object() ? note.value("timeline", uint64_t{0}) : 0);
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

void KeeperModel::Relay(uint64_t number, int which, const std::string& json) {
  const auto it = generations_.find(number);
  if (!alive_ || it == generations_.end()) return;
  Rank& rank = it->second.ranks[which];
  const bool progress = json.find("\"progress\"") != std::string::npos;
  if (progress) {  // the newest replaces what no agent has taken
    std::erase_if(rank.relays,
                  [](const auto& held) { return held.json.find("\"progress\"") != std::string::npos; });
  }
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

void KeeperModel::End(uint64_t number, Generation& generation, keeper::End mode, int64_t grace,
                      bool ordered) {
  if (generation.phase == Phase::kGone) return;
  if (generation.ordered && mode <= generation.mode && generation.phase != Phase::kLive)
    return;  // only ever harder
  generation.ordered = ordered;
  generation.mode = mode;
  generation.phase = Phase::kEnding;
  const uint64_t kill = ++generation.kill_number;
  const std::vector<RankPtr> processes = [&] {
    std::vector<RankPtr> list;
    for (auto& [which, rank] : generation.ranks) list.push_back(rank.process);
    return list;
  }();
  // Where nothing runs any more, or never did, there is nothing to wait for.
  kernel_.After(20 * kMs, [self = shared_from_this(), number] { self->Advance(number); });
  if (mode == keeper::End::kStopNow) grace = 0;
  if (mode == keeper::End::kStop && grace > 0) {
    // SDK ranks are told to save; the others get SIGTERM.
    for (const RankPtr& process : processes) ranks_.Term(process, process->worker.has_value());
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
    const bool exited = std::all_of(generation.ranks.begin(), generation.ranks.end(),
                                    [](const auto& item) { return item.second.exit.has_value(); });
    const bool whole = generation.ranks.size() >= generation.begin.ranks && !generation.ranks.empty();
    if (exited && (generation.phase == Phase::kEnding || whole)) Finish(number, true);
  }
  if (!quitting_) return;
  for (const auto& [other, generation] : generations_) {
    if (generation.phase != Phase::kGone) return;
  }
  alive_ = false;
  if (left) left();
}

void KeeperModel::Finish(uint64_t number, bool clean) {
  Generation& generation = generations_.at(number);
  generation.phase = Phase::kGone;
  generation.clean = clean;
  Tell(keeper::Gone{number, clean, clean ? "" : "a process survived SIGKILL"});
  Advance(0);
}

std::vector<RankPtr> KeeperModel::Processes() const {
  std::vector<RankPtr> list;
  for (const auto& [number, generation] : generations_) {
    for (const auto& [which, rank] : generation.ranks) {
      if (rank.process->alive) list.push_back(rank.process);
    }
  }
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
