// Queries passes questions of clients, and of the head itself, to the agents that can answer them: logs,
// commands, stacks, consoles. PURE. Private to runtime/core/head.
//
// The reply follows when the agent answers or its time is up. HeadState owns it; only the loop's thread uses
// it, and it never blocks. The number of open questions is bounded in all and for each user.
#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "runtime/core/head/console_sessions.h"
#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_model.h"
#include "runtime/core/head/user_shares.h"

namespace gtrain::core {

class Stalls;

class Queries {
 public:
  Queries(HeadContext& context, HeadModel& model, Stalls& stalls);

  absl::Status AskLogs(const PeerMessage& event, const std::string& id, const ClientLogs& logs, Instant now);
  absl::Status AskExec(const PeerMessage& event, const std::string& id, const ClientExec& exec, Instant now);
  absl::Status AskActors(const PeerMessage& event, const std::string& id, const ClientActors& actors,
                         Instant now);
  absl::Status AskStack(const PeerMessage& event, const std::string& id, const ClientStack& stack,
                        Instant now);
  absl::Status AskConsole(const PeerMessage& event, const std::string& id, const ClientConsole& console,
                          Instant now);
  // The head asks for the stacks of all ranks for a verdict of its own, and may wait for them.
  void AskStacks(const Job& job, int culprit, Instant now);
  bool AwaitsStacks(const JobId& job) const;

  void OnAnswer(const NodeId& node, const AgentAnswer& answer);
  void ExpireQueries(Instant now);
  bool empty() const { return queries_.empty(); }
  std::optional<Instant> NextDeadline() const;

 private:
  struct OpenQuery {
    std::string route;
    std::string client_key;
    std::string user;  // empty: the head asks, for itself
    std::string request_id;
    AgentQuery query;
    NodeId node;
    Instant deadline;
  };
  // The answer to a command that a client had run beside a rank.
  struct DoneExec {
    std::string client_key;
    ClientReply reply;
  };

  static bool AsksForVerdict(const OpenQuery& open);
  absl::Status RoomToAsk(const PeerMessage& event);
  OpenQuery EndQuery(std::map<uint64_t, OpenQuery>::iterator query);
  void Ask(const PeerMessage& event, const std::string& id, const NodeId& node, AgentQuery query,
           Instant now);
  absl::Status AskRank(const PeerMessage& event, const std::string& id, const Job& job, int rank,
                       AgentQuery query, Instant now);
  bool RepeatedExec(const PeerMessage& event, const std::string& id);
  int WorldSizeOf(const AgentQuery& query);  // of the generation asked about; 0: it is not known
  void AnswerConsole(const OpenQuery& open, const AgentAnswer& answer);
  void NoteStacks(const OpenQuery& open, const std::string& text);
  void AnswerFromMirror(const OpenQuery& open, const std::string& why);

  HeadContext& context_;
  HeadModel& model_;
  const HeadConfig& config_;
  Stalls& stalls_;

  std::map<uint64_t, OpenQuery> queries_;
  UserShares queries_of_user_;  // of those that clients asked
  std::deque<DoneExec> done_execs_;
  ConsoleSessions consoles_;
  uint64_t next_query_ = 1;
};

}  // namespace gtrain::core
