// The actors that this process owns: what each was made of, where it is, and where it is made anew when the
// process that had it is lost.
//
// A lost actor is made of the arguments of its spawn; what it had is gone with its process, unless its state
// is kept: then it has the newest that came here, before anybody heard of what is in it. That happens
// `restarts` times within kRestartWindow, then it has ended. Others who call it ask here where it is.
//
// Thread-safe; nothing blocks. Cost: an actor's arguments and about 500 bytes (`gtrain-sim --fleet`);
// kMakingAtOnce of those that a process had are made anew at a time.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "actors/exec/host.h"
#include "actors/plan/call_ledger.h"
#include "actors/plan/placement.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace gtrain::actors {

struct Placement {
  Spread spread = Spread::kProcesses;
  std::optional<int> rank;  // instead of it; any other process once that one is lost
  // Above 0: of the actors of this group no two are in one process, or on one machine where the spread is
  // kNodes; also of those that are made anew.
  uint64_t apart = 0;
  bool away = false;  // not in its owner's process where there is another one
};

class OwnedActors {
 public:
  struct Spec {
    std::string type;
    SpawnOptions options;
    Placement placement;
    bool detached = false;  // it has a name, and outlives this process
    bool named = false;     // and is known to have it
    bool unkept = false;    // it was adopted, and what it has is not here yet: lost, it ends
    std::string arguments;
    uint64_t id = 0;     // this process has this number for it, and keeps its state if the options say so
    std::string record;  // a KeptRecord; empty: there is none yet
  };
  struct Moved {
    std::string type, name;
    CallerId from;
    std::optional<CallerId> to;  // nullopt: it has ended
    std::string reason;          // then
  };
  struct Functions {
    // Where one is to be made; an error: nowhere.
    std::function<absl::StatusOr<CallerId>(const Placement& placement,
                                           const std::map<CallerId, size_t>& actors)>
        pick;
    // Makes one there; the reply is an address.
    std::function<void(const CallerId& at, const Spec& spec, absl::Duration timeout, Reply reply)> make;
    std::function<void(const ActorAddress& at, const std::string& reason)> end;
    // What became of an actor whose process was lost. May be null.
    std::function<void(const Moved& moved)> on_moved;
  };
  OwnedActors(const CallerId& self, Functions functions, const Clock& clock);

  // The reply is a reference. One whose process is lost as it is made is a lost one, too.
  void Spawn(Spec spec, absl::Duration timeout, Reply reply);
  // It is no more from now on, wherever it is.
  void End(uint64_t id, const std::string& reason);
  // The reply is the address of the actor, once that is another one than `not_at`. NotFound: it is no more.
  void Locate(uint64_t id, const ActorAddress& not_at, Reply reply);
  // Where it is, or was before it is made anew. NotFound: it is no more, or was never there.
  absl::StatusOr<ActorAddress> WhereLast(uint64_t id) const;
  // The newest state of an actor and the calls that are in it, from the process that has it. NotFound: it is
  // no more, or elsewhere.
  absl::Status Keep(uint64_t id, const CallerId& from, absl::string_view record);
  // It is in a process already, and its owner is lost: from now on it is this process's. The number that it
  // has here.
  uint64_t Adopt(Spec spec, const ActorAddress& at);
  // A detached actor has its name, and may be offered to the next owner from now on.
  void Named(uint64_t id);
  bool IsDetached(uint64_t id) const;  // one that is owned here
  // The reply comes when the actor has ended by itself, with the reason. Cancelled: its owner has let it go,
  // or owns nothing any more. NotFound: it is no more, and nobody knows why.
  void Watch(uint64_t id, Reply reply);
  // The process that has it says that it has ended.
  void EndedBy(uint64_t id, const CallerId& from, const std::string& reason);
  // A process is no more, and so are the actors that it had.
  void ProcessLost(const CallerId& process);
  // Nobody makes anything any more. Who waits for an actor to be made hears so: kCancelled.
  void Close();

  size_t size() const;

 private:
  struct Owned {
    Spec spec;
    ActorAddress at;
    CallerId on;  // where it is, or is being made
    bool made = false;
    std::optional<CallerId> lost_with;  // the process that had it, until it is made anew
    std::vector<Instant> losses;        // within kRestartWindow
    std::vector<Reply> asked, watch;
    Reply spawner;  // who has not heard of it yet, until `deadline`
    Instant deadline;
  };
  class Core;
  const std::shared_ptr<Core> core_;  // replies may come when this is gone
};

}  // namespace gtrain::actors
