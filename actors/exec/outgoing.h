// The calls of this process to one other process: numbered, sent again over connections that break, answered
// once each, and given up when their time is over.
//
// To each actor a few calls are under way at a time, up to kCallsInWindow: half as many once the other end
// says that there is no room for them, one more with each answer (Jacobson, "Congestion Avoidance and
// Control", SIGCOMM 1988). So a thousand callers of one slow actor send it a call or two each, and not all
// that they have again and again.
//
// Not thread-safe. Cost: O(log n) a call where n are under way; about 300 bytes and its arguments.
#pragma once
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "actors/exec/host.h"
#include "actors/plan/call_window.h"
#include "actors/plan/frames.h"
#include "base/clock.h"

namespace gtrain::actors {

// What callers are told, once no lock is held.
struct HeardReply {
  Reply reply;
  absl::Status status;
  std::string result;
};
using HeardReplies = std::vector<HeardReply>;

class OutgoingCalls {
 public:
  // `name`: of the other process, for people.
  OutgoingCalls(const CallerId& self, const CallerId& to, std::string name)
      : self_(self), to_(to), name_(std::move(name)) {}

  // `on_late`: hears of a good result that comes when the caller has been told that its time is over. May be
  // null.
  struct Call {
    std::optional<ActorRef> ref;  // of an actor that may be made anew elsewhere
    uint64_t actor = 0;
    uint32_t method = 0;
    std::string arguments;
    Instant deadline;
    Reply reply;
    std::function<void(absl::string_view result)> on_late;
  };
  // kResourceExhausted: kCallsInWindow calls to this actor wait for their answers; those to the process
  // itself, and those behind calls that were given up and are not answered yet, wait for their turn. Not when
  // it is gone.
  void Add(Call call, HeardReplies& heard);
  absl::Status WhyGone(bool sent) const;

  // A connection is there; the next message greets on it.
  void Connected();
  void Lost() { state_ = State::kAway; }
  // What is to be sent now, about kMessageBytes; empty: nothing.
  std::string NextMessage(Instant now);
  // InvalidArgument: the other end breaks the rules. NotFound: another process is at its address, so it is
  // gone.
  absl::Status OnMessage(absl::string_view message, Instant now, HeardReplies& heard);
  // Tells those whose time is over, and lets those that were to wait go on.
  void OnTime(Instant now, HeardReplies& heard);
  // When OnTime has something to do.
  std::optional<Instant> next_time() const;
  // All calls to one actor, which go elsewhere with their numbers.
  struct Moved;
  // The process is no more: what was sent may have run, and its callers hear so. What was not comes to
  // `unsent` where it has a reference, in its order; and all calls to an actor whose state is kept to
  // `moved`.
  void Gone(absl::string_view why, HeardReplies& heard, std::vector<Call>& unsent, std::vector<Moved>& moved);
  // They go to `actor` of this process.
  void Adopt(uint64_t actor, Moved moved);
  bool gone() const { return gone_; }
  bool welcome() const { return state_ == State::kWelcome; }  // calls go out at once
  // This process calls no more: those who wait hear this.
  void Cancel(const absl::Status& status, HeardReplies& heard);

  uint64_t answered() const { return answered_; }  // calls of actors, and spawns
  bool idle() const { return deadlines_.empty() && !HasUnsent(); }
  const std::string& name() const { return name_; }
  void set_name(std::string name) { name_ = std::move(name); }

 private:
  enum class State { kAway, kConnected, kGreeted, kWelcome };
  struct Waiting {
    Reply reply;  // null: its caller has been told
    std::function<void(absl::string_view)> on_late;
    uint32_t method = 0;
    Instant time;
    std::multimap<Instant, std::pair<uint64_t, uint64_t>>::iterator deadline;  // while there is a reply
  };
  struct Actor {
    std::optional<ActorRef> ref;
    CallWindow window;
    std::unordered_map<uint64_t, Waiting> waiting;  // by number
    std::list<Call> queued;                         // behind a full window
    uint64_t in_flight_max = kCallsInWindow;
    absl::Duration pause;
    std::optional<Instant> paused_until;
    bool full = false;          // its mailbox was, when it was last heard of
    bool acknowledges = false;  // `acknowledge_at_` has it
  };
  void Enter(Actor& actor, uint64_t number, Call call);
  void Acknowledge(Instant now, std::string* message);

  void OnAnswer(const AnswerFrame& frame, Instant now, HeardReplies& heard);
  void OnAgain(const AgainFrame& frame, Instant now);
  void OnWelcome();
  void Expire(uint64_t actor, uint64_t number, HeardReplies& heard);
  void Clear();
  absl::Status Late(const Actor& actor, uint64_t number) const;
  void AppendCalls(uint64_t number, Actor& actor, Instant now, std::string* message);
  bool HasUnsent() const { return !unsent_.empty(); }

  const CallerId self_, to_;
  std::string name_;
  State state_ = State::kAway;
  bool gone_ = false;
  uint64_t answered_ = 0;
  std::string why_gone_;
  std::map<uint64_t, Actor> actors_;
  std::unordered_map<uint64_t, uint64_t> idle_;  // the last number of actors that nothing is under way to
  std::set<std::pair<Instant, uint64_t>> acknowledge_at_;  // when, which actor: nothing is under way to it
  uint64_t served_ = 0;                                    // the actor whose calls were sent last
  std::set<uint64_t> unsent_;                              // actors with something to send
  std::set<std::pair<Instant, uint64_t>> paused_;          // until when, which actor
  std::multimap<Instant, std::pair<uint64_t, uint64_t>> deadlines_;  // actor, number
};

struct OutgoingCalls::Moved {
  ActorRef ref;
  uint64_t number = 0;  // where it was
  Actor actor;
  // Tells those whose time is over.
  void OnTime(Instant now, HeardReplies& heard);
  void Cancel(const absl::Status& status, HeardReplies& heard);
};

}  // namespace gtrain::actors
