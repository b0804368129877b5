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

RelayRoutes::Session* RelayRoutes::SessionOf(const NodeId& node, const std::string& relay_route) {
  for (const auto* sessions : {&current_, &pending_}) {
    const auto it = sessions->find(node.value);
    if (it != sessions->end() && it->second->relay_route == relay_route) return it->second.get();
  }
  return nullptr;
}

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

void RelayRoutes::Drop(const NodeId& node, bool current, std::vector<core::PeerGone>* gone) {
  auto& sessions = current ? current_ : pending_;
  const auto it = sessions.find(node.value);
  if (it == sessions.end()) return;
  if (current && gone != nullptr)
    gone->push_back({{core::Role::kNode, node.value, ""}, RouteOf(*it->second)});
  by_number_.erase(it->second->number);
  sessions.erase(it);
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
  Drop(part.node, /*current=*/false, nullptr);
  const auto current = current_.find(part.node.value);
  if (current != current_.end() && current->second->relay_route == from.route.id)
    Drop(part.node, /*current=*/true, nullptr);
  const std::string half = net::NewSessionHalf();
  auto session = std::make_unique<Session>(
      Session{part.node, from.route.id, ++last_number_,
              net::SealedSession(net::SealedSession::End::kHead, *secret, part.bytes, half)});
  Put(from.route.id, {part.node, core::RelayStage::kAnswer, half, session->number});
  by_number_[session->number] = session.get();
  pending_[part.node.value] = std::move(session);
}

void RelayRoutes::OnSealed(const port::Received& from, const core::RelayPart& part, Instant now,
                           Arrived& arrived) {
  const std::optional<net::Peer> peer = registry_->PeerOf(part.node.value, now);
  Session* session = SessionOf(part.node, from.route.id);
  absl::StatusOr<std::string> message = absl::NotFoundError("no conversation");
  if (peer && peer->role == net::Role::kNode && session != nullptr) message = session->seal.Open(part.bytes);
  const auto pending = pending_.find(part.node.value);
  const bool is_pending = pending != pending_.end() && pending->second.get() == session;
  if (!message.ok()) {
    ++refused_;
    if (session != nullptr) Drop(part.node, !is_pending, &arrived.gone);
    return Put(from.route.id, {part.node, core::RelayStage::kOver});
  }
  if (is_pending) {  // whoever opened it has the key, and goes this way from now on
    std::unique_ptr<Session> opened = std::move(pending->second);
    pending_.erase(pending);
    Drop(part.node, /*current=*/true, nullptr);
    current_[part.node.value] = std::move(opened);
  }
  arrived.messages.push_back({*peer, {RouteOf(*session)}, "", *std::move(message)});
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
    for (const bool current : {true, false}) {
      std::vector<NodeId> lost;
      for (const auto& [node, session] : current ? current_ : pending_) {
        if (session->relay_route == relay_route) lost.push_back(session->node);
      }
      for (const NodeId& node : lost) Drop(node, current, &gone);
    }
  }
  return gone;
}

}  // namespace gtrain::head
