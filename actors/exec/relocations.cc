#include "actors/exec/relocations.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace gtrain::actors {

void Relocations::Wait(const Name& name, Target& target, Call call) {
  deadlines_.emplace(call.deadline, name);
  target.waiting.push_back(std::move(call));
}

bool Relocations::GoesThere(const ActorRef& ref) {
  const Name name = NameOf(ref);
  auto it = targets_.find(name);
  if (it == targets_.end() && ref.kept()) {
    it = targets_.try_emplace(name).first;
    it->second.at = ref.at;
  }
  return it == targets_.end() || (!it->second.sought && it->second.ended.ok() && it->second.at == ref.at);
}

std::optional<ActorAddress> Relocations::Find(Call& call, HeardReplies& heard) {
  if (GoesThere(*call.ref)) return call.ref->at;
  const auto it = targets_.find(NameOf(*call.ref));
  Target& target = it->second;
  if (!target.ended.ok()) {
    heard.push_back({std::move(call.reply), target.ended, ""});
    return std::nullopt;
  }
  if (!target.sought) return target.at;
  if (target.waiting.size() >= kCallsInWindow) {
    heard.push_back({std::move(call.reply),
                     absl::ResourceExhaustedError(
                         absl::StrCat(kCallsInWindow,
                                      " calls wait for the actor to be made anew elsewhere: await answers "
                                      "before making other calls")),
                     ""});
    return std::nullopt;
  }
  Wait(it->first, target, std::move(call));
  return std::nullopt;
}

bool Relocations::Lost(Call call, const ActorAddress& at) {
  const Name name = NameOf(*call.ref);
  Target& target = targets_[name];
  target.at = at;
  const bool ask = !std::exchange(target.sought, true);
  Wait(name, target, std::move(call));
  return ask;
}

bool Relocations::Lost(OutgoingCalls::Moved moved, const ActorAddress& at) {
  const Name name = NameOf(moved.ref);
  Target& target = targets_[name];
  target.at = at;
  for (const auto& [number, waiting] : moved.actor.waiting) {
    if (waiting.reply) deadlines_.emplace(waiting.time, name);
  }
  target.moved.emplace(std::move(moved));
  return !std::exchange(target.sought, true);
}

Relocations::Waited Relocations::Located(const ActorRef& ref, const absl::StatusOr<ActorAddress>& at,
                                         HeardReplies& heard) {
  Waited waited;
  const auto it = targets_.find(NameOf(ref));
  if (it == targets_.end()) return waited;
  Target& target = it->second;
  target.sought = false;
  waited.moved = std::exchange(target.moved, std::nullopt);
  for (Call& call : std::exchange(target.waiting, {})) waited.calls.push_back(std::move(call));
  if (at.ok()) {
    target.at = *at;
    return waited;
  }
  target.ended =
      absl::IsUnavailable(at.status())
          ? absl::NotFoundError("the actor is no more: its process and that of its owner have ended")
          : at.status();
  if (waited.moved) waited.moved->Cancel(target.ended, heard);
  for (Call& call : waited.calls) heard.push_back({std::move(call.reply), target.ended, ""});
  return {};
}

ActorAddress Relocations::NotAt(const ActorRef& ref) const {
  const auto it = targets_.find(NameOf(ref));
  return it == targets_.end() ? ActorAddress() : it->second.at;
}

std::vector<ActorRef> Relocations::ToAsk(Instant now) {
  std::vector<ActorRef> due;
  for (; !ask_.empty() && ask_.front().first <= now; ask_.pop_front()) due.push_back(ask_.front().second);
  return due;
}

void Relocations::OnTime(Instant now, HeardReplies& heard) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    const Name name = deadlines_.begin()->second;
    deadlines_.erase(deadlines_.begin());
    const auto it = targets_.find(name);
    if (it == targets_.end()) continue;
    if (it->second.moved) it->second.moved->OnTime(now, heard);
    std::erase_if(it->second.waiting, [&](Call& call) {
      if (call.deadline > now) return false;
      heard.push_back(
          {std::move(call.reply),
           absl::DeadlineExceededError("the call has not been sent, and does not run: the process of "
                                       "the actor was lost, and it is not made anew yet"),
           ""});
      return true;
    });
  }
}

std::optional<Instant> Relocations::next_time() const {
  std::optional<Instant> next;
  if (!deadlines_.empty()) next = deadlines_.begin()->first;
  if (!ask_.empty() && (!next || ask_.front().first < *next)) next = ask_.front().first;
  return next;
}

void Relocations::Cancel(const absl::Status& status, HeardReplies& heard) {
  for (auto& [name, target] : targets_) {
    if (target.moved) target.moved->Cancel(status, heard);
    for (Call& call : target.waiting) heard.push_back({std::move(call.reply), status, ""});
    target.waiting.clear();
  }
}

}  // namespace gtrain::actors
