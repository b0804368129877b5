#include "runtime/core/head/relays.h"

#include <algorithm>
#include <tuple>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/probe.h"

namespace gtrain::core {
namespace {

constexpr absl::Duration kPlanEvery = absl::Seconds(1);
constexpr absl::Duration kMovePatience = absl::Seconds(30);  // ConnectVia to the hello that comes through it
// An agent that came back from its relay is moved again after kAgainMin, doubling while that goes on.
constexpr absl::Duration kAgainMin = absl::Seconds(10), kAgainMax = absl::Minutes(10);
constexpr size_t kMovesMax = 2'000;
constexpr size_t kRelaysMax = 400;   // then each has more children
constexpr size_t kOwnRelayFrom = 8;  // so many of one rack have a relay of their own

std::string LabelOf(const Node& node, const char* name) {
  const auto it = node.record.labels.find(name);
  return it == node.record.labels.end() ? "" : it->second;
}

std::string RackOf(const Node& node) {
  return absl::StrCat(LabelOf(node, "zone"), "/", LabelOf(node, "rack"));
}

std::string EndpointOf(const Node& node) {
  const std::string& address = node.record.address;
  return absl::StrContains(address, ':') ? absl::StrCat("[", address, "]:", node.relay_port)
                                         : absl::StrCat(address, ":", node.relay_port);
}

}  // namespace

void Relays::Soon(Instant when) { next_plan_ = std::min(next_plan_.value_or(when), when); }

bool Relays::MayRelay(const Node& node) const {
  return node.welcomed && node.state == NodeState::kAlive && node.knows_relays && node.via.empty() &&
         !node.relay_failed && !node.Leaving() && !children_.contains(node.record.id);
}

bool Relays::MayMove(const Node& node, Instant now) const {
  return node.welcomed && node.state == NodeState::kAlive && node.knows_relays && node.via.empty() &&
         now >= node.via_after && !children_.contains(node.record.id) && !relays_.contains(node.record.id);
}

size_t Relays::Most() const {
  return std::max(static_cast<size_t>(context_.config().relay_children), model_.nodes.size() / kRelaysMax);
}

size_t Relays::Room(const NodeId& relay) const {
  const size_t most = Most();
  const auto it = relays_.find(relay);
  return it == relays_.end() ? most : most - std::min(most, it->second.children.size());
}

void Relays::Put(const NodeId& child, const NodeId& relay) {
  children_[child] = {relay, {}};
  relays_[relay].children.insert(child);
  relays_[relay].changed = true;
}

void Relays::Unassign(const NodeId& child) {
  const auto it = children_.find(child);
  if (it == children_.end()) return;
  const auto relay = relays_.find(it->second.relay);
  if (relay != relays_.end()) {
    relay->second.children.erase(child);  // it is told when another one comes
    if (relay->second.children.empty()) relays_.erase(relay);
  }
  children_.erase(it);
}

// ---------------------------------------------------------------- what is heard

void Relays::OnHello(Node& node, Instant now) {
  const NodeId& id = node.record.id;
  const auto child = children_.find(id);
  if (!node.via.empty()) {
    if (child == children_.end() || child->second.relay != node.via) {  // told so by a head before this one
      Unassign(id);
      Put(id, node.via);
      children_[id].told = now;
    }
    node.via_since = now;
  } else if (child != children_.end() && child->second.told) {
    GT_PROBE("head.child_is_direct_again");
    Unassign(id);
    if (now - node.via_since >= kAgainMax) node.via_again = absl::ZeroDuration();  // it worked for long
    node.via_again = std::clamp(2 * node.via_again, kAgainMin, kAgainMax);
    node.via_after = now + node.via_again;
  }
  // A relay that connects anew may have started anew, and lets nobody in until it is told.
  if (const auto relay = relays_.find(id); relay != relays_.end()) relay->second.changed = true;
  if (context_.config().relay_from > 0) Soon(std::max(now + kPlanEvery, node.via_after));
}

void Relays::OnReady(Node& relay, const RelayReady& ready, Instant now) {
  const auto it = relays_.find(relay.record.id);
  if (it == relays_.end()) return;
  relay.relay_port = ready.port;
  relay.relay_failed = ready.port == 0;
  if (relay.relay_failed) {
    GT_PROBE("head.relay_cannot");
    context_.Say(absl::StrCat(relay.record.hostname, " cannot be gone through: ", ready.error));
    for (const NodeId& child : std::set<NodeId>(it->second.children)) Unassign(child);
    return Soon(now + kPlanEvery);
  }
  for (const NodeId& id : it->second.children) {
    const auto child = model_.nodes.find(id);
    if (child != model_.nodes.end() && !children_.at(id).told) Send(child->second, relay, now);
  }
}

void Relays::Forget(const NodeId& node) {
  Unassign(node);
  const auto relay = relays_.find(node);
  if (relay == relays_.end()) return;
  for (const NodeId& child : std::set<NodeId>(relay->second.children)) Unassign(child);
  relays_.erase(node);
}

// ---------------------------------------------------------------- the plan

void Relays::Send(Node& child, const Node& relay, Instant now) {
  children_.at(child.record.id).told = now;
  context_.Send(child.record.id, SendKind::kReply,
                ConnectVia{model_.epoch(), relay.record.id, EndpointOf(relay), relay.public_key});
}

// Those who did not get through have not said so: they go on as they were.
void Relays::GiveUpOnSlow(Instant now) {
  std::vector<NodeId> slow;
  for (const auto& [id, child] : children_) {
    const auto node = model_.nodes.find(id);
    const bool there = node != model_.nodes.end() && node->second.via == child.relay;
    if (there || !child.told) continue;
    if (now - *child.told >= kMovePatience) {
      slow.push_back(id);
    } else {
      Soon(*child.told + kMovePatience);
    }
  }
  for (const NodeId& id : slow) {
    GT_PROBE("head.child_does_not_get_through");
    Unassign(id);
    const auto node = model_.nodes.find(id);
    if (node == model_.nodes.end()) continue;
    node->second.via_again = std::clamp(2 * node->second.via_again, kAgainMin, kAgainMax);
    node->second.via_after = now + node->second.via_again;
  }
}

// By rack, and in a rack by name, where that says something.
std::vector<NodeId> Relays::WhoMoves(Instant now) {
  using Place = std::tuple<std::string, std::string, NodeId>;
  std::vector<Place> found;
  for (const auto& [id, node] : model_.nodes) {
    if (MayMove(node, now)) found.emplace_back(RackOf(node), node.record.hostname, id);
    if (node.welcomed && node.via.empty() && now < node.via_after) Soon(node.via_after);
  }
  std::sort(found.begin(), found.end());
  if (found.size() > kMovesMax) {
    found.resize(kMovesMax);
    Soon(now + kPlanEvery);
  }
  std::vector<NodeId> who;
  for (auto& [rack, name, id] : found) who.push_back(std::move(id));
  return who;
}

// Fills the room of these relays; who is left over stays in `who`.
void Relays::Assign(std::vector<NodeId> who, const std::vector<NodeId>& relays) {
  for (const NodeId& relay : relays) {
    for (size_t room = Room(relay); room > 0 && !who.empty(); --room) {
      Put(who.back(), relay);
      who.pop_back();
    }
  }
}

// The first of each relay_children + 1 that can becomes the relay of the others.
void Relays::Found(const std::vector<NodeId>& who, size_t own_relay_from, std::vector<NodeId>* left) {
  const size_t most = Most();
  for (size_t begin = 0; begin < who.size(); begin += most + 1) {
    const size_t end = std::min(who.size(), begin + most + 1);
    const auto relay =
        std::find_if(who.begin() + static_cast<ptrdiff_t>(begin), who.begin() + static_cast<ptrdiff_t>(end),
                     [&](const NodeId& id) { return MayRelay(model_.nodes.at(id)); });
    if (end - begin < own_relay_from || relay == who.begin() + static_cast<ptrdiff_t>(end)) {
      if (left != nullptr)
        left->insert(left->end(), who.begin() + static_cast<ptrdiff_t>(begin),
                     who.begin() + static_cast<ptrdiff_t>(end));
      continue;
    }
    for (size_t i = begin; i < end; ++i) {
      if (who[i] != *relay) Put(who[i], *relay);
    }
  }
}

void Relays::Tell(Instant now) {
  for (auto& [id, relay] : relays_) {
    const auto node = model_.nodes.find(id);
    if (!relay.changed || node == model_.nodes.end() || !node->second.welcomed) continue;
    relay.changed = false;
    RelayFor told{model_.epoch(), {}};
    for (const NodeId& child : relay.children) {
      const auto known = model_.nodes.find(child);
      if (known != model_.nodes.end() && !known->second.public_key.empty())
        told.children.push_back({child, known->second.public_key});
    }
    context_.Send(id, SendKind::kReply, std::move(told));
    if (node->second.relay_port == 0) continue;  // it answers with one
    for (const NodeId& child : relay.children) {
      const auto known = model_.nodes.find(child);
      if (known != model_.nodes.end() && !children_.at(child).told) Send(known->second, node->second, now);
    }
  }
}

// The relays with room, by rack.
std::map<std::string, std::vector<NodeId>> Relays::WithRoom() const {
  std::map<std::string, std::vector<NodeId>> open;
  for (const auto& [id, relay] : relays_) {
    const auto node = model_.nodes.find(id);
    if (node != model_.nodes.end() && MayRelay(node->second) && Room(id) > 0)
      open[RackOf(node->second)].push_back(id);
  }
  return open;
}

// A child needs some seconds to notice that its relay is gone, and to come back.
bool Relays::Patient() const { return context_.config().dead_after >= absl::Seconds(8); }

void Relays::Plan(Instant now) {
  if (!next_plan_ || now < *next_plan_) return;
  next_plan_.reset();
  GiveUpOnSlow(now);
  const auto alive = std::count_if(model_.nodes.begin(), model_.nodes.end(), [](const auto& item) {
    return item.second.welcomed && item.second.state == NodeState::kAlive;
  });
  if (context_.config().relay_from > 0 && alive >= context_.config().relay_from && Patient()) {
    std::vector<NodeId> left;
    std::map<std::string, std::vector<NodeId>> racks;
    for (NodeId& id : WhoMoves(now)) racks[RackOf(model_.nodes.at(id))].push_back(std::move(id));
    const auto unplaced = [&](const std::vector<NodeId>& who) {
      std::vector<NodeId> rest;
      std::copy_if(who.begin(), who.end(), std::back_inserter(rest),
                   [&](const NodeId& id) { return !children_.contains(id) && !relays_.contains(id); });
      return rest;
    };
    const std::map<std::string, std::vector<NodeId>> open = WithRoom();
    for (const auto& [rack, who] : racks) {
      if (const auto own = open.find(rack); own != open.end()) Assign(who, own->second);
      Found(unplaced(who), kOwnRelayFrom, &left);
    }
    for (const auto& [rack, relays] : WithRoom()) Assign(unplaced(left), relays);
    Found(unplaced(left), 2, nullptr);
  }
  Tell(now);
}

}  // namespace gtrain::core
