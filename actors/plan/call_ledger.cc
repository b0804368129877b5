#include "actors/plan/call_ledger.h"

#include <algorithm>
#include <utility>

namespace gtrain::actors {

CallLedger::CallLedger(size_t callers_max, const std::vector<CallerRecord>& records)
    : callers_max_(callers_max), restored_(true) {
  for (const CallerRecord& record : records) {
    Caller& caller = callers_[record.caller];
    caller.acknowledged = record.acknowledged;
    caller.next = record.acknowledged + 1;
    for (const auto& [number, answer] : record.answers) caller.window[number].answer = answer;
    // Answered ones may lie behind one that had begun.
    while (caller.window.contains(caller.next)) ++caller.next;
    answers_ += record.answers.size();
  }
}

void CallLedger::Acknowledge(Caller& caller, uint64_t acknowledged) {
  if (restored_ && acknowledged >= caller.next) caller.next = acknowledged + 1;
  while (caller.window.contains(caller.next)) ++caller.next;
  // More than was admitted nobody can have an answer of.
  acknowledged = std::min(acknowledged, caller.next - 1);
  if (acknowledged <= caller.acknowledged) return;
  caller.acknowledged = acknowledged;
  for (auto it = caller.window.begin(); it != caller.window.end() && it->first <= acknowledged;) {
    if (it->second.answer) --answers_;
    it = caller.window.erase(it);
  }
}

void CallLedger::Acknowledge(const CallerId& id, uint64_t acknowledged) {
  const auto it = callers_.find(id);
  if (it != callers_.end()) Acknowledge(it->second, acknowledged);
}

Admitted CallLedger::Offer(const CallerId& id, uint64_t number, uint64_t acknowledged) {
  auto it = callers_.find(id);
  if (it == callers_.end()) {
    if (callers_.size() >= callers_max_ || number == 0) return {};
    it = callers_.emplace(id, Caller()).first;
  }
  Caller& caller = it->second;
  Acknowledge(caller, acknowledged);
  Admitted admitted;
  admitted.next = caller.next;
  if (number <= caller.acknowledged) {
    admitted.what = number == 0 ? Admission::kRefused : Admission::kTooOld;
  } else if (number - caller.acknowledged > kCallsInWindow) {
    admitted.what = Admission::kRefused;
  } else if (number > caller.next) {
    admitted.what = Admission::kNotYet;
  } else if (number == caller.next) {
    admitted.what = Admission::kRun;
    caller.window[number];
    while (caller.window.contains(caller.next)) ++caller.next;
    admitted.next = caller.next;
  } else if (const std::optional<std::string>& answer = caller.window.at(number).answer) {
    admitted.what = Admission::kAnswered;
    admitted.answer = &*answer;
  } else {
    admitted.what = Admission::kBegun;
  }
  return admitted;
}

Admission CallLedger::OfferRepeatable(const CallerId& id, uint64_t after) const {
  const auto it = callers_.find(id);
  const uint64_t next = it == callers_.end() ? 1 : it->second.next;
  return after < next ? Admission::kRun : Admission::kNotYet;
}

void CallLedger::Withdraw(const CallerId& id, uint64_t number) {
  const auto it = callers_.find(id);
  if (it == callers_.end() || it->second.window.erase(number) == 0) return;
  it->second.next = std::min(it->second.next, number);
}

bool CallLedger::Answer(const CallerId& id, uint64_t number, std::string answer, bool changed) {
  const auto it = callers_.find(id);
  if (it == callers_.end()) return false;
  const auto place = it->second.window.find(number);
  if (place == it->second.window.end() || place->second.answer) return false;
  place->second.answer = std::move(answer);
  place->second.changed = changed;
  ++answers_;
  return true;
}

const std::string* CallLedger::AnswerTo(const CallerId& id, uint64_t number) const {
  const auto it = callers_.find(id);
  if (it == callers_.end()) return nullptr;
  const auto place = it->second.window.find(number);
  return place == it->second.window.end() || !place->second.answer ? nullptr : &*place->second.answer;
}

void CallLedger::AnswerAnew(const CallerId& id, uint64_t number, std::string answer) {
  const auto it = callers_.find(id);
  if (it == callers_.end()) return;
  const auto place = it->second.window.find(number);
  if (place != it->second.window.end() && place->second.answer) place->second.answer = std::move(answer);
}

void CallLedger::Forget(const CallerId& id) {
  const auto it = callers_.find(id);
  if (it == callers_.end()) return;
  for (const auto& [number, call] : it->second.window) answers_ -= call.answer ? 1 : 0;
  callers_.erase(it);
}

std::vector<CallerRecord> CallLedger::Records() const {
  std::vector<CallerRecord> records;
  for (const auto& [id, caller] : callers_) {
    CallerRecord record{id, caller.acknowledged, {}};
    for (const auto& [number, call] : caller.window) {
      if (call.answer && call.changed) record.answers.emplace_back(number, *call.answer);
    }
    records.push_back(std::move(record));
  }
  return records;
}

}  // namespace gtrain::actors
