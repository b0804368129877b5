#include "tests/sim/actor_truth.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace gtrain::sim {
namespace {

constexpr int64_t kLateMax = 50 * kMs;  // a deadline is looked at in the next turn
constexpr int kForEver = 1'000'000;     // restarts that no seed uses up

// The sentence says that the call does not run.
bool SaysItHasNotRun(const absl::Status& status) {
  if (absl::IsResourceExhausted(status) || absl::IsCancelled(status) || absl::IsAborted(status)) return true;
  for (const char* words : {"does not run", "will not:", "has not run"}) {
    if (absl::StrContains(status.message(), words)) return true;
  }
  return false;
}

}  // namespace

int ActorTruth::NewProcess() {
  processes_.emplace_back();
  return static_cast<int>(processes_.size()) - 1;
}

void ActorTruth::Lost(int process, bool dead) {
  Process& lost = processes_[static_cast<size_t>(process)];
  const bool first = !std::exchange(lost.lost, true);
  if (first) ++any_lost_;
  lost.dead |= dead;
  for (const auto& life : lives_) {
    if (life->process != process || !life->alive) continue;
    if (dead) Destroyed(*life);
  }
  if (!dead) return;
  for (Call& call : calls_) {
    if (call.caller == process && !std::exchange(call.answered, true)) --unanswered_;
  }
  for (Actor& actor : actors_) {
    if (actor.owner == process && !actor.spawned) actor.spawned = absl::UnavailableError("its owner is dead");
  }
}

int ActorTruth::NewActor(int owner, bool kept, int restarts) {
  Actor& actor = actors_.emplace_back();
  actor.owner = owner;
  actor.kept = kept;
  actor.restarts = restarts;
  return static_cast<int>(actors_.size()) - 1;
}

void ActorTruth::Spawned(int number, const absl::Status& status, absl::string_view result) {
  Actor& actor = ActorOf(number);
  if (processes_[static_cast<size_t>(actor.owner)].dead) return;
  if (actor.spawned) return Fail("3", "the spawn of actor ", number, " was answered twice");
  actor.spawned = status;
  if (!status.ok()) return;
  const auto ref = actors::ActorRef::Parse(result);
  if (!ref.ok()) return Fail("3", "the spawn of actor ", number, " came to no reference");
  actor.ref = *ref;
}

size_t ActorTruth::NewCall(int actor, int caller, int method, int64_t deadline) {
  Call call;
  call.actor = actor;
  call.caller = caller;
  call.method = method;
  call.deadline = deadline;
  call.order = ++processes_[static_cast<size_t>(caller)].calls;
  calls_.push_back(call);
  ++unanswered_;
  return calls_.size() - 1;
}

std::string ActorTruth::Say(size_t number) const {
  const Call& call = calls_[number];
  return absl::StrCat("call ", number, " of process ", call.caller, " to actor ", call.actor,
                      actors_[static_cast<size_t>(call.actor)].kept ? " (kept)" : "");
}

void ActorTruth::Answered(size_t number, const absl::Status& status, absl::string_view result) {
  Call& call = calls_[number];
  if (processes_[static_cast<size_t>(call.caller)].dead) return;
  if (call.answered) return Fail("3", Say(number), " was answered twice");
  call.answered = true;
  call.code = status.code();
  --unanswered_;
  const int64_t paused_until = processes_[static_cast<size_t>(call.caller)].paused_until;
  if (kernel_.now() > std::max(call.deadline, paused_until) + kLateMax)
    Fail("3", Say(number), " was answered ", (kernel_.now() - call.deadline) / kMs,
         " ms behind its deadline: ", status.ToString());
  if (status.ok()) {
    CheckOk(number, result);
  } else {
    CheckError(number, status);
  }
}

// The result is the object that ran it and how many calls that had done by then.
void ActorTruth::CheckOk(size_t number, absl::string_view result) {
  const Call& call = calls_[number];
  const std::vector<absl::string_view> words = absl::StrSplit(result, ' ');
  size_t of = 0, count = 0;
  if (words.size() != 2 || !absl::SimpleAtoi(words[0], &of) || !absl::SimpleAtoi(words[1], &count) ||
      of >= lives_.size() || count > lives_[of]->done.size())
    return Fail("wrong answer", Say(number), " was answered '", result, "'");
  const Life& life = *lives_[of];
  if (life.actor != call.actor)
    return Fail("wrong answer", Say(number), " was answered by actor ", life.actor);
  Actor& actor = ActorOf(call.actor);
  if (call.method == kRead) {
    if (actor.kept) actor.heard.insert(life.done.begin(), life.done.begin() + static_cast<int64_t>(count));
    return;
  }
  if (call.method == kThrow) return Fail("6", Say(number), " threw and was answered with a result");
  if (count == 0 || life.done[count - 1] != number)
    return Fail("wrong answer", Say(number), " was answered with what another call came to");
  if (actor.kept) actor.heard.insert(number);
  CheckTold(actor, life, call.ran, number);
}

// Two objects of an actor do not both do what their callers are told is done at a time.
void ActorTruth::CheckTold(Actor& actor, const Life& life, uint64_t ran, size_t call) {
  // One that is not kept may go on where its process is given up and is not dead yet.
  if (!actor.kept && IsLost(life.process)) return;
  auto& [first, last] = actor.told.try_emplace(life.index, ran, ran).first->second;
  first = std::min(first, ran);
  last = std::max(last, ran);
  for (const auto& [other, span] : actor.told) {
    if (other != life.index && first <= span.second && span.first <= last)
      Fail("two lives", Say(call), " was done by object ", life.index, " while object ", other,
           " did others");
  }
}

void ActorTruth::CheckError(size_t number, const absl::Status& status) {
  const Call& call = calls_[number];
  Actor& actor = ActorOf(call.actor);
  const bool lives = ShouldLive(call.actor) && !IsLost(call.caller);
  if (SaysItHasNotRun(status)) {
    actor.never.insert(number);
    if (call.ran != 0 && !actor.kept)
      Fail("4, 5, 7", Say(number), " has run, and its caller heard: ", status.ToString());
  }
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
      if (actor.kept) Fail("10", Say(number), " heard of a lost process: ", status.ToString());
      if (!IsLost(call.caller) && std::ranges::none_of(actor.places, [this](int at) { return IsLost(at); }))
        Fail("9", Say(number),
             " heard of a lost process, and none was lost that had the actor: ", status.ToString());
      return;
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kCancelled:
      if (lives) Fail("7", Say(number), " was told that its actor is no more: ", status.ToString());
      return;
    case absl::StatusCode::kAborted:
      if (!actor.kept) Fail("10", Say(number), " was undone: ", status.ToString());
      return;
    case absl::StatusCode::kUnknown:
      if (call.method != kThrow) Fail("6", Say(number), " did not throw: ", status.ToString());
      return;
    case absl::StatusCode::kDeadlineExceeded:
      if (kernel_.now() < call.deadline - kLateMax)
        Fail("5", Say(number), " has ", (call.deadline - kernel_.now()) / kMs,
             " ms left: ", status.ToString());
      return;
    case absl::StatusCode::kResourceExhausted:
      return;
    default:
      Fail("wrong answer", Say(number), " came to ", status.ToString());
  }
}

ActorTruth::Life* ActorTruth::Made(int actor, int process) {
  auto life = std::make_unique<Life>();
  life->index = lives_.size();
  life->actor = actor;
  life->process = process;
  life->alive = !processes_[static_cast<size_t>(process)].dead;
  if (life->alive) ++ActorOf(actor).alive;
  ActorOf(actor).places.insert(process);
  lives_.push_back(std::move(life));
  return lives_.back().get();
}

absl::Status ActorTruth::Load(Life& life, absl::string_view state) {
  for (const absl::string_view word : absl::StrSplit(state, ',', absl::SkipEmpty())) {
    size_t call = 0;
    if (!absl::SimpleAtoi(word, &call) || call >= calls_.size())
      return absl::InvalidArgumentError("this is no state");
    life.done.push_back(call);
    life.last[calls_[call].caller] = calls_[call].order;
  }
  return absl::OkStatus();
}

std::string ActorTruth::Save(const Life& life) const { return absl::StrJoin(life.done, ","); }

void ActorTruth::CheckState(const Life& life, const char* when) {
  const Actor& actor = ActorOf(life.actor);
  std::set<size_t> done(life.done.begin(), life.done.end());
  for (const size_t call : actor.heard) {
    if (!done.contains(call))
      Fail("10", Say(call), " is undone, and somebody has heard of it: object ", life.index, " ", when);
  }
  for (const size_t call : life.done) {
    if (actor.never.contains(call))
      Fail("10", Say(call), " is done, and its caller heard that it does not run: object ", life.index, " ",
           when);
  }
}

std::string ActorTruth::Run(Life& life, size_t number) {
  Call& call = calls_[number];
  Actor& actor = ActorOf(life.actor);
  if (!std::exchange(life.begun, true) && actor.kept && !IsLost(life.process))
    CheckState(life, "as it begins its first call");
  if (life.actor != call.actor) Fail("wrong answer", Say(number), " came to actor ", life.actor);
  const bool lost = IsLost(life.process);
  if (!actor.kept && actor.never.contains(number) && !lost)
    Fail("4, 5, 7", Say(number), " runs, and its caller has heard that it does not");
  if (call.method == kRead) return absl::StrCat(life.index, " ", life.done.size());
  // A kept one may do again what nobody has heard of, in another object.
  const bool again = actor.kept ? std::ranges::count(life.done, number) > 0 : call.ran != 0;
  if (again) Fail("8", Say(number), " runs twice");
  uint64_t& last = life.last[call.caller];
  if (call.order <= last) Fail("2, 8", Say(number), " runs behind one that was made later");
  last = std::max(last, call.order);
  if (!actor.kept && !lost) {
    uint64_t& of_all = actor.last[call.caller];
    if (call.order <= of_all) Fail("2, 8", Say(number), " runs behind one that was made later, elsewhere");
    of_all = std::max(of_all, call.order);
  }
  call.ran = ++ran_;
  life.done.push_back(number);
  return absl::StrCat(life.index, " ", life.done.size());
}

void ActorTruth::Threw(Life& life, size_t number) {
  Call& call = calls_[number];
  if (!ActorOf(life.actor).kept && call.ran != 0) Fail("8", Say(number), " runs twice");
  call.ran = ++ran_;
  ++ActorOf(life.actor).throws;
}

void ActorTruth::Destroyed(Life& life) {
  if (!std::exchange(life.alive, false)) return;
  --ActorOf(life.actor).alive;
}

bool ActorTruth::ShouldLive(int number) const {
  const Actor& actor = actors_[static_cast<size_t>(number)];
  if (!actor.spawned || !actor.spawned->ok() || actor.ended || IsLost(actor.owner)) return false;
  return actor.restarts >= kForEver || (any_lost_ == 0 && actor.throws == 0);
}

const ActorTruth::Life* ActorTruth::Only(int number) const {
  const Life* only = nullptr;
  for (const auto& life : lives_) {
    if (life->actor == number && life->alive) only = life.get();
  }
  return only;
}

void ActorTruth::CheckRest() {
  for (size_t number = 0; number < calls_.size(); ++number) {
    if (!calls_[number].answered) Fail("3", Say(number), " has no answer");
  }
  for (size_t number = 0; number < actors_.size(); ++number) CheckActorAtRest(static_cast<int>(number));
}

void ActorTruth::CheckActorAtRest(int number) {
  const Actor& actor = actors_[static_cast<size_t>(number)];
  if (!actor.spawned) return Fail("3", "the spawn of actor ", number, " has no answer");
  const bool lives = ShouldLive(number);
  // One that may have been lost too often may have ended, or not.
  const bool may_live =
      lives || (actor.spawned->ok() && !actor.ended && !IsLost(actor.owner) && actor.restarts < kForEver);
  if (actor.alive > (may_live ? 1 : 0) || (lives && actor.alive == 0)) {
    return Fail("spawn", "actor ", number, " is ", actor.alive, " objects at rest: its spawn came to ",
                actor.spawned->ToString(), actor.ended ? ", its owner let it go" : "",
                IsLost(actor.owner) ? ", its owner is lost" : "");
  }
  if (const Life* const only = Only(number); only != nullptr && actor.kept) CheckState(*only, "at rest");
}

}  // namespace gtrain::sim
