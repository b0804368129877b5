// RelayRoutes: the head's end of the conversations that come through agents (docs/protocols/relays.md). To
// the core a child is a node with a route like any other; here its messages are taken out of the frames of
// its relay and opened, and those to it are sealed and put into such frames.
//
// Loop-owned, not thread-safe, never blocks. A child costs an entry in three tables and, once, the secret of
// its key; a message of one is opened once more than one on a connection of its own; a message to many is
// encrypted once, and travels once a relay. `bench_scale` has the times.
#pragma once
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "base/clock.h"
#include "net/port/transport.h"
#include "net/zmq/end_to_end.h"
#include "net/zmq/key_registry.h"
#include "runtime/core/values/effects.h"

namespace gtrain::head {

class RelayRoutes {
 public:
  RelayRoutes(net::KeyPair head, std::shared_ptr<net::KeyRegistry> registry)
      : head_(std::move(head)), registry_(std::move(registry)) {}

  struct Arrived {
    std::vector<port::Received> messages;  // of children, in their order
    core::ChildrenHeard heard;
    std::vector<core::PeerGone> gone;  // their conversations are over
  };
  // Takes a frame of a connection of a node: whoever it is, it carries what it likes, and only what opens
  // counts. What is answered at once leaves with the next Flush.
  Arrived Take(const port::Received& from, const core::RelayedUp& up, Instant now);

  // The node has said hello on a connection of its own: what relays still have of it is old.
  void Forget(const NodeId& node);

  bool Has(absl::string_view route) const { return Find(route) != nullptr; }
  // `route` must be one that Has. The message leaves with the next Flush.
  void Send(absl::string_view route, absl::string_view bytes);
  // `bytes`: `message` as it is sent.
  void Send(absl::string_view route, const core::SharedMessage& message, absl::string_view bytes);

  // So much waits that it should leave before the turn is over.
  bool Crowded() const { return bytes_ > kWaitingMax; }
  bool Waiting() const { return !frames_.empty(); }
  // Hands each frame to `send` {route of the relay, the frame}, which is false where it is lost. Returns
  // those with which there is no conversation any more, because of that.
  std::vector<core::PeerGone> Flush(
      const std::function<bool(const std::string&, const core::RelayedDown&)>& send);

  size_t conversations() const { return current_.size(); }
  uint64_t refused() const { return refused_; }  // parts that did not open, or of nodes that may not come

 private:
  static constexpr size_t kWaitingMax = 8 << 20;
  struct Session {
    NodeId node;
    std::string relay_route;
    uint32_t number = 0;
    net::SealedSession seal;
    Instant opened;
  };
  struct Shared {  // a message to many, sealed once
    core::SharedMessage message;
    net::SharedBody body;
  };
  struct Frame {
    std::vector<core::RelayPart> parts;
    std::vector<std::shared_ptr<const Shared>>
        bodies;  // held once for all frames: a grant may have megabytes
    size_t bytes = 0;
  };

  static std::string RouteOf(const Session& session);
  Session* Find(absl::string_view route) const;
  static std::string PendingKey(const NodeId& node, const std::string& relay_route);
  void DropPending(const std::string& key);
  void ExpirePending(Instant now);
  absl::StatusOr<std::string> OpenIn(const NodeId& node, const std::string& relay_route,
                                     absl::string_view sealed);
  void Open(const port::Received& from, const core::RelayPart& part, Instant now);
  void OnSealed(const port::Received& from, const core::RelayPart& part, Instant now, Arrived& arrived);
  void DropCurrent(const NodeId& node, std::vector<core::PeerGone>* gone);
  Frame& FrameFor(const std::string& relay_route, size_t bytes);
  void Put(const std::string& relay_route, core::RelayPart part);
  const std::string* SecretOf(const NodeId& node);

  const net::KeyPair head_;
  const std::shared_ptr<net::KeyRegistry> registry_;
  // Of a child the one of which something has opened; and by child and relay those of which nothing has yet,
  // for anybody may ask for one. They have kPendingTime for it.
  absl::flat_hash_map<std::string, std::unique_ptr<Session>> current_, pending_;
  std::deque<std::pair<Instant, std::string>> pending_order_;  // oldest first; some are gone
  absl::flat_hash_map<uint32_t, Session*> by_number_;
  struct Secret {
    std::string public_key, secret;
  };
  absl::flat_hash_map<std::string, Secret> secrets_;
  absl::flat_hash_map<std::string, std::vector<Frame>> frames_;  // by route of the relay, in their order
  size_t bytes_ = 0;                                             // of their parts
  std::shared_ptr<const Shared> shared_;                         // the last one
  uint32_t last_number_ = 0;
  uint64_t refused_ = 0;
};

}  // namespace gtrain::head
