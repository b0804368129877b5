// Actors by name. One process of the job keeps the names, the one that drives: who names an actor, or looks
// for one, asks it. When another process drives, each tells it the names of the actors that it owns.
//
// A name is free again when its actor's owner lets that go, or is dead; and where the actor has ended
// otherwise, as soon as another one wants the name. Thread-safe; nothing blocks. Cost: a message and its
// answer a name and a search, and one to the owner of the actor that is found; and of each process one to
// whoever drives, when another one does and at the start of the job, whether it has named actors or not: with
// 1,000 processes 999 connections there.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "actors/exec/host.h"
#include "actors/plan/members.h"
#include "actors/plan/names.h"
#include "base/mutex.h"

namespace gtrain::actors {

class Directory {
 public:
  struct Functions {
    std::function<void(const CallerId& process, Control method, const std::string& arguments,
                       absl::Duration timeout, Reply reply)>
        ask;
    // The reply is where the actor is. NotFound: it is no more.
    std::function<void(const ActorRef& ref, absl::Duration timeout, Reply reply)> locate;
  };
  // Of a process alone.
  Directory(const CallerId& self, Functions functions);

  // There are others, and SetKeeper says who keeps the names: until then all that is asked waits.
  void Join();
  // Who keeps the names from now on, and all processes. Where that is this one, what is asked waits until
  // each has said its names here, or is lost.
  void SetKeeper(const CallerId& process, std::set<CallerId> members);
  // What it owned has ended.
  void ProcessLost(const CallerId& process);

  // An actor that this process owns has the name. AlreadyExists: another one has it.
  void Name(const NamedActor& named, absl::Duration timeout, Reply reply);
  // Likewise of one that had it before this process owned it: at once, also when others have still to say
  // theirs. Of the process that keeps the names.
  void NameAgain(const NamedActor& named, Reply reply);
  // Runs when all names are known here; or when another process keeps them. At once, mostly.
  void AwaitNames(absl::AnyInvocable<void()> then);
  // Who keeps the names. None: nobody knows yet, or this process is alone.
  std::optional<CallerId> keeper() const;
  // This process lets its actor go.
  void Release(uint64_t id);
  // The reply is a reference. NotFound: nobody has the name. FailedPrecondition: the actor is of another
  // class.
  void Find(const FindRequest& request, absl::Duration timeout, Reply reply);

  // Others ask this process.
  void OnName(const CallerId& caller, const NameRequest& request, absl::Duration timeout, Reply reply);
  void OnFind(const CallerId& caller, const FindRequest& request, absl::Duration timeout, Reply reply);

 private:
  class Core;
  const std::shared_ptr<Core> core_;  // replies may come when this is gone
};

}  // namespace gtrain::actors
