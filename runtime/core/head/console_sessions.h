// ConsoleSessions counts the open consoles of users and machines. PURE. Private to runtime/core/head.
#pragma once
#include <map>
#include <string>

#include "absl/status/status.h"
#include "base/clock.h"
#include "base/ids.h"
#include "runtime/core/values/messages.h"

namespace gtrain::core {

// The turns of a console tell that it is open: so a head that starts again knows all of them as soon as they
// have gone on. The number of consoles is bounded for each user and for each machine. Only the loop's thread
// uses it.
class ConsoleSessions {
 public:
  static constexpr int kOfUserMax = 8;
  static constexpr int kOnNodeMax = 16;
  static constexpr absl::Duration kSilenceMax = absl::Seconds(30);  // above the time that keepers wait

  // Called for each turn. ResourceExhausted: a console that begins would be one too many; the message says
  // for which user or node.
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
