// The calls of other processes to the actors of this one: admitted once each and in their order, answered
// over whichever connection their caller has.
//
// What changes an actor whose state is kept is answered when its owner has that state and the answer: so what
// anybody has heard of is never undone. One save of an actor is under way at a time and has all that came
// before it, so its cost is shared by the calls that come meanwhile.
//
// Not thread-safe. Cost: O(log n) a call where n processes have called the actor; memory: what CallLedger
// keeps, an actor's from the first call to its end, and the answers that connections do not take yet.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "actors/exec/host.h"
#include "actors/plan/call_ledger.h"
#include "actors/plan/frames.h"
#include "actors/plan/members.h"
#include "net/port/transport.h"

namespace gtrain::actors {

class IncomingCalls {
 public:
  struct Functions {
    // As Host::CallIfRoom.
    std::function<bool(uint64_t actor, int method, std::string& arguments, absl::Duration timeout,
                       Reply& reply)>
        call;
    std::function<bool(uint64_t actor)> lives;
    // Calls to the process itself; several run at a time.
    std::function<void(const CallerId& caller, uint32_t method, std::string arguments, absl::Duration timeout,
                       Reply reply)>
        control;
    // What a call comes to is brought to Done, from whichever thread.
    std::function<Reply(const CallerId& caller, uint64_t actor, uint64_t number, bool changes)> reply;
    std::function<bool(uint64_t actor, int method)> constant;
    // What an actor has saved is kept: its next state, behind a change, is brought to Saved.
    // `again`: whatever it has saved is kept by nobody any more.
    std::function<void(uint64_t actor, bool again)> save;
    // Brings a KeptRecord to the owner, whose word is brought to Kept.
    std::function<void(uint64_t actor, const CallerId& owner, uint64_t id, const std::string& record)> keep;
    // The state of an actor cannot be kept.
    std::function<void(uint64_t actor, const std::string& why)> end;
  };
  IncomingCalls(const CallerId& self, size_t callers_max, Functions functions)
      : self_(self), callers_max_(callers_max), functions_(std::move(functions)) {}

  // InvalidArgument: whoever sent it breaks the rules, and the rest of the message is dropped.
  absl::Status OnMessage(const port::Route& route, absl::string_view message);
  void Done(const CallerId& caller, uint64_t actor, uint64_t number, bool changes, const absl::Status& status,
            absl::string_view result);

  // From now on, and before anybody knows of the actor: its owner, which has the number `id` for it, keeps
  // it, and `record` is what it had elsewhere.
  // `detached`: when that owner is lost another one comes, and nothing is kept until then.
  void Keep(uint64_t actor, const CallerId& owner, uint64_t id, const KeptRecord& record, bool detached);
  // Another process owns it from now on, and has nothing of it yet.
  void KeptBy(uint64_t actor, const CallerId& owner, uint64_t id);
  void Saved(uint64_t actor, const absl::Status& status, absl::string_view state);
  // NotFound, Unavailable: nobody keeps it any more, and it ends. Other errors: the owner is asked again.
  void Kept(uint64_t actor, const absl::Status& status);
  // It has the state of the newest save again: what it has done since is undone.
  void Undone(uint64_t actor);

  // The process closes before the job is over, and its actors are lost and not ended: nothing is admitted
  // from now on, and nobody hears that an actor is no more. Callers hear of the loss.
  void Quiet() { quiet_ = true; }
  void ActorEnded(uint64_t actor);
  // Its process is dead, whatever still comes from it.
  void Forget(const CallerId& caller);

  // As ServerTransport::Send.
  using SendFunction = absl::FunctionRef<absl::Status(const port::Route& route, absl::string_view message)>;
  // Sends what connections take. True: some took not all; again in a moment.
  bool Flush(SendFunction send);
  // Over the connection of one caller. True: likewise.
  bool FlushOne(const CallerId& caller, SendFunction send);
  // The newest connection of a caller; null: it has none.
  const port::Route* RouteOf(const CallerId& caller) const;

 private:
  struct Caller {
    port::Route route;  // the newest
    std::deque<std::string> unsent;
  };
  struct Held {
    CallerId caller;
    uint64_t number = 0;
    auto operator<=>(const Held&) const = default;
  };
  struct KeptActor {
    CallerId owner;
    uint64_t id = 0, version = 0;
    bool detached = false;
    bool saving = false;
    bool changed = false;     // since the newest save
    std::vector<Held> held;   // answers since then
    std::vector<Held> saved;  // answers that are in it
    std::string record;       // of that save, until the owner has it
  };
  struct Again {
    uint64_t next = 0;
    bool full = false;
  };

  void OnHello(const port::Route& route, const HelloFrame& frame);
  void OnCall(const CallerId& caller, const CallFrame& frame, std::map<uint64_t, Again>& again);
  // False: there is no room for it.
  bool Run(const CallerId& caller, const CallFrame& frame);
  void Send(const CallerId& caller, absl::string_view frame);
  size_t Unsent(const CallerId& caller) const;  // bytes, in as many steps as messages wait
  void SendAnswer(const CallerId& caller, uint64_t actor, uint64_t number, absl::string_view answer);
  void SendHeld(uint64_t actor, std::vector<Held>& held);
  void Refuse(uint64_t actor, const std::vector<Held>& held);
  bool IsHeld(uint64_t actor, const CallerId& caller, uint64_t number) const;
  CallLedger& Ledger(uint64_t actor);
  bool FlushCaller(Caller& caller, SendFunction send);

  const CallerId self_;
  const size_t callers_max_;
  bool quiet_ = false;
  const Functions functions_;
  std::map<std::string, CallerId> routes_;  // those that said hello
  std::map<CallerId, Caller> callers_;
  std::map<uint64_t, CallLedger> ledgers_;  // by actor
  std::map<uint64_t, KeptActor> kept_;
  std::set<CallerId> dead_;     // about 50 bytes of each process that was lost
  std::set<CallerId> waiting_;  // with something unsent
};

}  // namespace gtrain::actors
