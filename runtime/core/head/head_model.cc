#include "runtime/core/head/head_model.h"

#include <algorithm>

namespace gtrain::core {

Node& HeadModel::AddNode(const NodeId& id) {
  Node& node = nodes[id];
  by_id_[id] = &node;
  return node;
}

void HeadModel::DropNode(const NodeId& id) {
  by_id_.erase(id);
  nodes.erase(id);
}

Job* HeadModel::FindJob(const JobId& id) {
  const auto it = jobs.find(id);
  return it == jobs.end() ? nullptr : &it->second;
}

const Job* HeadModel::FindJob(const JobId& id) const {
  const auto it = jobs.find(id);
  return it == jobs.end() ? nullptr : &it->second;
}

std::vector<Job*> HeadModel::LiveJobs() {
  std::vector<Job*> live;
  std::erase_if(live_jobs, [](const auto& item) { return IsFinal(item.second->record.state); });
  for (const auto& [number, job] : live_jobs) live.push_back(job);
  return live;
}

bool HeadModel::AllAreHeard(const Job& job, absl::Duration time, Instant now) const {
  return std::ranges::all_of(job.record.grant->nodes, [&](const NodePlace& place) {
    const auto node = nodes.find(place.node);
    return node != nodes.end() && now - node->second.heard_at <= time;
  });
}

std::string HeadModel::Hostname(const NodeId& id) const {
  const auto it = nodes.find(id);
  return it == nodes.end() ? id.value : it->second.record.hostname;
}

}  // namespace gtrain::core
