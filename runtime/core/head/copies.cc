// The holders are those of near_peers.h for which the job's own machines cannot stand in. They are chosen
// anew with each generation, written into the grant, and told so until the job is over.
#include "runtime/core/head/copies.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "runtime/core/head/recovery.h"
#include "runtime/core/values/near_peers.h"

namespace gtrain::core {

Copies::Copies(HeadContext& context, HeadModel& model, Recovery& recovery)
    : context_(context), model_(model), config_(context.config()), recovery_(recovery) {}

// Lists the candidates in order of preference: first those of the generation before, which have copies
// already, of their own ranks or as holders, and so stay in the grant even if others are chosen. Then those
// that keep copies for the fewest jobs.
std::vector<NodePlace> Copies::Candidates(const Job& job, const std::vector<NodePlace>& of_job,
                                          const std::set<NodeId>& before) const {
  std::set<NodeId> unwanted;
  for (const NodePlace& place : of_job) unwanted.insert(place.node);
  for (const AvoidedNode& avoided : job.record.avoided) unwanted.insert(avoided.node);
  std::map<NodeId, int> jobs;
  for (const auto& [id, other] : model_.jobs) {
    if (&other == &job || !other.Live()) continue;
    for (const NodePlace& place : other.record.grant->holders) ++jobs[place.node];
  }
  std::vector<NodePlace> places;
  for (const auto& [id, node] : model_.nodes) {
    if (node.Usable() && node.takes_copies && node.near_port > 0 && !unwanted.contains(id))
      places.push_back(PlaceOf(node));
  }
  std::stable_sort(places.begin(), places.end(), [&](const NodePlace& a, const NodePlace& b) {
    const auto order = [&](const NodePlace& place) {
      return std::make_pair(!before.contains(place.node), jobs[place.node]);
    };
    return order(a) < order(b);
  });
  return places;
}

std::vector<NodePlace> Copies::HoldersOutside(const Job& job, const std::vector<NodePlace>& of_job) const {
  const spec::CheckpointPolicy& policy = job.spec.checkpoint;
  if (policy.uri.empty() || policy.near.empty() || policy.replicas == 0 || !config_.near_secret) return {};
  std::set<NodeId> before;
  if (job.record.grant) {
    for (const NodePlace& place : job.record.grant->nodes) before.insert(place.node);
    for (const NodePlace& place : job.record.grant->holders) before.insert(place.node);
  }
  std::vector<NodePlace> places = Candidates(job, of_job, before);
  std::set<size_t> chosen;
  for (const std::vector<size_t>& mine : ChooseHolders(of_job, policy.replicas, places)) {
    for (size_t holder : mine) chosen.insert(holder);
  }
  std::vector<NodePlace> holders;
  for (size_t i = 0; i < places.size(); ++i) {
    const bool asked = before.contains(places[i].node) && holders.size() < kNearPeersMax;
    if (asked || chosen.contains(of_job.size() + i)) holders.push_back(std::move(places[i]));
  }
  return holders;
}

void Copies::TellHolder(const Job& job, const NodeId& id) {
  const auto node = model_.nodes.find(id);
  if (node == model_.nodes.end() || !node->second.takes_copies || !config_.near_secret) return;
  context_.Send(id, SendKind::kReply,
                KeepCopies{model_.epoch(), job.record.id, job.spec.checkpoint.near,
                           config_.near_secret(job.record.id)});
}

// It may have restarted, or have missed that a job is over.
void Copies::SettleCopies(const NodeId& node, const AgentHello& hello) {
  std::set<JobId> held;  // EndForgotten has settled those
  for (const HeldGeneration& generation : hello.held) held.insert(generation.job);
  for (const JobId& id : hello.copies_of) {
    const Job* job = model_.FindJob(id);
    const bool over = job != nullptr ? IsFinal(job->record.state) : !recovery_.TakesUp(id);
    if (over && !held.contains(id)) context_.Send(node, SendKind::kReply, ForgetJob{model_.epoch(), id});
  }
  for (const auto& [id, job] : model_.jobs) {
    if (IsFinal(job.record.state) || !job.record.grant) continue;
    for (const NodePlace& place : job.record.grant->holders) {
      if (place.node == node) TellHolder(job, node);
    }
  }
}

}  // namespace gtrain::core
