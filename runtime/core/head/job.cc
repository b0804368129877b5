#include "runtime/core/head/job.h"

#include <algorithm>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/path.h"

namespace gtrain::core {

bool Job::HoldsNode(const NodeId& node) const {
  if (!record.grant) return false;
  const std::vector<NodePlace>& nodes = record.grant->nodes;
  // Each message of each node of the job asks this, so at n nodes a search is n * n. Where a node stood when
  // it was looked for last is a hint; only what stands there now counts.
  const auto hint = place_hints.find(node);
  if (hint != place_hints.end() && hint->second < nodes.size() && nodes[hint->second].node == node)
    return true;
  const auto it = std::ranges::find(nodes, node, &NodePlace::node);
  if (it == nodes.end()) return false;
  place_hints.clear();
  for (size_t i = 0; i < nodes.size(); ++i) place_hints[nodes[i].node] = i;
  return true;
}

bool Job::ProcessesStay() const {
  return spec.in_place && record.grant &&
         (stays || std::ranges::any_of(record.grant->ranks, [](const RankPlace& place) {
            return place.process.generation.value != 0;
          }));
}

bool Job::NeedsNode(const NodeId& node) const {
  const bool waits = std::ranges::any_of(waiting, [&](const WaitingRank& one) {
    return !one.over && record.grant->waiting[static_cast<size_t>(&one - waiting.data())].node == node;
  });
  return waits || std::ranges::any_of(record.grant->ranks, [&](const RankPlace& place) {
           return place.node == node && ExitOf(place.rank) == nullptr;
         });
}

bool Job::Unreleased(const NodeId& node) const {
  return std::find(record.unreleased.begin(), record.unreleased.end(), node) != record.unreleased.end();
}

const GenerationGrant* Job::GrantOf(Generation generation) const {
  if (record.grant && record.grant->generation == generation) return &*record.grant;
  const auto before = past.find(generation);
  return before == past.end() ? nullptr : &before->second;
}

int Job::NodesWithRanks(const GenerationGrant& grant) const {
  if (record.grant && &grant == &*record.grant && grant.generation == nodes_with_ranks.first)
    return nodes_with_ranks.second;
  std::set<NodeId> nodes;
  for (const RankPlace& place : grant.ranks) nodes.insert(place.node);
  return static_cast<int>(nodes.size());
}

int Job::SizeOf(const GenerationGrant& grant) const {
  int ranks = static_cast<int>(grant.ranks.size()), all = ranks + static_cast<int>(grant.waiting.size());
  if (demand.count_nodes) {
    ranks = NodesWithRanks(grant), all = static_cast<int>(grant.nodes.size());
  }
  // What waits and is neither to join them nor a spare is too much.
  const int surplus = std::max(0, all - std::max(ranks, demand.max) - Spares());
  return std::max(ranks, std::min(all, demand.max)) + surplus;
}

bool Job::SurvivorsWait() const {
  if (kept.empty() || !record.grant) return false;
  return std::ranges::any_of(record.grant->ranks, [&](const RankPlace& place) {
    const auto there = kept.find(place.node);
    return there != kept.end() && std::ranges::count(there->second, ProcessOf(*record.grant, place.rank)) > 0;
  });
}

int Job::RanksOf(const GenerationGrant& grant) const {
  const int size = SizeOf(grant);
  if (!demand.count_nodes) return size;
  std::map<NodeId, int> of_node;
  for (const auto* places : {&grant.ranks, &grant.waiting}) {
    for (const RankPlace& place : *places) ++of_node[place.node];
  }
  int count = 0;
  for (size_t i = 0; i < grant.nodes.size() && i < static_cast<size_t>(size); ++i)
    count += of_node[grant.nodes[i].node];
  return count;
}

const RankExit* Job::ExitOf(int rank) const {
  if (static_cast<size_t>(rank) < ranks.size())
    return ranks[rank].exit < 0 ? nullptr : &record.exits[static_cast<size_t>(ranks[rank].exit)];
  for (const RankExit& exit : record.exits) {  // of a job that was over before this head started
    if (exit.rank == rank) return &exit;
  }
  return nullptr;
}

void Job::CountStep(const RankLive& rank, int count) {
  if (!rank.status.step || rank.exit >= 0) return;
  const auto it = steps.try_emplace(*rank.status.step).first;
  it->second += count;
  if (it->second == 0) steps.erase(it);
}

void Job::SetStatus(RankLive& rank, const RankStatus& status) {
  CountStep(rank, -1);
  if (status.step && rank.status.step && *status.step < *rank.status.step)
    began_anew += static_cast<int>(!std::exchange(rank.began_anew, true));
  rank.status = status;
  CountStep(rank, 1);
}

void Job::SetStarted(RankLive& rank) {
  if (!rank.started && rank.exit < 0) --not_started;
  rank.started = any_started = true;
}

void Job::SetExit(RankLive& rank, RankExit exit) {
  CountStep(rank, -1);
  if (!rank.started) --not_started;
  if (std::exchange(rank.idle_since, std::nullopt)) --idle;
  if (std::exchange(rank.began_anew, false)) --began_anew;
  rank.exit = static_cast<int>(record.exits.size());
  rank.status.state = RankState::kExited;
  record.exits.push_back(std::move(exit));
}

size_t BytesOfUser(const std::string& spec_text, const std::map<std::string, std::string>& env) {
  size_t bytes = spec_text.size();
  for (const auto& [name, value] : env) bytes += name.size() + value.size();
  return bytes;
}

std::string LocationOf(const spec::JobSpec& spec) {
  absl::string_view uri = spec.checkpoint.uri;
  if (uri.empty() || spec.checkpoint.read_only) return "";
  std::string location(uri);
  if (!absl::StrContains(uri, "://") || absl::ConsumePrefix(&uri, "file://")) {
    location = JoinPath(spec.workdir, uri);
  }
  while (location.size() > 1 && location.back() == '/' && !absl::EndsWith(location, "://"))
    location.pop_back();
  return location;
}

std::string Shortened(std::string text, size_t bytes) {
  if (text.size() <= bytes) return text;
  while (bytes > 0 && (static_cast<unsigned char>(text[bytes]) & 0xC0) == 0x80) --bytes;
  return text.substr(0, bytes);
}

std::string LastBytes(const std::string& text, size_t bytes) {
  return text.size() <= bytes ? text : text.substr(text.size() - bytes);
}

}  // namespace gtrain::core
