// A reply is recognised by its request's id, so a late reply to an earlier, abandoned request is skipped. A
// request is repeated on each new connection and after a silence;
// the head answers a repeated id with the first answer.
#include "runtime/control/control_client.h"

#include <poll.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "runtime/core/values/authority.h"
#include "runtime/core/values/request_pacer.h"
#include "runtime/wire/codec.h"

namespace gtrain::net {
namespace {

constexpr absl::Duration kTurnMax = absl::Milliseconds(200);   // how late a lost connection is noticed
constexpr absl::Duration kJoinAgain = absl::Seconds(4);        // before a join is repeated
constexpr absl::Duration kHeadSilenceMax = absl::Seconds(3);   // somebody waits in front of it
constexpr absl::Duration kRefusalPatience = absl::Seconds(1);  // a key just added may need a moment

int PollMs(absl::Duration limit) {
  return static_cast<int>(std::max<int64_t>(1, absl::ToInt64Milliseconds(std::min(limit, kTurnMax))));
}

void WaitReadable(int fd, absl::Duration limit) {
  pollfd readable = {fd, POLLIN, 0};
  (void)poll(&readable, 1, PollMs(limit));
}

// The head refuses a request that changes nothing in this way for one reason only: too many read at once. A
// person could do nothing but ask again.
bool IsBusy(const core::ClientReply& reply, const core::ClientRequest& request) {
  return !reply.ok && reply.code == static_cast<int>(absl::StatusCode::kResourceExhausted) &&
         !core::RuleOf(request.body).changes;
}

}  // namespace

std::string NewRequestId() { return RandomHex(16); }

absl::StatusOr<std::unique_ptr<ControlClient>> ControlClient::Connect(ClientOptions options) {
  options.ask_every = options.answer_within = kHeadSilenceMax;
  GT_ASSIGN_OR_RETURN(std::unique_ptr<ZmqClient> transport, ZmqClient::Connect(options));
  return std::unique_ptr<ControlClient>(new ControlClient(std::move(transport)));
}

ControlClient::ControlClient(std::unique_ptr<ZmqClient> transport)
    : transport_(std::move(transport)), rng_(Rng::FromSystem()) {}

absl::StatusOr<core::ClientReply> ControlClient::Call(core::ClientRequestBody body, absl::Duration timeout) {
  core::ClientRequest request;
  request.body = std::move(body);
  return Call(std::move(request), timeout);
}

absl::StatusOr<core::ClientReply> ControlClient::Call(core::ClientRequest request, absl::Duration timeout,
                                                      absl::Duration waited) {
  std::vector<core::ClientRequest> one;
  one.push_back(std::move(request));
  return std::move(CallAll(std::move(one), timeout, waited)[0]);
}

std::vector<absl::StatusOr<core::ClientReply>> ControlClient::CallAll(
    std::vector<core::ClientRequest> requests, absl::Duration timeout, absl::Duration waited) {
  const Instant start = clock_.Now();
  std::vector<Waiting> waiting;
  std::vector<absl::StatusOr<core::ClientReply>> replies(requests.size());
  for (size_t i = 0; i < requests.size(); ++i) {
    if (requests[i].id.empty()) requests[i].id = NewRequestId();
    waiting.push_back({i, std::move(requests[i]), {}, {}});
    waiting.back().pacer.emplace(waiting.back().request, start, timeout);
  }
  const auto end_all = [&](const absl::Status& status) {
    for (const Waiting& w : waiting) replies[w.index] = status;
    waiting.clear();
  };
  while (!waiting.empty()) {
    const Instant now = clock_.Now();
    if (waiting[0].pacer->Over(now)) break;  // all have the same deadline
    const bool connected = transport_->Connected();
    if (!connected && absl::IsPermissionDenied(transport_->status()) && now - start > kRefusalPatience) {
      end_all(transport_->status());
      break;
    }
    for (Waiting& w : waiting) {
      if (!w.pacer->Due(connected, now)) continue;
      w.request.deadline = w.pacer->deadline() - now;
      absl::Status sent = transport_->Send(wire::Encode(w.request));
      w.pacer->Sent(sent.ok(), now, rng_);
      if (absl::IsInvalidArgument(sent)) w.refused = std::move(sent);
    }
    TakeReplies(&waiting, &replies);
    if (waiting.empty()) break;
    if (const absl::Status waited = Wait(waiting[0].pacer->deadline() - now); !waited.ok()) {
      end_all(waited);
      break;
    }
    TakeReplies(&waiting, &replies);  // before the deadline is looked at: a step may take long
  }
  const absl::Status status = transport_->status();
  for (Waiting& w : waiting) {
    if (w.busy) {
      replies[w.index] = *std::move(w.busy);
      continue;
    }
    if (!w.late.empty()) {
      replies[w.index] = absl::DeadlineExceededError(w.late);
      continue;
    }
    const auto code = absl::IsUnavailable(status) ? status.code() : absl::StatusCode::kDeadlineExceeded;
    replies[w.index] = absl::Status(
        code, absl::StrCat("no reply from the head within ",
                           absl::FormatDuration(absl::Ceil(waited + timeout, absl::Milliseconds(100))), ": ",
                           status.ok() ? "it is connected but does not answer" : status.message()));
  }
  return replies;
}

absl::Status ControlClient::Wait(absl::Duration limit) {
  if (aside_) limit = std::min(limit, aside_->at - clock_.Now());
  // A descriptor below 0 is nothing to poll.
  pollfd fds[2] = {{transport_->PollFd(), POLLIN, 0}, {interrupt_fd_, POLLIN, 0}};
  const int ready = poll(fds, 2, limit > absl::ZeroDuration() ? PollMs(limit) : 0);
  if (ready > 0 && fds[1].revents != 0) return absl::CancelledError("interrupted");
  if (!aside_ || clock_.Now() < aside_->at) return absl::OkStatus();
  GT_ASSIGN_OR_RETURN(aside_->at, aside_->step());
  return absl::OkStatus();
}

void ControlClient::TakeReplies(std::vector<Waiting>* waiting,
                                std::vector<absl::StatusOr<core::ClientReply>>* replies) {
  std::erase_if(*waiting, [&](Waiting& w) {
    if (!w.refused.ok()) (*replies)[w.index] = std::move(w.refused);
    return !w.refused.ok();
  });
  while (std::optional<std::string> payload = transport_->Receive()) {
    absl::StatusOr<core::Message> message = wire::Decode(*payload, wire::Sender::kHead);
    if (!message.ok()) continue;
    auto* reply = std::get_if<core::ClientReply>(&*message);
    if (reply == nullptr) continue;
    const auto asked = std::find_if(waiting->begin(), waiting->end(),
                                    [&](const Waiting& w) { return w.request.id == reply->id; });
    if (asked == waiting->end()) continue;
    // The head was not running for a while and does not know that somebody still waits.
    if (reply->code == static_cast<int>(absl::StatusCode::kDeadlineExceeded)) {
      asked->late = std::move(reply->error);
      continue;
    }
    if (IsBusy(*reply, asked->request)) {
      asked->busy = std::move(*reply);
      asked->pacer->Refused(clock_.Now(), rng_);
      continue;
    }
    (*replies)[asked->index] = std::move(*reply);
    waiting->erase(asked);
  }
}

absl::StatusOr<core::AgentJoined> JoinCluster(const JoinToken& token, absl::string_view node_public_key,
                                              absl::string_view hostname, absl::Duration timeout) {
  ClientOptions options{.endpoint = token.endpoint, .server_public_key = token.head_public_key};
  GT_ASSIGN_OR_RETURN(options.keys, KeyPairOfSecret(token.secret_key));
  GT_ASSIGN_OR_RETURN(std::unique_ptr<ZmqClient> transport, ZmqClient::Connect(options));
  RealClock clock;
  const std::string bytes =
      wire::Encode(core::AgentJoin{std::string(node_public_key), std::string(hostname)});
  const Instant start = clock.Now(), deadline = start + timeout;
  Instant send_again = start;
  for (Instant now = start; now < deadline; now = clock.Now()) {
    if (!transport->Connected()) {
      send_again = now;
      if (absl::IsPermissionDenied(transport->status()) && now - start > kRefusalPatience) {
        return absl::PermissionDeniedError(
            absl::StrCat("the head at ", token.endpoint,
                         " refuses this join token: it is used, older than 15 minutes "
                         "or of another head; make a new one with: gtrain token create"));
      }
    } else if (now >= send_again && transport->Send(bytes).ok()) {
      send_again = now + kJoinAgain;
    }
    while (std::optional<std::string> payload = transport->Receive()) {
      absl::StatusOr<core::Message> message = wire::Decode(*payload, wire::Sender::kHead);
      if (!message.ok()) continue;
      if (auto* joined = std::get_if<core::AgentJoined>(&*message)) return *joined;
      if (auto* refused = std::get_if<core::AgentRefused>(&*message)) {
        return absl::PermissionDeniedError(
            absl::StrCat("the head refuses to let this node join: ", refused->reason));
      }
    }
    WaitReadable(transport->PollFd(), deadline - now);
  }
  return absl::DeadlineExceededError(absl::StrCat("no answer from the head at ", token.endpoint, " within ",
                                                  absl::FormatDuration(timeout), ": ",
                                                  transport->status().message()));
}

bool IsLetIn(const JoinToken& token, const KeyPair& keys, absl::Duration timeout) {
  const auto transport = ZmqClient::Connect(
      {.endpoint = token.endpoint, .server_public_key = token.head_public_key, .keys = keys});
  if (!transport.ok()) return false;
  const RealClock clock;
  const Instant deadline = clock.Now() + timeout;
  while (!(*transport)->Connected() && clock.Now() < deadline) {
    while ((*transport)->Receive()) continue;
    WaitReadable((*transport)->PollFd(), std::min(absl::Milliseconds(50), deadline - clock.Now()));
  }
  return (*transport)->Connected();
}

}  // namespace gtrain::net
