// Fixed thresholds on silence, as the documentation promises deadlines that people can read. The one
// subtle part is our own pause: after SIGSTOP, a migrated VM or a slow disk, every heartbeat of the
// last minute may still sit in a socket while timers fire in bulk. NextDeadline therefore asks for a
// tick every interval while anybody is watched, so what a gap between two steps is longer can only be
// ours, and that is nobody's silence.
#include "runtime/core/head/failure_detector.h"

#include <algorithm>

namespace gtrain::core {

bool FailureDetector::Awake(Instant now) {
  const Instant last = awake_.value_or(now);
  awake_ = now;
  slept_ = absl::ZeroDuration();
  if (now - last <= options_.interval) return false;
  const absl::Duration slept = now - last - options_.interval;
  for (auto& [node, entry] : nodes_) {
    if (entry.level != Level::kDead) slept_ = slept;
    const Instant shifted = std::min(now, entry.heard + slept);
    entry.heard = std::max(entry.heard, shifted);  // a longer first patience is not shortened
  }
  return now - last > 2 * options_.interval && !nodes_.empty();
}

FailureDetector::Entry* FailureDetector::Heard(const NodeId& node, Instant now) {
  const auto [it, fresh] = nodes_.try_emplace(node);
  if (fresh) first_due_.reset();
  Heard(it->second, now);
  return &it->second;
}

void FailureDetector::Heard(Entry& entry, Instant now) {
  if (entry.level != Level::kAlive || entry.heard > now) first_due_.reset();
  entry = {std::max(now, entry.heard), Level::kAlive, {}, entry.extra};  // a longer first patience stays
}

void FailureDetector::Forget(const NodeId& node) {
  first_due_.reset();
  nodes_.erase(node);
}

void FailureDetector::Expect(const NodeId& node, Instant now, absl::Duration extra) {
  first_due_.reset();
  nodes_[node] = {now + extra, Level::kAlive, {}, {}};
}

std::optional<FailureDetector::Change> FailureDetector::Suspect(const NodeId& node, Instant now) {
  const auto it = nodes_.find(node);
  if (it == nodes_.end() || it->second.level == Level::kDead) return std::nullopt;
  Entry& entry = it->second;
  entry.heard = std::min(entry.heard, now - options_.suspect_after);
  // A thousand connections of a machine break at once: nobody else's time is looked at for each of them.
  if (first_due_) first_due_ = std::min(first_due_->value_or(DeathOf(entry)), DeathOf(entry));
  if (entry.level == Level::kSuspect) return std::nullopt;
  entry.level = Level::kSuspect;
  return Change{node, Level::kSuspect, now - entry.heard};
}

void FailureDetector::Spare(const NodeId& node, Instant until) {
  const auto it = nodes_.find(node);
  if (it == nodes_.end()) return;
  first_due_.reset();
  it->second.level = Level::kSuspect;
  it->second.spared_until = until;
}

void FailureDetector::Patience(const NodeId& node, absl::Duration extra) {
  const auto it = nodes_.find(node);
  first_due_.reset();
  if (it != nodes_.end()) it->second.extra = extra;
}

Instant FailureDetector::DeathOf(const Entry& entry) const {
  const Instant due = entry.heard + options_.dead_after + entry.extra;
  return entry.spared_until ? std::max(due, *entry.spared_until) : due;
}

std::vector<FailureDetector::Change> FailureDetector::Advance(Instant now) {
  if (first_due_ && (!*first_due_ || now < **first_due_)) return {};  // nobody's time has come
  first_due_.reset();
  std::vector<Change> changes;
  for (auto& [node, entry] : nodes_) {
    const absl::Duration silence = now - entry.heard;
    Level level = Level::kAlive;
    if (silence >= options_.suspect_after) level = Level::kSuspect;
    if (now >= DeathOf(entry) || entry.level == Level::kDead) level = Level::kDead;
    if (level != entry.level) changes.push_back({node, level, silence});
    entry.level = level;
  }
  std::ranges::sort(changes, {}, &Change::node);
  return changes;
}

std::optional<Instant> FailureDetector::FirstDue() const {
  std::optional<Instant> next;
  for (const auto& [node, entry] : nodes_) {
    if (entry.level == Level::kDead) continue;
    const Instant due = entry.level == Level::kAlive ? entry.heard + options_.suspect_after : DeathOf(entry);
    next = std::min(next.value_or(due), due);
  }
  return next;
}

std::optional<Instant> FailureDetector::NextDeadline() const {
  if (!first_due_) first_due_ = FirstDue();
  std::optional<Instant> next = *first_due_;
  if (next && awake_) next = std::min(*next, *awake_ + options_.interval);
  return next;
}

}  // namespace gtrain::core
