#include "runtime/keeper/generations.h"

#include <signal.h>

#include <algorithm>
#include <utility>

namespace gtrain::keeper {

bool ItsGroupStillSaves(const GenerationRecord& record, const RankProcess& rank) {
  if (!record.ordered || record.mode != End::kStop || record.phase != Phase::kEnding) return false;
  if (!rank.exit || rank.exit->signal != SIGTERM || rank.exit->pid <= 1) return false;
  return kill(static_cast<pid_t>(-rank.exit->pid), 0) == 0 ||
         std::any_of(rank.apart.begin(), rank.apart.end(), [](const ProcessEntry& before) {
           ProcessEntry now;
           return ReadProcess(before.pid, &now) && now.start_time == before.start_time && !now.zombie;
         });
}

bool GenerationRecord::AllLetGo() const {
  if (AllEnded() || !keep) return AllEnded();
  return std::all_of(ranks.begin(), ranks.end(), [](const auto& item) {
    const RankProcess& rank = *item.second;
    return rank.exit || rank.LetsGo();
  });
}

GenerationRecord* Generations::Find(uint64_t generation) {
  const auto it = all_.find(generation);
  return it == all_.end() ? nullptr : &it->second;
}

RankProcess* Generations::FindRank(uint64_t generation, int rank) {
  GenerationRecord* record = Find(generation);
  if (record == nullptr) return nullptr;
  const auto it = record->ranks.find(rank);
  return it == record->ranks.end() ? nullptr : it->second.get();
}

GenerationRecord& Generations::Add(BeginGeneration begin) {
  GenerationRecord& record = all_[begin.generation];
  record.begin = std::move(begin);
  return record;
}

bool Generations::AnyIn(Phase phase) const {
  return std::any_of(all_.begin(), all_.end(), [=](const auto& item) { return item.second.phase == phase; });
}

bool Generations::AnyLive() const {
  return std::any_of(all_.begin(), all_.end(),
                     [](const auto& item) { return item.second.phase != Phase::kGone; });
}

}  // namespace gtrain::keeper
