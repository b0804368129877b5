#include "runtime/head/relay_routes.h"

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "runtime/wire/packed.h"

namespace gtrain::head {
namespace {

constexpr absl::string_view kRoutePrefix = "relayed/";  // no connection's route begins so (net/zmq/server.cc)
constexpr size_t kFrameBytes = 2 << 20;  // then the next one is begun; a single message may be longer
constexpr size_t kFrameParts = 2'000;
// Shorter ones are sealed for each reader: the key of a shared one alone has 64 bytes.
constexpr size_t kSharedFrom = 1 << 10;
constexpr absl::Duration kPendingTime = absl::Seconds(10);  // from an opening to the first message
constexpr size_t kPendingMax = 200'000;

}  // namespace

std::string RelayRoutes::RouteOf(const Session& session) {
  return absl::StrCat(kRoutePrefix, session.number);
}

RelayRoutes::Session* RelayRoutes::Find(absl::string_view route) const {
  uint32_t number = 0;
  if (!absl::ConsumePrefix(&route, kRoutePrefix) || !absl::SimpleAtoi(route, &number)) return nullptr;
  const auto it = by_number_.find(number);
  // One that is pending has said nothing yet, so nobody answers it.
  if (it == by_number_.end()) return nullptr;
  const auto current = current_.find(it->second->node.value);
  return current != current_.end() && current->second.get() == it->second ? it->second : nullptr;
}

std::string RelayRoutes::PendingKey(const NodeId& node, const std::string& relay_route) {
  return absl::StrCat(node.value, "/", relay_route);
}

void RelayRoutes::DropPending(const std::string& key) {
  const auto it = pending_.find(key);
  if (it == pending_.end()) return;
  by_number_.erase(it->second->number);
  pending_.erase(it);
}

// A relay that keeps a child's first message back must not play it when the child is long elsewhere.
void RelayRoutes::ExpirePending(Instant now) {
  while (!pending_order_.empty() &&
         (pending_order_.front().first + kPendingTime <= now || pending_order_.size() > kPendingMax)) {
    const auto it = pending_.find(pending_order_.front().second);
    if (it != pending_.end() && it->second->opened == pending_order_.front().first)
      DropPending(std::string(it->first));
    pending_order_.pop_front();
  }
}

void RelayRoutes::Forget(const NodeId& node) { DropCurrent(node, nullptr); }

// A key that was changed under the same name has another secret.
const std::string* RelayRoutes::SecretOf(const NodeId& node) {
  const std::optional<std::string> key = registry_->PublicKeyOf(node.value);
  if (!key) return nullptr;
  Secret& known = secrets_[node.value];
  if (known.public_key != *key) {
    absl::StatusOr<std::string> secret = net::PairSecret(head_, *key);
    if (!secret.ok()) return nullptr;
    known = {*key, *std::move(secret)};
  }
  return &known.secret;
}

void RelayRoutes::DropCurrent(const NodeId& node, std::vector<core::PeerGone>* gone) {
  const auto it = current_.find(node.value);
  if (it == current_.end()) return;
  if (gone != nullptr) gone->push_back({{core::Role::kNode, node.value, ""}, RouteOf(*it->second)});
  by_number_.erase(it->second->number);
  current_.erase(it);
}

// With room for so many bytes more.
RelayRoutes::Frame& RelayRoutes::FrameFor(const std::string& relay_route, size_t bytes) {
  std::vector<Frame>& frames = frames_[relay_route];
  const bool full = !frames.empty() &&
                    (frames.back().bytes + bytes > kFrameBytes || frames.back().parts.size() >= kFrameParts);
  if (frames.empty() || (full && !frames.back().parts.empty())) frames.emplace_back();
  return frames.back();
}

void RelayRoutes::Put(const std::string& relay_route, core::RelayPart part) {
  const size_t bytes = part.bytes.size() + part.node.value.size() + 32;
  Frame& frame = FrameFor(relay_route, bytes);
  frame.bytes += bytes;
  bytes_ += bytes;
  frame.parts.push_back(std::move(part));
}

// It is not known yet who opens: the answer is worth something to the holder of the node's key alone, and a
// conversation that goes on through another relay is left alone until this one has opened.
void RelayRoutes::Open(const port::Received& from, const core::RelayPart& part, Instant now) {
  const std::optional<net::Peer> peer = registry_->PeerOf(part.node.value, now);
  const std::string* secret = peer && peer->role == net::Role::kNode ? SecretOf(part.node) : nullptr;
  if (secret == nullptr || part.bytes.size() != net::kSessionHalfBytes) {
    ++refused_;
    return Put(from.route.id, {part.node, core::RelayStage::kOver});
  }
  const std::string key = PendingKey(part.node, from.route.id);
  DropPending(key);
  const std::string half = net::NewSessionHalf();
  auto session = std::make_unique<Session>(
      Session{part.node, from.route.id, ++last_number_,
              net::SealedSession(net::SealedSession::End::kHead, *secret, part.bytes, half), now});
  // What is sealed behind the half shows the child that the head has answered.
  Put(from.route.id,
      {part.node, core::RelayStage::kAnswer, absl::StrCat(half, session->seal.Seal("")), session->number});
  by_number_[session->number] = session.get();
  pending_[key] = std::move(session);
  pending_order_.emplace_back(now, key);
  ExpirePending(now);
}

// In the conversation that is there, else in one that this relay has opened since.
absl::StatusOr<std::string> RelayRoutes::OpenIn(const NodeId& node, const std::string& relay_route,
                                                absl::string_view sealed) {
  const auto current = current_.find(node.value);
  if (current != current_.end() && current->second->relay_route == relay_route) {
    absl::StatusOr<std::string> message = current->second->seal.Open(sealed);
    if (message.ok()) return message;
  }
  const auto pending = pending_.find(PendingKey(node, relay_route));
  if (pending == pending_.end()) return absl::NotFoundError("no conversation");
  absl::StatusOr<std::string> message = pending->second->seal.Open(sealed);
  if (!message.ok()) return message;
  // Whoever sealed it has the key, and goes this way from now on.
  std::unique_ptr<Session> opened = std::move(pending->second);
  pending_.erase(pending);
  DropCurrent(node, nullptr);
  current_[node.value] = std::move(opened);
  return message;
}

void RelayRoutes::OnSealed(const port::Received& from, const core::RelayPart& part, Instant now,
                           Arrived& arrived) {
  const std::optional<net::Peer> peer = registry_->PeerOf(part.node.value, now);
  const bool may = peer && peer->role == net::Role::kNode;
  ExpirePending(now);
  absl::StatusOr<std::string> message = absl::PermissionDeniedError("it may not come");
  if (may) message = OpenIn(part.node, from.route.id, part.bytes);
  if (!message.ok()) {
    ++refused_;
    const auto current = current_.find(part.node.value);
    if (current != current_.end() && current->second->relay_route == from.route.id)
      DropCurrent(part.node, &arrived.gone);
    DropPending(PendingKey(part.node, from.route.id));
    return Put(from.route.id, {part.node, core::RelayStage::kOver});
  }
  arrived.messages.push_back({*peer, {RouteOf(*current_.at(part.node.value))}, "", *std::move(message)});
}

RelayRoutes::Arrived RelayRoutes::Take(const port::Received& from, const core::RelayedUp& up, Instant now) {
  Arrived arrived;
  arrived.heard.relay = NodeId(from.peer.key_id);
  for (const core::RelayPart& part : up.parts) {
    if (part.stage == core::RelayStage::kOpen) Open(from, part, now);
    if (part.stage == core::RelayStage::kSealed) OnSealed(from, part, now, arrived);
  }
  for (const uint32_t number : up.heard) {
    const auto it = by_number_.find(number);
    if (it != by_number_.end() && it->second->relay_route == from.route.id)
      arrived.heard.children.push_back(it->second->node);
  }
  return arrived;
}

void RelayRoutes::Send(absl::string_view route, absl::string_view bytes) {
  Session* session = Find(route);
  if (session == nullptr) return;
  Put(session->relay_route, {session->node, core::RelayStage::kSealed, session->seal.Seal(bytes)});
}

void RelayRoutes::Send(absl::string_view route, const core::SharedMessage& message, absl::string_view bytes) {
  if (bytes.size() < kSharedFrom) return Send(route, bytes);
  Session* session = Find(route);
  if (session == nullptr) return;
  if (shared_ == nullptr || !shared_->message.Same(message))
    shared_ = std::make_shared<const Shared>(Shared{message, net::SealShared(wire::Pack(bytes))});
  core::RelayPart part{session->node, core::RelayStage::kShared, session->seal.Seal(shared_->body.key)};
  const size_t more = part.bytes.size() + part.node.value.size() + 32;
  std::vector<Frame>& frames = frames_[session->relay_route];
  // What has the body already takes no room for it again, however long it is.
  const bool there = !frames.empty() && !frames.back().bodies.empty() &&
                     frames.back().bodies.back() == shared_ && frames.back().parts.size() < kFrameParts;
  Frame& frame = there ? frames.back() : FrameFor(session->relay_route, more + shared_->body.bytes.size());
  if (!there) {
    frame.bodies.push_back(shared_);
    frame.bytes += shared_->body.bytes.size();
  }
  part.body = static_cast<uint32_t>(frame.bodies.size() - 1);
  frame.bytes += more;
  bytes_ += more;
  frame.parts.push_back(std::move(part));
}

std::vector<core::PeerGone> RelayRoutes::Flush(
    const std::function<bool(const std::string&, const core::RelayedDown&)>& send) {
  std::vector<core::PeerGone> gone;
  bytes_ = 0;
  shared_.reset();
  for (auto& [relay_route, frames] : std::exchange(frames_, {})) {
    bool sent = true;
    for (Frame& frame : frames) {
      core::RelayedDown down;
      for (const auto& shared : frame.bodies) down.bodies.push_back(shared->body.bytes);
      down.parts = std::move(frame.parts);
      sent = sent && send(relay_route, down);
    }
    if (sent) continue;
    std::vector<NodeId> lost;
    for (const auto& [node, session] : current_) {
      if (session->relay_route == relay_route) lost.push_back(session->node);
    }
    for (const NodeId& node : lost) DropCurrent(node, &gone);
  }
  return gone;
}

}  // namespace gtrain::head
