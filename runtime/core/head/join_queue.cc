#include "runtime/core/head/join_queue.h"

#include <algorithm>

#include "absl/time/time.h"

namespace gtrain::core {
namespace {

constexpr size_t kRatesMax = 4'096;  // addresses that are remembered

}  // namespace

bool JoinQueue::WithinRate(const One& one, Instant now) {
  // A forgotten address begins with a whole burst again: only an address that keeps asking is held back.
  if (rates_.size() >= kRatesMax) {
    std::erase_if(rates_, [&](const auto& rate) { return now - rate.second.asked_at() > absl::Seconds(10); });
    if (rates_.size() >= kRatesMax) rates_.erase(rates_.begin());
  }
  const RateLimit whole(kBurst, kPerSecond, now);
  return rates_.try_emplace({one.address, one.token}, whole).first->second.Take(now);
}

bool JoinQueue::Add(One one, Instant now) {
  if (!WithinRate(one, now)) return ++dropped_, false;
  const Id id(one.token, one.join.public_key);
  if (const auto known = known_.find(id); known != known_.end()) {
    known->second->route = std::move(one.route);
    return true;
  }
  std::deque<One>& of_token = waiting_[one.token];
  if (count_ >= kWaitingMax || of_token.size() >= kWaitingOfToken) {
    if (of_token.empty()) waiting_.erase(one.token);
    return ++dropped_, false;
  }
  known_[id] = &of_token.emplace_back(std::move(one));
  ++count_;
  return true;
}

std::vector<JoinQueue::One> JoinQueue::Take() {
  if (!batch_.empty()) return {};
  while (count_ > 0 && batch_.size() < kBatchMax) {
    auto next = waiting_.upper_bound(last_);
    if (next == waiting_.end()) next = waiting_.begin();
    last_ = next->first;
    batch_.push_back(std::move(next->second.front()));
    next->second.pop_front();
    --count_;
    if (next->second.empty()) waiting_.erase(next);
  }
  for (One& one : batch_) known_[{one.token, one.join.public_key}] = &one;
  return batch_;
}

std::vector<std::string> JoinQueue::Done() {
  std::vector<std::string> routes;
  for (One& one : batch_) {
    known_.erase({one.token, one.join.public_key});
    routes.push_back(std::move(one.route));
  }
  batch_.clear();
  return routes;
}

}  // namespace gtrain::core
