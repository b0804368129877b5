#include "runtime/core/agent/agent_model.h"

#include <algorithm>

#include "base/probe.h"

namespace gtrain::core {

AgentJob& AgentModel::RecordOf(const JobId& job) {
  const auto [it, fresh] = jobs.try_emplace(job);
  if (fresh) job_order.push_back(job);
  return it->second;
}

AgentGeneration* AgentModel::Find(const JobId& job, Generation generation) {
  const auto record = jobs.find(job);
  if (record == jobs.end()) return nullptr;
  const auto it = record->second.generations.find(generation);
  return it == record->second.generations.end() ? nullptr : &it->second;
}

AgentRank* AgentModel::Find(const JobId& job, Generation generation, int rank) {
  AgentGeneration* found = Find(job, generation);
  if (found == nullptr) return nullptr;
  const auto it = found->ranks.find(rank);
  return it == found->ranks.end() ? nullptr : &it->second;
}

bool AgentModel::HasLiveGeneration() const {
  for (const auto& [job, record] : jobs) {
    for (const auto& [number, generation] : record.generations) {
      if (!generation.gone) return true;
    }
  }
  return false;
}

std::vector<HeldGeneration> AgentModel::Held() const {
  std::vector<HeldGeneration> all;
  for (const auto& [job, record] : jobs) {
    for (const auto& [number, generation] : record.generations) {
      HeldGeneration held;
      held.job = job;
      held.generation = number;
      held.revoked = record.revoked;
      held.stopping = record.stopping;
      for (const auto& [rank, info] : generation.ranks) {
        const bool later = info.exit && !info.acked && generation.OwesRecords(rank);
        if (later) GT_PROBE("agent.exit_follows_records");
        if (!info.exit || later) held.live.push_back(info.status);
        if (info.exit && !info.acked && !later) held.exited.push_back(*info.exit);
      }
      if (!held.live.empty() || !held.exited.empty() || !generation.gone) all.push_back(std::move(held));
    }
  }
  return all;
}

bool AgentGeneration::OwesRecords(int rank) const {
  return std::ranges::any_of(records, [&](const AgentRecord& record) { return record.note.rank == rank; });
}

size_t AgentGeneration::Members() const {
  size_t waiting = 0;
  for (auto it = ranks.rbegin(); it != ranks.rend() && !IsMember(it->first); ++it) ++waiting;
  return ranks.size() - waiting;
}

std::vector<KeptProcesses> AgentModel::Kept() const {
  std::vector<KeptProcesses> all;
  for (const auto& [job, record] : jobs) {
    if (record.Waits()) all.push_back({job, record.kept, record.coming});
  }
  return all;
}

}  // namespace gtrain::core
