#include "actors/exec/incoming.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace gtrain::actors {
namespace {

// Answers that wait for a connection; of those that are asked for again no more are added then.
constexpr size_t kUnsentMax = size_t{16} << 20;

// What is kept of an answer, for whichever place its actor has when it is sent: a status code, then the
// result or the sentence.
std::string AnswerOf(const absl::Status& status, absl::string_view result) {
  std::string answer(1, static_cast<char>(status.code()));
  if (status.ok() && result.size() > kCallBytesMax) {
    answer[0] = static_cast<char>(absl::StatusCode::kOutOfRange);
    absl::StrAppend(&answer, "the result has ", result.size(), " bytes, and ", kCallBytesMax,
                    " are the most");
  } else {
    absl::StrAppend(&answer, status.ok() ? result : status.message().substr(0, kErrorBytesMax));
  }
  return answer;
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
      const auto greeted = routes_.find(route.id);
      caller = greeted == routes_.end() ? nullptr : &greeted->second;
    } else if (const auto* call = std::get_if<CallFrame>(&*frame); call != nullptr && caller != nullptr) {
      OnCall(*caller, *call, again);
    } else if (const auto* done = std::get_if<AcknowledgeFrame>(&*frame)) {
      const auto ledger = ledgers_.find(done->actor);
      if (caller != nullptr && ledger != ledgers_.end())
        ledger->second.Acknowledge(*caller, done->acknowledged);
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
  if (dead_.contains(frame.from)) return;
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
  if (quiet_) return;
  if (frame.actor != 0 && !ledgers_.contains(frame.actor) && !functions_.lives(frame.actor)) {
    // There is nothing to keep of it: no number comes twice.
    std::string arguments;
    Reply reply = functions_.reply(caller, frame.actor, frame.number, false);
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
      if (IsHeld(frame.actor, caller, frame.number)) return;
      if (Unsent(caller) > kUnsentMax) {  // it asks again, and takes nothing
        again.try_emplace(frame.actor, Again{frame.number, true});
      } else {
        SendAnswer(caller, frame.actor, frame.number, *admitted.answer);
      }
      return;
    case Admission::kNotYet:
      again.try_emplace(frame.actor, Again{admitted.next, false});
      return;
    case Admission::kRefused:
      return SendAnswer(caller, frame.actor, frame.number,
                        AnswerOf(absl::ResourceExhaustedError(
                                     absl::StrCat("more than ", callers_max_, " processes call this actor")),
                                 ""));
    case Admission::kBegun:   // its answer comes
    case Admission::kTooOld:  // its caller has it
      return;
  }
}

bool IncomingCalls::Run(const CallerId& caller, const CallFrame& frame) {
  // What changes nothing has no save behind it that its answer could wait for.
  const bool changes = !frame.given_up && (!kept_.contains(frame.actor) ||
                                           !functions_.constant(frame.actor, static_cast<int>(frame.method)));
  Reply reply = functions_.reply(caller, frame.actor, frame.number, changes);
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

void IncomingCalls::Done(const CallerId& caller, uint64_t actor, uint64_t number, bool changes,
                         const absl::Status& status, absl::string_view result) {
  std::string answer = AnswerOf(status, result);
  const auto kept = kept_.find(actor);
  const bool holds = kept != kept_.end() && (changes || kept->second.changed || kept->second.saving);
  if (!holds) SendAnswer(caller, actor, number, answer);
  if (const auto it = ledgers_.find(actor); it != ledgers_.end())
    it->second.Answer(caller, number, std::move(answer), changes);
  if (!holds) return;
  // What changes nothing, but saw what is not kept yet, waits for that, too.
  kept->second.held.push_back({caller, number});
  kept->second.changed |= changes;
}

// ---- actors whose state is kept

void IncomingCalls::Keep(uint64_t actor, const CallerId& owner, uint64_t id, const KeptRecord& record,
                         bool detached) {
  KeptActor& kept = kept_[actor];
  kept.owner = owner;
  kept.id = id;
  kept.detached = detached;
  kept.version = record.version;
  CallLedger ledger(callers_max_, record.callers);
  for (const CallerRecord& one : record.callers) {
    if (dead_.contains(one.caller)) ledger.Forget(one.caller);
  }
  ledgers_.insert_or_assign(actor, std::move(ledger));
}

void IncomingCalls::KeptBy(uint64_t actor, const CallerId& owner, uint64_t id) {
  const auto it = kept_.find(actor);
  if (it == kept_.end()) return;
  it->second.owner = owner;
  it->second.id = id;
  if (it->second.record.empty()) return functions_.save(actor, /*again=*/true);
  functions_.keep(actor, owner, id, it->second.record);
}

// All answers that came before the state are in it.
void IncomingCalls::Saved(uint64_t actor, const absl::Status& status, absl::string_view state) {
  const auto it = kept_.find(actor);
  if (it == kept_.end()) return;
  KeptActor& kept = it->second;
  if (!status.ok())
    return functions_.end(actor, absl::StrCat("its state cannot be kept: ", status.message()));
  kept.saving = true;
  kept.changed = false;
  kept.saved = std::exchange(kept.held, {});
  std::string record = PrintRecord({++kept.version, std::string(state), Ledger(actor).Records()});
  if (record.size() > kRecordBytesMax) {
    return functions_.end(actor,
                          absl::StrCat("its state cannot be kept: with answers that their callers have not "
                                       "acknowledged it has ",
                                       record.size(), " bytes, and ", kRecordBytesMax, " are the most"));
  }
  kept.record = std::move(record);
  functions_.keep(actor, kept.owner, kept.id, kept.record);
}

void IncomingCalls::Kept(uint64_t actor, const absl::Status& status) {
  const auto it = kept_.find(actor);
  if (it == kept_.end() || it->second.record.empty()) return;
  KeptActor& kept = it->second;
  if (absl::IsUnavailable(status) && kept.detached) return;  // KeptBy
  if (absl::IsNotFound(status) || absl::IsUnavailable(status))
    return functions_.end(actor, absl::StrCat("its owner does not keep it: ", status.message()));
  if (!status.ok()) return functions_.keep(actor, kept.owner, kept.id, kept.record);
  kept.record.clear();
  SendHeld(actor, kept.saved);
  kept.saving = false;
  if (!kept.changed) SendHeld(actor, kept.held);  // all that they saw is kept
  functions_.save(actor, /*again=*/false);
}

void IncomingCalls::Undone(uint64_t actor) {
  const auto it = kept_.find(actor);
  if (it == kept_.end()) return;
  const std::string undone =
      AnswerOf(absl::AbortedError(
                   "the actor threw before this call was kept, and has its state of before: it is undone"),
               "");
  for (const Held& one : it->second.held) {
    const std::string* const answer = Ledger(actor).AnswerTo(one.caller, one.number);
    if (answer != nullptr && answer->front() == '\0')
      Ledger(actor).AnswerAnew(one.caller, one.number, undone);
  }
}

bool IncomingCalls::IsHeld(uint64_t actor, const CallerId& caller, uint64_t number) const {
  const auto it = kept_.find(actor);
  if (it == kept_.end()) return false;
  const Held wanted{caller, number};
  return std::ranges::count(it->second.held, wanted) + std::ranges::count(it->second.saved, wanted) > 0;
}

void IncomingCalls::SendHeld(uint64_t actor, std::vector<Held>& held) {
  for (const Held& one : std::exchange(held, {})) {
    if (const std::string* const answer = Ledger(actor).AnswerTo(one.caller, one.number))
      SendAnswer(one.caller, actor, one.number, *answer);
  }
}

void IncomingCalls::Refuse(uint64_t actor, const std::vector<Held>& held) {
  const std::string refused = AnswerOf(
      absl::AbortedError("the actor ended before anybody else had what came of this call: it is undone"), "");
  for (const Held& one : held) SendAnswer(one.caller, actor, one.number, refused);
}

// What was not kept may be undone where the actor is made anew.
void IncomingCalls::ActorEnded(uint64_t actor) {
  if (const auto it = kept_.find(actor); it != kept_.end()) {
    Refuse(actor, it->second.saved);
    Refuse(actor, it->second.held);
    kept_.erase(it);
  }
  ledgers_.erase(actor);
}

void IncomingCalls::Forget(const CallerId& caller) {
  dead_.insert(caller);
  for (auto& [actor, ledger] : ledgers_) ledger.Forget(caller);
  const auto it = callers_.find(caller);
  if (it == callers_.end()) return;
  routes_.erase(it->second.route.id);
  waiting_.erase(caller);
  callers_.erase(it);
}

void IncomingCalls::SendAnswer(const CallerId& caller, uint64_t actor, uint64_t number,
                               absl::string_view answer) {
  AnswerFrame frame;
  frame.actor = actor;
  frame.number = number;
  frame.code = static_cast<absl::StatusCode>(answer.front());
  if (quiet_ && (frame.code == absl::StatusCode::kNotFound || frame.code == absl::StatusCode::kCancelled ||
                 frame.code == absl::StatusCode::kAborted))
    return;
  frame.text = answer.substr(1);
  std::string bytes;
  AppendFrame(frame, &bytes);
  Send(caller, bytes);
}

size_t IncomingCalls::Unsent(const CallerId& id) const {
  const auto it = callers_.find(id);
  if (it == callers_.end()) return 0;
  size_t bytes = 0;
  for (const std::string& message : it->second.unsent) bytes += message.size();
  return bytes;
}

void IncomingCalls::Send(const CallerId& id, absl::string_view frame) {
  const auto it = callers_.find(id);
  if (it == callers_.end() || it->second.route.id.empty()) return;
  std::deque<std::string>& unsent = it->second.unsent;
  if (unsent.empty() || unsent.back().size() + frame.size() > kMessageBytes) unsent.emplace_back();
  unsent.back().append(frame.data(), frame.size());
  waiting_.insert(id);
}

bool IncomingCalls::FlushCaller(Caller& caller, SendFunction send) {
  absl::Status sent;
  while (!caller.unsent.empty() && sent.ok()) {
    sent = send(caller.route, caller.unsent.front());
    if (sent.ok()) caller.unsent.pop_front();
  }
  if (absl::IsResourceExhausted(sent)) return true;
  if (!sent.ok()) {  // it comes on another connection, and says hello
    routes_.erase(caller.route.id);
    caller.route = {};
    caller.unsent.clear();
  }
  return false;
}

bool IncomingCalls::Flush(SendFunction send) {
  for (auto it = waiting_.begin(); it != waiting_.end();)
    it = FlushCaller(callers_.at(*it), send) ? std::next(it) : waiting_.erase(it);
  return !waiting_.empty();
}

bool IncomingCalls::FlushOne(const CallerId& caller, SendFunction send) {
  const auto it = waiting_.find(caller);
  if (it == waiting_.end()) return false;
  if (FlushCaller(callers_.at(caller), send)) return true;
  waiting_.erase(it);
  return false;
}

const port::Route* IncomingCalls::RouteOf(const CallerId& caller) const {
  const auto it = callers_.find(caller);
  return it == callers_.end() || it->second.route.id.empty() ? nullptr : &it->second.route;
}

}  // namespace gtrain::actors
