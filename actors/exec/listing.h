// What people see of the actors of a process (`gtrain actors`). PURE: the host fills it in.
//
// The process answers a question, which is a JSON object, with another one: totals of each class, and the
// busiest actors. However many there are, the answer has kAnswerBytesMax at most.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/clock.h"

namespace gtrain::actors {

// How long calls took, and how many there were lately. 160 bytes, of an actor that has answered one. A time
// is known to a factor of two: what is between is made up.
class CallTimes {
 public:
  // A call that was made at `made` is answered `now`, which does not go back.
  void Count(Instant made, Instant now);
  void Add(const CallTimes& other);  // not the rate

  uint64_t count() const { return count_; }
  // So that `share` of the calls took no longer; 0 without calls.
  absl::Duration Quantile(double share) const;
  // In the last 10 to 20 s, or since the last call where that is longer ago.
  double PerSecond(Instant now) const;

 private:
  uint64_t count_ = 0;
  // Below 1024 ns, below 2048 ns, ..., half an hour and more.
  std::array<uint32_t, 32> buckets_ = {};
  Instant window_began_;
  uint32_t window_calls_ = 0, before_calls_ = 0;
  int64_t before_ns_ = 0;  // the window before
};

enum class Doing : uint8_t {
  kIdle,
  kWaiting,   // has calls, and waits for a thread
  kMaking,    // its constructor, maybe anew
  kRunning,   // a thread is inside of a method
  kAwaiting,  // it has begun a call and left its thread: a coroutine that awaits, or goes on behind that
  kSaving,
};
absl::string_view NameOf(Doing doing);

struct ActorFacts {
  uint64_t number = 0;
  std::string type, name;
  Doing doing = Doing::kIdle;
  std::string method;                           // kRunning, kAwaiting
  absl::Duration since = absl::ZeroDuration();  // it does that
  int thread = 0;                               // of the system, that is inside; 0: none
  size_t waiting = 0, waiting_bytes = 0;        // calls in its mailbox
  uint64_t answered = 0;
  double per_second = 0;
  absl::Duration half, most;  // of its calls took no longer: p50, p99
  int restarts = 0;           // after it threw, here
  bool kept = false;
  std::optional<int> owner;  // rank of the process that owns it, where that is known
};

struct ClassFacts {
  size_t actors = 0, running = 0, awaiting = 0;
  size_t waiting = 0, waiting_bytes = 0;
  double per_second = 0;
  uint64_t restarts = 0;
  CallTimes times;
};

struct ListQuestion {
  std::string type;                // empty: all
  std::string name;                // likewise
  std::optional<uint64_t> number;  // nullopt: all
  size_t limit = 50;
  bool Asks(const std::string& of_type, const std::string& of_name, uint64_t of_number) const {
    return (type.empty() || type == of_type) && (name.empty() || name == of_name) &&
           (!number || *number == of_number);
  }
};
inline constexpr size_t kRowsMax = 1000;
inline constexpr size_t kAnswerBytesMax = 512 << 10;
absl::StatusOr<ListQuestion> ParseListQuestion(absl::string_view json);

struct Listing {
  std::map<std::string, ClassFacts> classes;
  std::vector<ActorFacts> actors;  // the busiest first
  size_t left_out = 0;             // actors that were asked for and are not listed
};
std::string PrintListing(const Listing& listing);
std::string PrintListError(absl::string_view why);

// The name of a method, of the signature of its class; "method 3" where that says none.
std::string MethodOf(absl::string_view signature, int methods, int method);

}  // namespace gtrain::actors
