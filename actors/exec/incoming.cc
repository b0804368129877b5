#include "actors/exec/incoming.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace gtrain::actors {
namespace {

std::string AnswerOf(uint64_t actor, uint64_t number, const absl::Status& status, absl::string_view result) {
  AnswerFrame frame;
  frame.actor = actor;
  frame.number = number;
  frame.code = status.code();
  absl::Status too_long;
  if (status.ok() && result.size() > kCallBytesMax) {
    too_long = absl::OutOfRangeError(
        absl::StrCat("the result has ", result.size(), " bytes, and ", kCallBytesMax, " are the most"));
    frame.code = too_long.code();
    frame.text = too_long.message();
  } else {
    frame.text = status.ok() ? result : status.message().substr(0, kErrorBytesMax);
  }
  std::string bytes;
  AppendFrame(frame, &bytes);
  return bytes;
}

}  // namespace

CallLedger& IncomingCalls::Ledger(uint64_t actor) {
  return ledgers_.try_emplace(actor, callers_max_).first->second;
}

absl::Status IncomingCalls::OnMessage(const port::Route& route, absl::string_view message) {
  std::map<uint64_t, Again> again;
  absl::Status status;
  const CallerId* caller = nullptr;
  if (const auto known = routes_.find(route.id); known != routes_.end()) caller = &known->second;
  while (!message.empty() && status.ok()) {
    const absl::StatusOr<Frame> frame = TakeFrame(&message);
    if (!frame.ok()) {
      status = frame.status();
    } else if (const auto* hello = std::get_if<HelloFrame>(&*frame)) {
      OnHello(route, *hello);
      caller = &routes_.at(route.id);
    } else if (const auto* call = std::get_if<CallFrame>(&*frame); call != nullptr && caller != nullptr) {
      OnCall(*caller, *call, again);
    } else if (call == nullptr) {
      status = absl::InvalidArgumentError("an answer to a process that has not called");
    }  // Whoever calls without a greeting was forgotten with its connection, and greets on the next.
  }
  for (const auto& [actor, what] : again) {
    std::string bytes;
    AppendFrame(AgainFrame{actor, what.next, what.full}, &bytes);
    Send(*caller, bytes);
  }
  return status;
}

void IncomingCalls::OnHello(const port::Route& route, const HelloFrame& frame) {
  Caller& caller = callers_[frame.from];
  if (caller.route.id != route.id) {
    routes_.erase(caller.route.id);
    caller.unsent.clear();  // it sends its calls again, and is told again what they came to
    caller.route = route;
  }
  routes_[route.id] = frame.from;
  std::string bytes;
  AppendFrame(WelcomeFrame{self_}, &bytes);
  Send(frame.from, bytes);
}

void IncomingCalls::OnCall(const CallerId& caller, const CallFrame& frame, std::map<uint64_t, Again>& again) {
  if (frame.actor != 0 && !ledgers_.contains(frame.actor) && !functions_.lives(frame.actor)) {
    // There is nothing to keep of it: no number comes twice.
    std::string arguments;
    Reply reply = functions_.reply(caller, frame.actor, frame.number);
    functions_.call(frame.actor, static_cast<int>(frame.method), arguments, absl::Seconds(1), reply);
    return;
  }
  CallLedger& ledger = Ledger(frame.actor);
  const Admitted admitted = ledger.Offer(caller, frame.number, frame.acknowledged);
  switch (admitted.what) {
    case Admission::kRun:
      if (Run(caller, frame)) return;
      ledger.Withdraw(caller, frame.number);
      again[frame.actor] = {frame.number, true};
      return;
    case Admission::kAnswered:
      return Send(caller, *admitted.answer);
    case Admission::kNotYet:
      again.try_emplace(frame.actor, Again{admitted.next, false});
      return;
    case Admission::kRefused:
      return Send(caller, AnswerOf(frame.actor, frame.number,
                                   absl::ResourceExhaustedError(absl::StrCat("more than ", callers_max_,
                                                                             " processes call this actor")),
                                   ""));
    case Admission::kBegun:   // its answer comes
    case Admission::kTooOld:  // its caller has it
      return;
  }
}

bool IncomingCalls::Run(const CallerId& caller, const CallFrame& frame) {
  Reply reply = functions_.reply(caller, frame.actor, frame.number);
  if (frame.given_up) {
    reply(absl::CancelledError("its caller has given it up"), "");
    return true;
  }
  std::string arguments(frame.arguments);
  const absl::Duration timeout = absl::Milliseconds(frame.timeout_ms);
  if (frame.actor == 0) {
    functions_.control(caller, frame.method, std::move(arguments), timeout, std::move(reply));
    return true;
  }
  return functions_.call(frame.actor, static_cast<int>(frame.method), arguments, timeout, reply);
}

void IncomingCalls::Done(const CallerId& caller, uint64_t actor, uint64_t number, const absl::Status& status,
                         absl::string_view result) {
  std::string answer = AnswerOf(actor, number, status, result);
  Send(caller, answer);
  if (const auto it = ledgers_.find(actor); it != ledgers_.end())
    it->second.Answer(caller, number, std::move(answer));
}

void IncomingCalls::ActorEnded(uint64_t actor) { ledgers_.erase(actor); }

void IncomingCalls::Forget(const CallerId& caller) {
  for (auto& [actor, ledger] : ledgers_) ledger.Forget(caller);
  const auto it = callers_.find(caller);
  if (it == callers_.end()) return;
  routes_.erase(it->second.route.id);
  waiting_.erase(caller);
  callers_.erase(it);
}

void IncomingCalls::Send(const CallerId& id, absl::string_view frame) {
  const auto it = callers_.find(id);
  if (it == callers_.end() || it->second.route.id.empty()) return;
  std::deque<std::string>& unsent = it->second.unsent;
  if (unsent.empty() || unsent.back().size() + frame.size() > kMessageBytes) unsent.emplace_back();
  unsent.back().append(frame.data(), frame.size());
  waiting_.insert(id);
}

bool IncomingCalls::Flush(port::ServerTransport& server) {
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    Caller& caller = callers_.at(*it);
    absl::Status sent;
    while (!caller.unsent.empty() && sent.ok()) {
      sent = server.Send(caller.route, caller.unsent.front());
      if (sent.ok()) caller.unsent.pop_front();
    }
    if (absl::IsResourceExhausted(sent)) {
      ++it;
      continue;
    }
    if (!sent.ok()) {  // it comes on another connection, and says hello
      routes_.erase(caller.route.id);
      caller.route = {};
      caller.unsent.clear();
    }
    it = waiting_.erase(it);
  }
  return !waiting_.empty();
}

size_t IncomingCalls::answers_kept() const {
  size_t kept = 0;
  for (const auto& [actor, ledger] : ledgers_) kept += ledger.answers();
  return kept;
}

}  // namespace gtrain::actors
