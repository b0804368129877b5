// Where actors are that are no more where their references say: their process was lost, and their owner has
// made them anew.
//
// Calls that were not sent wait here, in their order, until the owner has said where they are to go. Not
// thread-safe. Cost: about 150 bytes of each actor that was looked for, and the calls that wait.
#pragma once
#include <compare>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "actors/exec/host.h"
#include "actors/exec/outgoing.h"
#include "base/clock.h"

namespace gtrain::actors {

class Relocations {
 public:
  using Call = OutgoingCalls::Call;

  // Calls go to where this reference says. An actor whose state is kept has one numbering of calls of each
  // process, so from its first call on it is called in the one place until that is lost, whatever references
  // say that come later: those could know of a place before this process has heard of the loss.
  bool GoesThere(const ActorRef& ref);
  // Where the actor of `call`, which has a reference, is to be called. None: the call was taken, since it is
  // being looked for, or is no more.
  std::optional<ActorAddress> Find(Call& call, HeardReplies& heard);
  // The actor is not at `at` any more. Takes the call. True: its owner is to be asked where it is.
  bool Lost(Call call, const ActorAddress& at);
  bool Lost(OutgoingCalls::Moved moved, const ActorAddress& at);
  // The owner's word: what waited for it, in its order, the calls behind `moved`. An error: the actor is no
  // more.
  struct Waited {
    std::optional<OutgoingCalls::Moved> moved;
    std::vector<Call> calls;
  };
  // Where it was not, of one that is looked for.
  ActorAddress NotAt(const ActorRef& ref) const;
  // The owner's word is of no use yet: it is asked again `then`.
  void AskLater(const ActorRef& ref, Instant then) { ask_.emplace_back(then, ref); }
  std::vector<ActorRef> ToAsk(Instant now);
  Waited Located(const ActorRef& ref, const absl::StatusOr<ActorAddress>& at, HeardReplies& heard);

  void OnTime(Instant now, HeardReplies& heard);
  std::optional<Instant> next_time() const;
  void Cancel(const absl::Status& status, HeardReplies& heard);

 private:
  struct Name {
    uint64_t owner_high = 0, owner_low = 0, id = 0;
    auto operator<=>(const Name&) const = default;
  };
  struct Target {
    ActorAddress at;
    bool sought = false;
    absl::Status ended;  // not OK: it is no more
    std::optional<OutgoingCalls::Moved> moved;
    std::deque<Call> waiting;
  };
  // Where a reference says nothing else its owner is the first.
  static Name NameOf(const ActorRef& ref) {
    if (ref.born_id == 0) return {ref.owner_high, ref.owner_low, ref.id};
    return {ref.born_high, ref.born_low, ref.born_id};
  }
  void Wait(const Name& name, Target& target, Call call);

  std::map<Name, Target> targets_;
  std::deque<std::pair<Instant, ActorRef>> ask_;  // whose owners, when
  std::set<std::pair<Instant, Name>> deadlines_;  // of calls that wait, or waited
};

}  // namespace gtrain::actors
