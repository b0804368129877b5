// ConsoleSessions: whose consoles are open. PURE. Private to runtime/core/head.
#pragma once
#include <map>
#include <string>

#include "absl/status/status.h"
#include "base/clock.h"
#include "base/ids.h"
#include "runtime/core/values/messages.h"

namespace gtrain::core {

// Whose consoles are open, as their turns tell it: what one user or one machine holds is bounded, and a head
// that starts again knows them all as soon as they have gone on. Owner thread only.
class ConsoleSessions {
 public:
  static constexpr int kOfUserMax = 8;
  static constexpr int kOnNodeMax = 16;
  static constexpr absl::Duration kSilenceMax = absl::Seconds(30);  // above the time that keepers wait

  // For each turn. ResourceExhausted: a console that begins would be one too many; the message says of what.
  absl::Status Turn(const Console& turn, const std::string& user, const NodeId& node, Instant now);
  void End(const std::string& session) { open_.erase(session); }
  size_t open() const { return open_.size(); }

 private:
  struct Session {
    std::string user;
    NodeId node;
    Instant heard;
  };
  std::map<std::string, Session> open_;
};

}  // namespace gtrain::core
