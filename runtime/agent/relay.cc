#include "runtime/agent/relay.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/wire/codec.h"

namespace gtrain::agent {
namespace {

// A child beats ten times before it counts as dead; this adds half an interval to its silence.
constexpr absl::Duration kBeatEvery = absl::Milliseconds(500);
constexpr size_t kFrameBytes = 1 << 20;  // then the next one is begun
constexpr size_t kFrameParts = 1'000;
constexpr size_t kChildParts = 16;      // of one frame of a child; an honest one sends one
constexpr size_t kTurnBytes = 8 << 20;  // of children, read in one turn; the rest waits in its connection
// A node that speaks on another connection than a moment ago is two machines with one key (fault N4), or has
// connected anew and says so again.
constexpr absl::Duration kOneConnection = absl::Seconds(3);
constexpr int kChildMessagesATurn = 5'000;
constexpr size_t kChildrenMax = 4'096;

size_t BytesOf(const core::RelayedUp& up) {
  size_t bytes = 0;
  for (const core::RelayPart& part : up.parts) bytes += part.bytes.size() + 64;
  return bytes;
}

}  // namespace

void Relay::Tell(const NodeId& node, const Child& child, core::RelayStage stage) {
  core::RelayedDown down;
  down.parts.push_back({node, stage});
  (void)transport_->Send({child.route}, wire::Encode(down));
}

void Relay::PassOn(core::RelayedUp up) {
  const size_t bytes = BytesOf(up);
  hurry_ =
      hurry_ || std::any_of(up.parts.begin(), up.parts.end(), [](const auto& part) { return !part.waits; });
  if (out_.empty() || out_bytes_ + bytes > kFrameBytes ||
      out_.back().parts.size() + up.parts.size() > kFrameParts) {
    out_.push_back(std::move(up));
    out_bytes_ = bytes;
    return;
  }
  for (core::RelayPart& part : up.parts) out_.back().parts.push_back(std::move(part));
  out_bytes_ += bytes;
}

// Only its own node can speak on a connection: the parts of others are dropped.
void Relay::Hear(const port::Received& received, Instant now) {
  absl::StatusOr<core::Message> message = wire::Decode(received.payload, wire::Sender::kAgent);
  auto* up = message.ok() ? std::get_if<core::RelayedUp>(&*message) : nullptr;
  if (up == nullptr || !up->heard.empty() || up->parts.size() > kChildParts) return;
  const NodeId node(received.peer.key_id);
  if (!children_.contains(node) && children_.size() >= kChildrenMax) return;
  Child& child = children_[node];
  if (child.route != received.route.id) {
    if (!child.route.empty() && now - child.at < kOneConnection) return;
    child = {received.route.id};
  }
  child.at = now;
  std::erase_if(up->parts, [&](const core::RelayPart& part) {
    return part.node != node ||
           (part.stage != core::RelayStage::kOpen && part.stage != core::RelayStage::kSealed);
  });
  if (!head_) return Tell(node, child, core::RelayStage::kLost);
  if (!up->parts.empty()) return PassOn(std::move(*up));
  if (child.number != 0 && !std::exchange(child.heard, true)) heard_.push_back(child.number);
  (void)transport_->Send({child.route}, wire::Encode(core::RelayedDown{}));
}

std::vector<core::RelayedUp> Relay::Turn(Instant now) {
  size_t bytes = 0;
  for (int i = 0; i < kChildMessagesATurn; ++i) {
    const std::optional<port::Received> received = bytes > kTurnBytes ? std::nullopt : transport_->Receive();
    if (!received) break;
    bytes += received->payload.size();
    if (received->payload.size() <= kRelayedBytesMax + (32 << 10)) Hear(*received, now);
  }
  const bool beat = now >= next_beat_ && (!heard_.empty() || !out_.empty());
  if (!beat && !hurry_) return {};
  if (beat) {
    next_beat_ = now + kBeatEvery;
    // Apart from what children say, so that no child can make it unreadable.
    if (!heard_.empty()) out_.push_back({{}, std::exchange(heard_, {})});
    for (auto& [node, child] : children_) child.heard = false;
  }
  hurry_ = false;
  return std::exchange(out_, {});
}

std::optional<Instant> Relay::NextDeadline() const {
  return heard_.empty() && out_.empty() ? std::nullopt : std::optional(next_beat_);
}

void Relay::OnDown(const core::RelayedDown& down) {
  for (const core::RelayPart& part : down.parts) {
    const auto it = children_.find(part.node);
    if (it == children_.end()) continue;
    if (part.stage == core::RelayStage::kAnswer) it->second.number = part.number;
    core::RelayedDown one;
    one.parts.push_back(part);
    if (part.stage == core::RelayStage::kShared) {
      if (part.body >= down.bodies.size()) continue;
      one.bodies.push_back(down.bodies[part.body]);
      one.parts.back().body = 0;
    }
    if (transport_->Send({it->second.route}, wire::Encode(one)).ok()) continue;
    Tell(it->first, it->second, core::RelayStage::kOver);  // where it still hears anything
  }
}

void Relay::SetHead(bool there) {
  if (there == head_) return;
  head_ = there;
  heard_.clear();
  out_.clear();
  hurry_ = false;
  for (auto& [node, child] : children_) {
    child.number = 0;
    child.heard = false;
    Tell(node, child, there ? core::RelayStage::kFound : core::RelayStage::kLost);
  }
}

void Relay::Forget(Instant since, const std::set<NodeId>& keep) {
  std::erase_if(children_,
                [&](const auto& item) { return item.second.at < since && !keep.contains(item.first); });
}

std::vector<NodeId> Relay::Children(Instant since) const {
  std::vector<NodeId> all;
  for (const auto& [node, child] : children_) {
    if (child.at >= since) all.push_back(node);
  }
  return all;
}

}  // namespace gtrain::agent
