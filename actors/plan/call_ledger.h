// CallLedger decides which calls of an actor run: those of each caller in their order, each once at most,
// however often they are sent. PURE.
//
// A caller numbers its calls to one actor from 1 and sends each until it has the answer, the oldest first on
// a new connection; with each it says up to which number it has all answers. Who answers keeps the answers
// above that number, and nothing of a caller below it but that number. A caller has kCallsInWindow calls
// without an answer at most, so that is all that a ledger ever keeps of it.
//
// The source is the exactly-once semantics of Lee et al., "Implementing Linearizability at Large Scale and
// Low Latency" (RIFL, SOSP 2015), with one number for what is acknowledged. There a lease says when a client
// is forgotten; here whoever knows that its process is dead says it.
//
// Not thread-safe. Cost: O(log n) a call where n callers have called this actor, O(1) bytes a caller (about
// 100) and its unacknowledged answers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace gtrain::actors {

// Calls without an answer that one caller may have at one actor.
inline constexpr uint64_t kCallsInWindow = 1024;

// One process for as long as it lives: drawn when it began.
struct CallerId {
  uint64_t high = 0, low = 0;
  auto operator<=>(const CallerId&) const = default;
};

enum class Admission {
  kRun,       // now, as the next one of its caller
  kBegun,     // it was admitted before, and is not answered yet: the answer goes to the newest connection
  kAnswered,  // `answer` is what it came to
  kNotYet,    // calls before it are missing: it was sent before they came, and will be sent again behind them
  kTooOld,    // its caller has said that it has the answer; it never runs again
  kRefused,   // the caller breaks the rules: its window is larger, or there are too many callers
};

struct Admitted {
  Admission what = Admission::kRefused;
  const std::string* answer = nullptr;  // until the next call of the ledger
  uint64_t next = 0;                    // the number that is awaited
};

// What is kept of a caller, for actors whose state outlives their process.
struct CallerRecord {
  CallerId caller;
  uint64_t acknowledged = 0;
  std::vector<std::pair<uint64_t, std::string>> answers;  // by number, above `acknowledged`
  bool operator==(const CallerRecord&) const = default;
};

class CallLedger {
 public:
  explicit CallLedger(size_t callers_max) : callers_max_(callers_max) {}
  // Whatever had begun and was not answered when the records were taken has not run: its effects are not in
  // the state that was taken with them. What a caller acknowledges beyond its record changed nothing, so it
  // is not awaited.
  CallLedger(size_t callers_max, const std::vector<CallerRecord>& records);

  // A call with its number, 1 at least, that changes the actor. `acknowledged` never goes back. What its
  // caller has given up comes as any other, so that those behind it are not held up, and is answered without
  // running where this says kRun.
  Admitted Offer(const CallerId& caller, uint64_t number, uint64_t acknowledged);
  // A call that changes nothing and has no number: it may run as often as it comes. It is not to overtake
  // `after`, the newest numbered call of its caller before it. kRun or kNotYet.
  Admission OfferRepeatable(const CallerId& caller, uint64_t after) const;
  // The call that was just admitted does not run after all, since there is no room for it: it is as if it had
  // not come.
  void Withdraw(const CallerId& caller, uint64_t number);
  // What an admitted call came to, once. False: nobody waits for it, and it is dropped.
  // `changed` false: it may run again where the actor is made anew, and is in no record.
  bool Answer(const CallerId& caller, uint64_t number, std::string answer, bool changed = true);
  // The caller has all answers up to this number, and calls nothing just now.
  void Acknowledge(const CallerId& caller, uint64_t acknowledged);
  // Null: it has none, or its caller has acknowledged it. Until the next call of the ledger.
  const std::string* AnswerTo(const CallerId& caller, uint64_t number) const;
  // Its effects are undone, and nobody has heard of it.
  void AnswerAnew(const CallerId& caller, uint64_t number, std::string answer);
  // The caller's process is dead: nothing of it comes any more.
  void Forget(const CallerId& caller);

  std::vector<CallerRecord> Records() const;
  size_t answers() const { return answers_; }

 private:
  struct Call {
    std::optional<std::string> answer;  // none: it has begun
    bool changed = true;
  };
  struct Caller {
    uint64_t acknowledged = 0;
    uint64_t next = 1;                // admitted are all before it
    std::map<uint64_t, Call> window;  // above `acknowledged`
  };
  void Acknowledge(Caller& caller, uint64_t acknowledged);

  size_t callers_max_;
  bool restored_ = false;
  std::map<CallerId, Caller> callers_;
  size_t answers_ = 0;
};

}  // namespace gtrain::actors
