#include "actors/exec/outgoing.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "actors/plan/members.h"
#include "base/status_macros.h"

namespace gtrain::actors {
namespace {

constexpr absl::Duration kAcknowledgeAfter = absl::Milliseconds(200);
constexpr absl::Duration kPauseMin = absl::Milliseconds(1), kPauseMax = absl::Milliseconds(64);

}  // namespace

void OutgoingCalls::Add(Call call, HeardReplies& heard) {
  Actor* actor = nullptr;
  if (const auto it = actors_.find(call.actor); it != actors_.end()) {
    actor = &it->second;
  } else {
    const auto idle = idle_.find(call.actor);
    actor = &actors_[call.actor];
    actor->window = CallWindow(idle == idle_.end() ? 0 : idle->second);
    if (idle != idle_.end()) idle_.erase(idle);
  }
  actor->ref = call.ref;
  // Those that were given up have their places until the other end has answered them, and hold nobody off.
  const bool behind = !actor->queued.empty() || actor->window.full();
  if (behind && (call.actor == 0 || actor->waiting.size() + actor->queued.size() < kCallsInWindow)) {
    deadlines_.emplace(call.deadline, std::pair(call.actor, uint64_t{0}));
    actor->queued.push_back(std::move(call));
    return;
  }
  std::optional<uint64_t> number;
  if (!behind) number = actor->window.Add(std::move(call.arguments));
  if (number) return Enter(*actor, *number, std::move(call));
  heard.push_back(
      {std::move(call.reply),
       absl::ResourceExhaustedError(absl::StrCat(
           kCallsInWindow, " calls of this process to the actor have no answer yet",
           actor->full ? ", and its mailbox is full" : "", ": await answers before making other calls")),
       ""});
}

void OutgoingCalls::Enter(Actor& actor, uint64_t number, Call call) {
  Waiting& waiting = actor.waiting[number];
  waiting.reply = std::move(call.reply);
  waiting.on_late = std::move(call.on_late);
  waiting.method = call.method;
  waiting.time = call.deadline;
  waiting.deadline = deadlines_.emplace(call.deadline, std::pair(call.actor, number));
  unsent_.insert(call.actor);
}

void OutgoingCalls::Connected() {
  if (gone_) return;
  state_ = State::kConnected;
}

std::string OutgoingCalls::NextMessage(Instant now) {
  std::string message;
  if (gone_) return message;
  if (state_ == State::kConnected) {
    AppendFrame(HelloFrame{self_, to_}, &message);
    state_ = State::kGreeted;
    return message;
  }
  if (state_ != State::kWelcome) return message;
  Acknowledge(now, &message);
  while (!unsent_.empty() && message.size() < kMessageBytes) {
    // Those to the process itself first, the others in turn: none waits for what another one is sent.
    auto next = unsent_.begin();
    if (*next != 0) next = unsent_.upper_bound(served_);
    if (next == unsent_.end()) next = unsent_.begin();
    const uint64_t number = *next;
    if (number != 0) served_ = number;
    AppendCalls(number, actors_[number], now, &message);
    if (message.size() < kMessageBytes) unsent_.erase(number);
  }
  return message;
}

// What was answered is said to be with the next call, or when there is none for a while: then the other end
// need not keep the answers, nor this one the window.
void OutgoingCalls::Acknowledge(Instant now, std::string* message) {
  while (!acknowledge_at_.empty() && acknowledge_at_.begin()->first <= now) {
    const uint64_t number = acknowledge_at_.begin()->second;
    acknowledge_at_.erase(acknowledge_at_.begin());
    const auto it = actors_.find(number);
    if (it == actors_.end()) continue;
    it->second.acknowledges = false;
    if (it->second.window.size() > 0 || !it->second.waiting.empty()) continue;
    AppendFrame(AcknowledgeFrame{number, it->second.window.last()}, message);
    // Where a kept actor is made anew its ledger goes on with the numbers of this one.
    if (it->second.ref && it->second.ref->kept()) continue;
    if (!it->second.queued.empty()) continue;
    if (it->second.paused_until) paused_.erase({*it->second.paused_until, number});
    idle_[number] = it->second.window.last();
    unsent_.erase(number);
    actors_.erase(it);
  }
}

void OutgoingCalls::AppendCalls(uint64_t number, Actor& actor, Instant now, std::string* message) {
  while (!actor.paused_until && message->size() < kMessageBytes) {
    const std::optional<CallToSend> call = actor.window.Next(actor.in_flight_max);
    if (!call) return;
    CallFrame frame;
    frame.actor = number;
    frame.number = call->number;
    frame.acknowledged = call->acknowledged;
    frame.given_up = call->given_up;
    frame.arguments = call->arguments;
    if (const auto waiting = actor.waiting.find(call->number); waiting != actor.waiting.end()) {
      frame.method = waiting->second.method;
      if (!call->given_up) {
        const int64_t left = absl::ToInt64Milliseconds(waiting->second.deadline->first - now) + 1;
        frame.timeout_ms = static_cast<uint32_t>(std::clamp<int64_t>(left, 1, UINT32_MAX));
      }
    }
    AppendFrame(frame, message);
  }
}

absl::Status OutgoingCalls::OnMessage(absl::string_view message, Instant now, HeardReplies& heard) {
  while (!message.empty()) {
    GT_ASSIGN_OR_RETURN(const Frame frame, TakeFrame(&message));
    if (const auto* answer = std::get_if<AnswerFrame>(&frame)) {
      OnAnswer(*answer, now, heard);
    } else if (const auto* again = std::get_if<AgainFrame>(&frame)) {
      OnAgain(*again, now);
    } else if (const auto* welcome = std::get_if<WelcomeFrame>(&frame)) {
      if (welcome->process != to_) return absl::NotFoundError("another process is at its address");
      OnWelcome();
    } else {
      return absl::InvalidArgumentError(absl::StrCat(name_, " calls on a connection that is not its own"));
    }
  }
  return absl::OkStatus();
}

void OutgoingCalls::OnWelcome() {
  if (state_ != State::kGreeted) return;
  state_ = State::kWelcome;
  for (auto& [number, actor] : actors_) {
    actor.window.SendAgain();
    if (actor.window.size() > 0) unsent_.insert(number);
  }
}

void OutgoingCalls::OnAnswer(const AnswerFrame& frame, Instant now, HeardReplies& heard) {
  const auto it = actors_.find(frame.actor);
  if (it == actors_.end()) return;
  Actor& actor = it->second;
  // What processes say to each other by themselves is nobody's progress.
  const auto asked = actor.waiting.find(frame.number);
  const bool counts = frame.actor != 0 || (asked != actor.waiting.end() &&
                                           asked->second.method == static_cast<uint32_t>(Control::kSpawn));
  if (actor.window.Answered(frame.number) && counts) ++answered_;
  actor.in_flight_max = std::min(actor.in_flight_max + 1, kCallsInWindow);
  actor.pause = absl::ZeroDuration();
  actor.full = false;
  if (actor.window.size() > 0) unsent_.insert(frame.actor);
  while (!actor.queued.empty() && !actor.window.full()) {
    Call call = std::move(actor.queued.front());
    actor.queued.pop_front();
    const std::optional<uint64_t> number = actor.window.Add(std::move(call.arguments));
    Enter(actor, *number, std::move(call));
  }
  if (actor.window.size() == 0 && !std::exchange(actor.acknowledges, true))
    acknowledge_at_.emplace(now + kAcknowledgeAfter, frame.actor);
  const auto waiting = actor.waiting.find(frame.number);
  if (waiting == actor.waiting.end()) return;
  if (waiting->second.reply) {
    deadlines_.erase(waiting->second.deadline);
    absl::Status status =
        frame.code == absl::StatusCode::kOk ? absl::OkStatus() : absl::Status(frame.code, frame.text);
    heard.push_back({std::move(waiting->second.reply), std::move(status),
                     frame.code == absl::StatusCode::kOk ? std::string(frame.text) : ""});
  } else if (waiting->second.on_late && frame.code == absl::StatusCode::kOk) {
    heard.push_back({[late = std::move(waiting->second.on_late)](const absl::Status&,
                                                                 absl::string_view result) { late(result); },
                     absl::OkStatus(), std::string(frame.text)});
  }
  actor.waiting.erase(waiting);
}

void OutgoingCalls::OnAgain(const AgainFrame& frame, Instant now) {
  const auto it = actors_.find(frame.actor);
  if (it == actors_.end()) return;
  Actor& actor = it->second;
  actor.window.SendAgain(frame.next);
  actor.full = frame.full;
  if (actor.paused_until) return;
  actor.in_flight_max = std::max<uint64_t>(1, actor.in_flight_max / 2);
  actor.pause = std::clamp(actor.pause * 2, kPauseMin, kPauseMax);
  actor.paused_until = now + actor.pause;
  paused_.emplace(*actor.paused_until, frame.actor);
}

absl::Status OutgoingCalls::Late(const Actor& actor, uint64_t number) const {
  if (!actor.window.EverSent(number)) {
    return absl::DeadlineExceededError(absl::StrCat("the call has not been sent, and does not run: ",
                                                    actor.full ? "the mailbox of the actor was full"
                                                    : state_ == State::kWelcome
                                                        ? absl::StrCat("others to ", name_, " were before it")
                                                        : absl::StrCat("there is no connection to ", name_)));
  }
  return absl::DeadlineExceededError(absl::StrCat(
      "the call was sent to ", name_, " and has no answer",
      state_ == State::kWelcome ? "" : ", and the connection is lost", ": it may have run, or run later"));
}

void OutgoingCalls::Expire(uint64_t number, uint64_t call, HeardReplies& heard) {
  Actor& actor = actors_.at(number);
  Waiting& waiting = actor.waiting.at(call);
  heard.push_back({std::exchange(waiting.reply, nullptr), Late(actor, call), ""});
  if (!waiting.on_late) actor.waiting.erase(call);
  actor.window.GiveUp(call);
  unsent_.insert(number);
}

void OutgoingCalls::OnTime(Instant now, HeardReplies& heard) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    const auto [actor, number] = deadlines_.begin()->second;
    deadlines_.erase(deadlines_.begin());
    if (number > 0) {
      Expire(actor, number, heard);
      continue;
    }
    const auto of = actors_.find(actor);
    if (of == actors_.end()) continue;
    std::erase_if(of->second.queued, [&](Call& call) {
      if (call.deadline > now) return false;
      heard.push_back(
          {std::move(call.reply),
           absl::DeadlineExceededError(absl::StrCat(
               "the call has not been sent, and does not run: others to ", name_, " were before it")),
           ""});
      return true;
    });
  }
  while (!paused_.empty() && paused_.begin()->first <= now) {
    const auto actor = actors_.find(paused_.begin()->second);
    paused_.erase(paused_.begin());
    if (actor == actors_.end()) continue;
    actor->second.paused_until.reset();
    unsent_.insert(actor->first);
  }
}

std::optional<Instant> OutgoingCalls::next_time() const {
  std::optional<Instant> next;
  if (!deadlines_.empty()) next = deadlines_.begin()->first;
  if (!paused_.empty() && (!next || paused_.begin()->first < *next)) next = paused_.begin()->first;
  if (!acknowledge_at_.empty() && state_ == State::kWelcome &&
      (!next || acknowledge_at_.begin()->first < *next))
    next = acknowledge_at_.begin()->first;
  return next;
}

absl::Status OutgoingCalls::WhyGone(bool sent) const {
  return absl::UnavailableError(absl::StrCat(name_, " is no more, and the call ",
                                             sent ? "may have run" : "has not run", ": ", why_gone_));
}

void OutgoingCalls::Gone(absl::string_view why, HeardReplies& heard, std::vector<Call>& unsent,
                         std::vector<Moved>& moved) {
  if (gone_) return;
  gone_ = true;
  why_gone_ = std::string(why);
  for (auto& [number, actor] : actors_) {
    std::list<Call> queued = std::exchange(actor.queued, {});
    const auto go_on = [&] {
      for (Call& call : queued) {
        if (call.ref) {
          unsent.push_back(std::move(call));
        } else {
          heard.push_back({std::move(call.reply), WhyGone(/*sent=*/false), ""});
        }
      }
    };
    if (actor.ref && actor.ref->kept()) {
      const ActorRef ref = *actor.ref;
      moved.push_back({ref, number, std::move(actor)});
      go_on();
      continue;
    }
    std::map<uint64_t, Waiting*> ordered;
    for (auto& [call, waiting] : actor.waiting) ordered[call] = &waiting;
    for (auto& [call, waiting] : ordered) {
      if (!waiting->reply) continue;
      const bool sent = actor.window.EverSent(call);
      if (sent || !actor.ref) {
        heard.push_back({std::move(waiting->reply), WhyGone(sent), ""});
      } else {
        unsent.push_back({actor.ref, number, waiting->method, actor.window.TakeArguments(call),
                          waiting->deadline->first, std::move(waiting->reply), nullptr});
      }
    }
    go_on();
  }
  Clear();
}

void OutgoingCalls::Adopt(uint64_t number, Moved moved) {
  Actor& actor = actors_[number];
  actor = std::move(moved.actor);
  actor.paused_until.reset();
  actor.acknowledges = false;
  actor.window.SendAgain();
  for (auto& [call, waiting] : actor.waiting) {
    if (waiting.reply) waiting.deadline = deadlines_.emplace(waiting.time, std::pair(number, call));
  }
  unsent_.insert(number);
}

void OutgoingCalls::Moved::OnTime(Instant now, HeardReplies& heard) {
  for (auto& [call, waiting] : actor.waiting) {
    if (!waiting.reply || waiting.time > now) continue;
    heard.push_back(
        {std::exchange(waiting.reply, nullptr),
         absl::DeadlineExceededError("the process of the actor was lost, and it is not made anew yet: the "
                                     "call may have run, or run later"),
         ""});
    actor.window.GiveUp(call);
  }
}

void OutgoingCalls::Moved::Cancel(const absl::Status& status, HeardReplies& heard) {
  for (auto& [call, waiting] : actor.waiting) {
    if (waiting.reply) heard.push_back({std::exchange(waiting.reply, nullptr), status, ""});
  }
}

void OutgoingCalls::Cancel(const absl::Status& status, HeardReplies& heard) {
  gone_ = true;
  for (auto& [number, actor] : actors_) {
    for (auto& [call, waiting] : actor.waiting) {
      if (waiting.reply) heard.push_back({std::move(waiting.reply), status, ""});
    }
    for (Call& call : actor.queued) heard.push_back({std::move(call.reply), status, ""});
  }
  Clear();
}

void OutgoingCalls::Clear() {
  actors_.clear();
  unsent_.clear();
  paused_.clear();
  deadlines_.clear();
  idle_.clear();
  acknowledge_at_.clear();
}

}  // namespace gtrain::actors
