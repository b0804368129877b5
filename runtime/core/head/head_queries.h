// What clients have asked and the head has not answered yet. PURE. Private to runtime/core.
#pragma once
#include <map>
#include <string>

#include "absl/status/status.h"
#include "base/clock.h"
#include "base/ids.h"
#include "runtime/core/values/messages.h"

namespace gtrain::core {

// A client's question that an agent answers.
struct OpenQuery {
  std::string route;
  std::string client_key;
  std::string user;  // empty: the head asks, for itself
  std::string request_id;
  AgentQuery query;
  NodeId node;
  Instant deadline;
};

// For a verdict of the head's own, not for a client.
inline bool AsksForVerdict(const OpenQuery& open) {
  return open.query.kind == AgentQuery::Kind::kStacks && open.route.empty();
}

// The answer to a command that a client had run beside a rank.
struct DoneExec {
  std::string client_key;
  ClientReply reply;
};

// A client waiting for events.
struct OpenPoll {
  std::string route;
  std::string request_id;
  std::string client_key;
  std::string user;
  JobId job;
  uint64_t after = 0;
  Instant deadline;
};

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
