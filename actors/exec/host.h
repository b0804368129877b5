// Host runs actors: objects to which calls come one at a time.
//
// A call waits in the mailbox of its actor, which is bounded in calls and bytes, and has a deadline. Threads
// of the host take the actors that have work in turn. An actor has one thread of control unless its spawn
// says otherwise: it begins no other call until the one before has been answered, which may be after its
// function has returned. Calls that one thread makes to one actor run in that order. What each call came to
// its caller hears once.
//
// Thread-safe. Spawn, Call and End never block; functions of classes and callers are called without locks,
// callers' from any thread. A call costs O(log n) where n wait for an answer; an actor without work costs its
// object, its arguments, some 700 bytes here (`gtrain-sim --fleet`), and no thread.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "actors/exec/listing.h"
#include "base/clock.h"

namespace gtrain::actors {

struct HostOptions {
  int threads = 2;               // 0: none, and whoever has the host calls Turn (a simulation)
  std::optional<uint64_t> seed;  // of what names the host; none: the system's entropy
  size_t mailbox_calls = 1024;
  size_t mailbox_bytes = size_t{64} << 20;
  absl::Duration close_within = absl::Seconds(30);  // for the calls that have begun
  // An actor is no more; called once for each, without locks, from any thread. May be null.
  std::function<void(uint64_t number)> on_end;
  // The state of an actor that is kept, behind all calls that it has answered and before those that wait. The
  // first behind its first change, another one behind Save. False: nobody takes it, and the next comes at
  // once.
  std::function<bool(uint64_t number, const absl::Status& status, const std::string& state)> on_saved;
  // An actor whose state is kept threw, and has the state of its newest Save again; before it begins another
  // call. Likewise.
  std::function<void(uint64_t number)> on_undone;
  // A sentence for people: an actor threw, and what became of it. Likewise.
  std::function<void(const std::string& text)> on_news;
};

// Names an actor of any host, for ever: no other one gets its number.
struct ActorAddress {
  uint64_t host_high = 0, host_low = 0;  // drawn when the host was made
  uint64_t number = 0;
  bool operator==(const ActorAddress&) const = default;
  std::string Pack() const;
  static absl::StatusOr<ActorAddress> Parse(absl::string_view bytes);
};

// What travels: an actor of the process that owns it, for ever, wherever it is made anew.
struct ActorRef {
  uint64_t owner_high = 0, owner_low = 0;
  uint64_t id = 0;
  enum Flag : uint64_t {
    kKept = 1,      // the owner keeps its state
    kDetached = 2,  // when the owner is lost another process owns it
  };
  uint64_t flags = 0;
  // Its first owner and the number that it had there: the same in all references to it, whoever owns it now.
  uint64_t born_high = 0, born_low = 0, born_id = 0;
  ActorAddress at;  // where it was when this was written
  bool kept() const { return (flags & kKept) != 0; }
  bool detached() const { return (flags & kDetached) != 0; }
  bool operator==(const ActorRef&) const = default;
  std::string Pack() const;
  static absl::StatusOr<ActorRef> Parse(absl::string_view bytes);
};

// A call that an actor has begun. Whoever has it answers once.
class BegunCall {
 public:
  // `crashed`: the actor's state is of no more use. It is made anew, or ends. Deletes this object.
  virtual void Answer(const absl::Status& status, absl::string_view result, bool crashed) = 0;
  virtual absl::Duration Left() const = 0;  // of its time; zero where it is over

 protected:
  virtual ~BegunCall() = default;
};

struct ActorClass {
  std::string name;
  std::string signature;  // of all methods
  int methods = 0;
  std::function<absl::StatusOr<void*>(absl::string_view arguments)> create;
  std::function<void(void* self)> destroy;
  std::function<void(void* self, int method, absl::string_view arguments, BegunCall* call)> call;
  // Its state as bytes, and back into one that was made of the same arguments. Null: it cannot be kept.
  std::function<absl::StatusOr<std::string>(void* self)> save;
  std::function<absl::Status(void* self, absl::string_view state)> load;
  std::vector<bool> constant;  // methods that change nothing; may be shorter
};

struct SpawnOptions {
  int restarts = 3;  // within kRestartWindow, after it threw; and as many after its process was lost
  // Its state outlives its process, and it goes back to the newest that was saved when it throws.
  bool keep = false;
  std::optional<std::string> state;  // that it had elsewhere
  std::string name;                  // for people, in List and on_news
  // So many calls of it are begun and not answered at a time, on as many threads; above 1 it is not kept.
  int concurrency = 1;
};
inline constexpr int kConcurrencyMax = 1024;
inline constexpr absl::Duration kRestartWindow = absl::Hours(1);

using Reply = absl::AnyInvocable<void(const absl::Status&, absl::string_view)>;

class Host {
 public:
  // `clock` outlives it, and what the destructor leaves to itself. Throws std::system_error where no thread
  // can be started.
  Host(const HostOptions& options, const Clock& clock);
  ~Host();  // closes it
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  // kNotFound: it is not registered here.
  absl::StatusOr<std::string> SignatureOf(absl::string_view type) const;
  // kAlreadyExists: there is a class of this name with another signature.
  absl::Status Register(ActorClass type);
  // The reply is an address. kNotFound: no such class. Other errors are those of `create`.
  void Spawn(absl::string_view type, const SpawnOptions& options, std::string arguments,
             absl::Duration timeout, Reply reply);
  // kNotFound: there is no such actor, or no more. kResourceExhausted: its mailbox is full, nothing has run.
  // kDeadlineExceeded: it may have run unless the message says that it had not begun. kCancelled: the actor
  // ended before it began.
  void Call(const ActorAddress& address, int method, std::string arguments, absl::Duration timeout,
            Reply reply);
  // Call, for those that can wait: false where the mailbox is full, and nothing was taken then.
  bool CallIfRoom(const ActorAddress& address, int method, std::string& arguments, absl::Duration timeout,
                  Reply& reply);
  void End(const ActorAddress& address, absl::string_view reason);
  // The state of before is kept: when there has been a change since, another one is saved (on_saved).
  // `again`: nobody has what was saved before, so another one is, once what is on its way is kept.
  void Save(uint64_t number, bool again = false);
  // The method changes nothing. False: there is no such actor.
  bool Constant(uint64_t number, int method) const;
  // kInvalidArgument: actors of this class cannot be kept.
  absl::Status MayKeep(absl::string_view type) const;
  // What a thread without work does before it sleeps, one thread at a time: it looks for a short while
  // whether something comes from elsewhere, and comes back at once when `stop` says so. False: nothing came,
  // and the thread sleeps. It may call the host. Null: nothing.
  using LookAround = std::function<bool(absl::FunctionRef<bool()> stop)>;
  void SetLookAround(LookAround look);
  // A thread of the host runs this, before calls that wait. False: the host is closed, and nothing was taken.
  // What goes on when a call has been answered belongs there, and not in whichever thread hears of it.
  bool Post(absl::AnyInvocable<void()>& task);
  // Of a host without threads: deadlines that are over, and a turn of one actor or task. False: there was
  // nothing to do before NextDeadline.
  bool Turn();
  std::optional<Instant> NextDeadline() const;
  bool Lives(uint64_t number) const;
  std::string WhyEnded(uint64_t number) const;  // "" when that is long ago
  // Of the actors that it makes: `number` is theirs.
  ActorAddress address() const;

  // Ends all actors and waits until the calls that have begun are answered, `close_within` at most: what
  // runs then is left to itself. Everything else is answered as by one that has no actors. Not from inside of
  // an actor; one thread, once.
  void Close();

  // This thread is inside of an actor, which must not wait for calls.
  static bool Inside();

  struct Counts {
    size_t actors = 0;   // that live, or are being ended
    size_t waiting = 0;  // calls in mailboxes
    size_t begun = 0;
    uint64_t answered = 0;  // since the host was made
  };
  Counts counts() const;
  // Looks at all actors, a few at a time, so that calls go on meanwhile.
  Listing List(const ListQuestion& question) const;

 private:
  class Core;
  std::shared_ptr<Core> core_;  // threads that are left to themselves have it, too
};

}  // namespace gtrain::actors
