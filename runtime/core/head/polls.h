// Polls: clients that wait for events of a job. PURE. Private to runtime/core/head.
//
// Looked at when their job says something, or the first of all is over: never all of them at each message.
// Owned by HeadState; the loop's thread only; never blocks. Bounded in all and for each user.
#pragma once
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_model.h"
#include "runtime/core/head/user_shares.h"

namespace gtrain::core {

class Polls {
 public:
  Polls(HeadContext& context, HeadModel& model);

  absl::Status Poll(const PeerMessage& event, const std::string& id, const ClientEvents& events, Instant now);
  // All that wait for news of a job that has some, and of the others those whose time is up.
  void AnswerPolls(Instant now);
  // Whether the client that a job ends with waits for its events, and so is there.
  bool ClientWaits(const Job& job) const;
  int open() const { return polls_of_user_.all(); }
  bool empty() const { return polls_.empty(); }
  std::optional<Instant> NextDeadline() const;

 private:
  struct OpenPoll {
    std::string route;
    std::string request_id;
    std::string client_key;
    std::string user;
    JobId job;
    uint64_t after = 0;
    Instant deadline;
  };

  bool AnswerPoll(const OpenPoll& poll, Instant now);
  void AnswerEvents(const OpenPoll& poll, const Job& job);

  HeadContext& context_;
  HeadModel& model_;
  const HeadConfig& config_;

  std::map<JobId, std::multimap<Instant, OpenPoll>> polls_;  // by deadline
  UserShares polls_of_user_;
  std::multiset<std::pair<Instant, JobId>> poll_deadlines_;  // of each
};

}  // namespace gtrain::core
