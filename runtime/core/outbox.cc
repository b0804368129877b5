// Batches merge while one is with the disk (group commit): a slow disk makes batches larger, not
// the queue longer. Effects are held in one queue in the order they were made, so nothing overtakes
// what it was computed after, apart from what leaves at once by its kind.
#include "runtime/core/outbox.h"

#include <algorithm>

#include "base/check.h"

namespace gtrain::core {
namespace {

bool LeavesAtOnce(const Effect& effect) {
  if (const auto* send = std::get_if<SendToNode>(&effect)) return send->kind == SendKind::kNow;
  return std::holds_alternative<RefusePeer>(effect);
}

}  // namespace

uint64_t Outbox::Newest() const { return pending_.empty() ? next_ - 1 : next_; }

void Outbox::Queue(Persist persist) {
  for (RecordWrite& write : persist.writes) {
    const auto same = std::find_if(pending_.begin(), pending_.end(),
                                   [&](const RecordWrite& other) { return other.key == write.key; });
    if (same == pending_.end()) {
      pending_.push_back(std::move(write));
    } else {
      same->record = std::move(write.record);
      ++stats_.writes_merged;
    }
  }
}

void Outbox::DropCovered(const NodeId& node, const Revoke& revoke) {
  const auto covered = [&](const Held& held) {
    const auto* send = std::get_if<SendToNode>(&held.effect);
    if (send == nullptr || send->kind != SendKind::kGrant || send->node != node) return false;
    const auto* start = std::get_if<StartGeneration>(&send->message);
    return start != nullptr && start->grant.job == revoke.job && start->grant.generation <= revoke.generation;
  };
  stats_.grants_dropped += std::erase_if(held_, covered);
}

std::vector<Effect> Outbox::Add(StepResult step) {
  // The writes of one step belong to every promise of that step, wherever they stand in it.
  for (Effect& effect : step.effects) {
    if (auto* persist = std::get_if<Persist>(&effect)) Queue(std::move(*persist));
  }
  std::vector<Effect> now;
  for (Effect& effect : step.effects) {
    if (std::holds_alternative<Persist>(effect)) continue;
    if (LeavesAtOnce(effect)) {
      if (const auto* send = std::get_if<SendToNode>(&effect)) {
        if (const auto* revoke = std::get_if<Revoke>(&send->message)) DropCovered(send->node, *revoke);
      }
      now.push_back(std::move(effect));
    } else if (held_.empty() && Newest() <= durable_) {
      now.push_back(std::move(effect));
    } else {
      held_.push_back({Newest(), std::move(effect)});
    }
  }
  stats_.held_now = held_.size();
  return now;
}

std::optional<OutboxBatch> Outbox::NextBatch() {
  if (in_flight_ || pending_.empty()) return std::nullopt;
  in_flight_ = true;
  ++stats_.batches;
  OutboxBatch batch{next_++, std::move(pending_)};
  pending_.clear();
  return batch;
}

std::vector<Effect> Outbox::Durable(uint64_t sequence) {
  GT_CHECK(in_flight_ && sequence == next_ - 1);
  in_flight_ = false;
  durable_ = sequence;
  std::vector<Effect> released;
  while (!held_.empty() && held_.front().after <= durable_) {
    released.push_back(std::move(held_.front().effect));
    held_.pop_front();
  }
  stats_.held_now = held_.size();
  return released;
}

}  // namespace gtrain::core
