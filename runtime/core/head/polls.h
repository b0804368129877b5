// Polls answers clients that wait for events of a job. PURE. Private to runtime/core/head.
//
// A poll is looked at when its job says something or when its time is up, never at each message. HeadState
// owns it; only the loop's thread uses it, and it never blocks. The number of polls is bounded in all and
// for each user.
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
  // Answers all polls of jobs that have news, and the other polls whose time is up.
  void AnswerPolls(Instant now);
  // True while the client with which the job ends waits for its events, and so is there.
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
