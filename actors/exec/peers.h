// The other processes of a job that run actors: calls to them and from them, over connections.
//
// One thread has the connections, the numbers of calls and what was admitted; others bring it work and are
// told what it came to. A connection to a process is made with the first call to it: over shared memory where
// that is on this machine, else over the network. What goes over shared memory needs no other thread: who
// calls and who answers sends it, taking a turn with all of this under a lock, and a thread of the host that
// has no work looks for what comes before it sleeps (Host::SetLookAround).
//
// Thread-safe; nothing here blocks but the destructor. Cost: over the network a wake-up of the thread a call
// when it sleeps, else none; two descriptors and some ten KiB a process that was called, and net/shm/link.h.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "actors/exec/host.h"
#include "actors/exec/outgoing.h"
#include "actors/plan/call_ledger.h"
#include "actors/plan/members.h"
#include "base/clock.h"
#include "net/port/transport.h"
#include "net/shm/link.h"
#include "net/shm/server.h"

namespace gtrain::actors {

// One that runs now.
struct PeerProcess {
  CallerId process;
  std::string endpoint;
  std::string name;  // for people: "rank 3 (node-7)"
};

class Peers {
 public:
  struct Options {
    CallerId self;
    size_t callers_max = 16'384;
    bool thread = true;  // false: whoever has the peers calls Turn instead (a simulation)
    std::function<absl::StatusOr<std::unique_ptr<port::ClientTransport>>(const std::string& endpoint)>
        connect;
    // Those that connect to this process over shared memory; null: none do. Null: there is no such process
    // on this machine.
    std::unique_ptr<net::ShmServer> local;
    std::function<std::unique_ptr<net::ShmLink>(const std::string& endpoint)> connect_near;
    // Calls to this process itself, from the thread: must not block.
    std::function<void(const CallerId& caller, uint32_t method, std::string arguments, absl::Duration timeout,
                       Reply reply)>
        control;
    // A process is no more.
    std::function<void(const CallerId& process)> on_gone;
    // Asks the owner of an actor where that is, if it is not at `not_at` any more; the reply is an address.
    std::function<void(const ActorRef& ref, const ActorAddress& not_at, Reply reply)> locate;
    // Brings a KeptRecord of an actor of this process to its owner.
    std::function<void(const CallerId& owner, uint64_t id, const std::string& record, Reply reply)> keep;
  };
  // `host` outlives it, closed or not, and so does `clock`.
  Peers(Host* host, std::unique_ptr<port::ServerTransport> server, Options options, const Clock& clock);
  ~Peers();  // Stop
  // As IncomingCalls::Quiet. Waits for a turn of the loop.
  void Quiet();
  // Sends the answers that are there, for a second at most. Calls without an answer are kCancelled, and so
  // are those that come later. Not from a reply.
  void Stop();
  // Of peers without a thread: what the connections have, and all that there is to do now. How long it may
  // wait for something to come.
  absl::Duration Turn();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  // All that run now, this one with them. Those that were here before and are no more answer nothing: their
  // callers hear kUnavailable. Whoever is called before it was named here is awaited.
  void SetProcesses(std::vector<PeerProcess> processes);

  // kUnavailable: the process is gone; the message says whether the call may have run. kDeadlineExceeded:
  // likewise. kResourceExhausted: kCallsInWindow calls of this process to this actor have no answer yet.
  // Others are those of Host::Call there. `on_late` may be null: OutgoingCalls has it.
  // A call that was not sent when the process of its actor was lost goes to where that is made anew.
  // kNotFound: it is no more.
  void Call(const ActorRef& ref, int method, std::string arguments, absl::Duration timeout, Reply reply);
  // A call to a process itself, which is never sent elsewhere.
  void Ask(const CallerId& process, uint32_t method, std::string arguments, absl::Duration timeout,
           Reply reply, std::function<void(absl::string_view result)> on_late = nullptr);

  // Calls of actors, and spawns, that others have answered since the peers were made.
  uint64_t answered() const;
  // An actor of this process has been made whose state is kept (IncomingCalls has it). Before its address is
  // told.
  void Keep(uint64_t actor, const CallerId& owner, uint64_t id, KeptRecord record, bool detached);
  // IncomingCalls::KeptBy.
  void KeptBy(uint64_t actor, const CallerId& owner, uint64_t id);
  // The state of a kept actor of this process is there.
  std::function<void(uint64_t actor, const absl::Status& status, const std::string& state)> OnSaved() const;
  // An actor of this process is no more; or has thrown and the state of before again.
  std::function<void(uint64_t actor)> OnEnd() const;
  std::function<void(uint64_t actor)> OnUndone() const;

 private:
  struct Inbox;
  class Loop;
  void Add(const CallerId& process, OutgoingCalls::Call call, absl::Duration timeout);

  Host* const host_;
  const Clock& clock_;
  const std::shared_ptr<Inbox> inbox_;
  const std::shared_ptr<Loop> loop_;  // threads of the host that are left to themselves have it, too
};

}  // namespace gtrain::actors
