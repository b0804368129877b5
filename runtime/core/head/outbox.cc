// Batches merge while one is with the disk (group commit): a slow disk makes batches larger, not
// the queue longer. Effects are held in one queue in the order they were made, so nothing overtakes
// what it was computed after, apart from what leaves at once by its kind.
#include "runtime/core/head/outbox.h"

#include <algorithm>

#include "base/check.h"
#include "base/probe.h"

namespace gtrain::core {
namespace {

bool LeavesAtOnce(const Effect& effect) {
  if (const auto* send = std::get_if<SendToNode>(&effect)) return send->kind == SendKind::kNow;
  // It promises nothing, and would pile up here while a disk is full.
  if (std::holds_alternative<MakePlan>(effect)) return true;  // it promises nothing either
  if (std::holds_alternative<SpillTail>(effect) || std::holds_alternative<DropSpilled>(effect)) return true;
  return std::holds_alternative<RefusePeer>(effect);
}

}  // namespace

uint64_t Outbox::Newest() const { return Pending() ? next_ : next_ - 1; }

void Outbox::Queue(Persist persist, bool may_wait) {
  urgent_ = urgent_ || !may_wait || !persist.audit.empty();
  for (AuditEntry& entry : persist.audit) pending_audit_.push_back(std::move(entry));
  for (RecordWrite& write : persist.writes) {
    const auto [at, fresh] = pending_at_.try_emplace(write.key, pending_.size());
    if (fresh) {
      pending_.push_back(std::move(write));
    } else {
      pending_[at->second].record = std::move(write.record);
      ++stats_.writes_merged;
      GT_PROBE("outbox.writes_merged");
    }
  }
}

void Outbox::DropCovered(const NodeId& node, const Revoke& revoke) {
  const auto covered = [&](const Held& held) {
    const auto* send = std::get_if<SendToNode>(&held.effect);
    if (send == nullptr || send->kind != SendKind::kGrant || send->node != node) return false;
    const auto* start = std::get_if<StartGeneration>(&*send->message);
    return start != nullptr && start->grant.job == revoke.job && start->grant.generation <= revoke.generation;
  };
  const size_t dropped = std::erase_if(held_, covered);
  if (dropped > 0) GT_PROBE("outbox.covered_grant_dropped");
  stats_.grants_dropped += dropped;
}

std::vector<Effect> Outbox::Add(StepResult step) {
  // The writes of one step belong to every promise of that step, wherever they stand in it.
  for (Effect& effect : step.effects) {
    if (auto* persist = std::get_if<Persist>(&effect)) Queue(std::move(*persist), step.may_wait);
  }
  std::vector<Effect> now;
  for (Effect& effect : step.effects) {
    if (std::holds_alternative<Persist>(effect)) continue;
    if (LeavesAtOnce(effect)) {
      if (const auto* send = std::get_if<SendToNode>(&effect)) {
        if (const auto* revoke = std::get_if<Revoke>(&*send->message)) DropCovered(send->node, *revoke);
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
  if (in_flight_ || !Pending()) return std::nullopt;
  in_flight_ = true;
  urgent_ = false;
  ++stats_.batches;
  pending_at_.clear();
  OutboxBatch batch{next_++, std::exchange(pending_, {}), std::exchange(pending_audit_, {})};
  requests_in_flight_.clear();
  for (const RecordWrite& write : batch.writes) {
    if (write.record && std::holds_alternative<RequestRecord>(*write.record))
      requests_in_flight_.insert(write.key);
  }
  return batch;
}

std::vector<Effect> Outbox::Durable(uint64_t sequence) {
  GT_CHECK(in_flight_ && sequence == next_ - 1);
  in_flight_ = false;
  requests_in_flight_.clear();
  durable_ = sequence;
  std::vector<Effect> released;
  while (!held_.empty() && held_.front().after <= durable_) {
    released.push_back(std::move(held_.front().effect));
    held_.pop_front();
  }
  stats_.held_now = held_.size();
  return released;
}

bool Outbox::Stored(const ReplyToClient& reply) const {
  const std::string key = KeyOf(RequestRecord{reply.client_key, reply.reply.id});
  return !pending_at_.contains(key) && !requests_in_flight_.contains(key);
}

std::vector<Effect> Outbox::TakeAnswers() {
  std::vector<Effect> answers;
  std::erase_if(held_, [&](Held& held) {
    const auto* send = std::get_if<SendToNode>(&held.effect);
    const auto* query = send == nullptr ? nullptr : std::get_if<AgentQuery>(&*send->message);
    const bool answer = std::holds_alternative<ReplyToClient>(held.effect) ||
                        std::holds_alternative<ReplyFromSpill>(held.effect) ||
                        std::holds_alternative<ServiceRequest>(held.effect) ||
                        (query != nullptr && query->kind != AgentQuery::Kind::kExec &&
                         query->kind != AgentQuery::Kind::kConsole);
    if (auto* reply = std::get_if<ReplyToClient>(&held.effect))
      reply->changes = reply->changes && !Stored(*reply);
    if (answer) answers.push_back(std::move(held.effect));
    return answer;
  });
  stats_.held_now = held_.size();
  return answers;
}

}  // namespace gtrain::core
