// Relay: what an agent does for other agents that reach the head through it (docs/protocols/relays.md). It
// carries sealed messages both ways and says which of its children it has heard; it decides nothing.
//
// Owner thread only; nothing blocks. A child costs a connection; each half second the head gets one
// message for all of them. What cannot be passed on is lost, and its child is told so (kOver,
// kLost): the child opens a session anew, and its first hello settles what was lost.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/ids.h"
#include "net/port/transport.h"
#include "runtime/core/values/messages.h"

namespace gtrain::agent {

// The longest message of a child: with what a frame adds, it is still one that the head reads.
inline constexpr size_t kRelayedBytesMax = static_cast<size_t>(port::kToServerBytesMax) - (64 << 10);

class Relay {
 public:
  // `children` lets in who may come; its peers' key ids are their node ids.
  explicit Relay(std::unique_ptr<port::ServerTransport> children) : transport_(std::move(children)) {}

  int fd() const { return transport_->PollFd(); }
  // Reads what children say. Returns the messages for the head, and none while there is no head.
  std::vector<core::RelayedUp> Turn(Instant now);
  // When Turn has something to say though nobody speaks.
  std::optional<Instant> NextDeadline() const;
  void OnDown(const core::RelayedDown& down);
  // Whether the relay itself has a connection to the head. Each new one begins with `true` after `false`.
  void SetHead(bool there);
  // Forgets those that were not heard since then, but for `keep`.
  void Forget(Instant since, const std::set<NodeId>& keep);
  // Who has spoken since the start, and when last; connections that nobody uses are not known to be gone.
  std::vector<NodeId> Children(Instant since) const;

 private:
  struct Child {
    std::string route;
    uint32_t number = 0;  // of its session; 0: the head has not answered
    bool heard = false;   // since the head was told
    Instant at;
  };
  void Hear(const port::Received& received, Instant now);
  void Tell(const NodeId& node, const Child& child, core::RelayStage stage);
  void PassOn(core::RelayedUp up);

  const std::unique_ptr<port::ServerTransport> transport_;
  std::map<NodeId, Child> children_;
  bool head_ = false;
  std::vector<core::RelayedUp> out_;
  size_t out_bytes_ = 0;  // of the last of out_
  bool hurry_ = false;    // some of it does not wait for the next beats
  std::vector<uint32_t> heard_;
  Instant next_beat_;
};

}  // namespace gtrain::agent
