#include "runtime/core/head/polls.h"

#include <algorithm>

#include "base/status_macros.h"
#include "runtime/core/head/documents.h"
#include "runtime/core/values/authority.h"

namespace gtrain::core {

Polls::Polls(HeadContext& context, HeadModel& model)
    : context_(context), model_(model), config_(context.config()) {}

std::optional<Instant> Polls::NextDeadline() const {
  return poll_deadlines_.empty() ? std::nullopt : std::optional(poll_deadlines_.begin()->first);
}

absl::Status Polls::Poll(const PeerMessage& event, const std::string& id, const ClientEvents& events,
                         Instant now) {
  const std::string user = OwnerName(event.peer);
  GT_RETURN_IF_ERROR(
      polls_of_user_.Take(user, config_.polls_per_user_max, config_.polls_max, "requests wait for events"));
  const Instant deadline = now + std::clamp(events.wait, absl::ZeroDuration(), config_.events_wait_max);
  OpenPoll poll{event.route, id, event.peer.key_id, user, events.job, events.after, deadline};
  if (AnswerPoll(poll, now)) return absl::OkStatus();  // it has said something since
  polls_[events.job].emplace(deadline, std::move(poll));
  poll_deadlines_.insert({deadline, events.job});
  return absl::OkStatus();
}

void Polls::AnswerPolls(Instant now) {
  const auto answer = [&](const JobId& job, bool all) {
    const auto it = polls_.find(job);
    if (it == polls_.end()) return;
    std::multimap<Instant, OpenPoll>& polls = it->second;
    for (auto poll = polls.begin(); poll != polls.end() && (all || poll->first <= now);) {
      if (!AnswerPoll(poll->second, now)) {
        ++poll;
        continue;
      }
      poll_deadlines_.erase(poll_deadlines_.find({poll->first, job}));
      poll = polls.erase(poll);
    }
    if (polls.empty()) polls_.erase(it);
  };
  for (const JobId& job : context_.TakeNews()) answer(job, /*all=*/true);
  while (!poll_deadlines_.empty() && poll_deadlines_.begin()->first <= now)
    answer(JobId(poll_deadlines_.begin()->second), /*all=*/false);
}

// False: it goes on waiting.
bool Polls::AnswerPoll(const OpenPoll& poll, Instant now) {
  Job* job = model_.FindJob(poll.job);
  const bool due = job == nullptr || poll.deadline <= now || IsFinal(job->record.state) ||
                   (!job->events.empty() && job->events.back()->sequence > poll.after);
  if (!due) return false;
  if (job == nullptr) {
    context_.Answer(poll.route, poll.request_id, absl::NotFoundError("the job is forgotten"), "");
  } else {
    if (job->record.client_key == poll.client_key) job->client_seen = now;
    AnswerEvents(poll, *job);
  }
  polls_of_user_.Return(poll.user);
  model_.active_at = now;
  return true;
}

// A few events are built here: many may wait for the same one, and none of them is to be told that too many
// read. A stall of many ranks brings megabytes of stacks.
void Polls::AnswerEvents(const OpenPoll& poll, const Job& job) {
  constexpr size_t kBytesBuiltHere = 64 << 10;
  const auto [document, bytes] = EventsAfter(job, poll.after);
  ReplyToClient reply{poll.route, ClientReply{.id = poll.request_id}, false, document, poll.client_key};
  if (bytes <= kBytesBuiltHere) reply = {poll.route, Built(reply)};
  context_.Do(std::move(reply));
}

// A client that waits for events of its job is there.
bool Polls::ClientWaits(const Job& job) const {
  const auto polls = polls_.find(job.record.id);
  return polls != polls_.end() &&
         std::any_of(polls->second.begin(), polls->second.end(),
                     [&](const auto& poll) { return poll.second.client_key == job.record.client_key; });
}

}  // namespace gtrain::core
