#include "runtime/core/agent/keeper_order.h"

#include <algorithm>
#include <variant>

#include "base/probe.h"

namespace gtrain::core {
namespace {

// The generations up to which the command ends ranks; 0: it ends none.
uint64_t EndsUpTo(const keeper::Command& command) {
  if (std::holds_alternative<keeper::Quit>(command)) return UINT64_MAX;
  const auto* end = std::get_if<keeper::EndGeneration>(&command);
  return end == nullptr ? 0 : end->generation;
}

}  // namespace

KeeperOrder::Way KeeperOrder::Send(const ToKeeper& order, bool files_wait, bool has_keeper) {
  const bool begins = std::holds_alternative<keeper::BeginGeneration>(order.command) ||
                      std::holds_alternative<keeper::StartRank>(order.command);
  if (!files_wait) return {true, std::nullopt};
  const uint64_t ended = EndsUpTo(order.command);
  // A lease is for ranks whose keeper is started only by what waits; any other keeper takes it now.
  const bool lease = std::holds_alternative<keeper::Fence>(order.command) && !has_keeper;
  if (!begins && ended == 0 && !lease) return {true, std::nullopt};
  Waiting& waiting = jobs_[order.job];
  waiting.newest = next_ticket_++;
  if (ended > 0) {
    // A later end of as many generations says all that the earlier ones did.
    while (!waiting.ended.empty() && waiting.ended.back().generation <= ended) waiting.ended.pop_back();
    waiting.ended.push_back({waiting.newest, ended});
  }
  return {!begins, waiting.newest};
}

bool KeeperOrder::Passes(const ToKeeper& order, uint64_t ticket) {
  const auto it = jobs_.find(order.job);
  if (it == jobs_.end()) return true;
  Waiting& waiting = it->second;
  const auto* start = std::get_if<keeper::StartRank>(&order.command);
  const bool lost = ticket < waiting.void_before;
  const bool over =
      start != nullptr && std::any_of(waiting.ended.begin(), waiting.ended.end(), [&](const Ended& end) {
        return end.ticket > ticket && end.generation >= start->generation;
      });
  if (over) GT_PROBE("agent.end_overtakes_start");
  if (lost) GT_PROBE("agent.keeper_lost_before_begin");
  std::erase_if(waiting.ended,
                [&](const Ended& end) { return end.ticket <= ticket; });  // nothing older waits
  if (ticket == waiting.newest) jobs_.erase(it);
  return !over && !lost;
}

void KeeperOrder::KeeperLost(const JobId& job) {
  const auto it = jobs_.find(job);
  if (it != jobs_.end()) it->second.void_before = next_ticket_;
}

}  // namespace gtrain::core
