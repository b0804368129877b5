// Virtual time: one queue of events, one source of randomness, one trace. Single-threaded and deterministic:
// equal seeds give equal traces.
#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/clock.h"
#include "base/rng.h"

namespace gtrain::sim {

inline constexpr int64_t kMs = 1'000'000, kSec = 1'000 * kMs, kMin = 60 * kSec;

struct Violation {
  std::string id;    // "INV-3", see docs/protocols/invariants.md
  std::string text;  // one sentence
  int64_t at = 0;
};

class Kernel {
 public:
  explicit Kernel(uint64_t seed) : rng(seed) {}

  int64_t now() const { return now_; }
  Instant Now() const { return {now_}; }
  void At(int64_t when, absl::AnyInvocable<void()> run);
  void After(int64_t delay, absl::AnyInvocable<void()> run) { At(now_ + delay, std::move(run)); }
  // Runs the next event if it is due by `until`; false: time is now `until`.
  bool RunOne(int64_t until);
  uint64_t events() const { return events_; }

  int64_t Between(int64_t low, int64_t high) {
    return high <= low ? low : low + static_cast<int64_t>(rng.Below(static_cast<uint64_t>(high - low)));
  }

  // One event of the trace. `mix` goes into the hash in every run; the words are joined only when traced.
  template <typename... Words>
  void Note(uint64_t mix, const Words&... words) {
    hash_ = (hash_ ^ mix ^ static_cast<uint64_t>(now_)) * 0x9E3779B97F4A7C15u;
    hash_ ^= hash_ >> 29;
    if (trace_lines_ > 0) Keep(absl::StrCat(words...));
  }
  uint64_t hash() const { return hash_; }
  bool tracing() const { return trace_lines_ > 0; }
  // Keeps the newest `lines`; `echo` prints each at once.
  void Trace(size_t lines, bool echo) { trace_lines_ = lines, echo_ = echo; }
  const std::deque<std::string>& trace() const { return trace_; }

  void Fail(std::string id, std::string text);
  const std::vector<Violation>& violations() const { return violations_; }
  bool failed() const { return !violations_.empty(); }

  Rng rng;
  std::map<std::string, int64_t> counts;  // what happened how often, for the report

 private:
  struct Event {
    int64_t at;
    uint64_t order;
    absl::AnyInvocable<void()> run;
    bool operator>(const Event& other) const { return at != other.at ? at > other.at : order > other.order; }
  };
  void Keep(std::string line);

  int64_t now_ = 0;
  uint64_t order_ = 0, events_ = 0, hash_ = 0;
  std::vector<Event> heap_;
  size_t trace_lines_ = 0;
  bool echo_ = false;
  std::deque<std::string> trace_;
  std::vector<Violation> violations_;
};

}  // namespace gtrain::sim
