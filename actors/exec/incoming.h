// The calls of other processes to the actors of this one: admitted once each and in their order, answered
// over whichever connection their caller has.
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

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "actors/exec/host.h"
#include "actors/plan/call_ledger.h"
#include "actors/plan/frames.h"
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
    std::function<Reply(const CallerId& caller, uint64_t actor, uint64_t number)> reply;
  };
  IncomingCalls(const CallerId& self, size_t callers_max, Functions functions)
      : self_(self), callers_max_(callers_max), functions_(std::move(functions)) {}

  // InvalidArgument: whoever sent it breaks the rules, and the rest of the message is dropped.
  absl::Status OnMessage(const port::Route& route, absl::string_view message);
  void Done(const CallerId& caller, uint64_t actor, uint64_t number, const absl::Status& status,
            absl::string_view result);
  void ActorEnded(uint64_t actor);
  void Forget(const CallerId& caller);  // its process is dead

  // Sends what connections take. True: some took not all; again in a moment.
  bool Flush(port::ServerTransport& server);

  size_t callers() const { return callers_.size(); }
  size_t answers_kept() const;

 private:
  struct Caller {
    port::Route route;  // the newest
    std::deque<std::string> unsent;
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
  CallLedger& Ledger(uint64_t actor);

  const CallerId self_;
  const size_t callers_max_;
  const Functions functions_;
  std::map<std::string, CallerId> routes_;  // those that said hello
  std::map<CallerId, Caller> callers_;
  std::map<uint64_t, CallLedger> ledgers_;  // by actor
  std::set<CallerId> waiting_;              // with something unsent
};

}  // namespace gtrain::actors
