// The question that every wait loop of a collective asks: is the generation alive, is there time left? It
// costs some loads and a look at the clock, and a notice takes 511 bytes at most, independent of the number
// of ranks.
#pragma once
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "comm/port/bootstrap.h"

namespace gtrain::comm {

// A member that gives up says why in a *notice*: "rank 3 gave up: <why>". Peers pass it on as it is, behind a
// prefix that says where they heard it.
inline constexpr char kGaveUp[] = " gave up: ";
// The text about a member that ended well, for ranks that wait for it.
inline constexpr char kClosed[] = " has closed its communicator";
inline constexpr size_t kNoticeBytesMax = 511;
// The Unavailable that a call returns after it received a notice.
absl::Status GaveUp(absl::string_view notice);
// The notice that made a call return `status`; "" if none did.
std::string NoticeIn(const absl::Status& status);

// Marks `status` as an error that every member has found by itself, so that nobody needs a notice of it.
absl::Status KnownToAll(absl::Status status);
bool IsKnownToAll(const absl::Status& status);

// Returns `status` with `what` before its message; its payloads stay.
absl::Status Annotate(const absl::Status& status, absl::string_view what);

// A reason to end a wait beside time and the generation.
class Interrupt {
 public:
  virtual ~Interrupt() = default;
  // Returns OK, or the notice of a peer that has given up.
  virtual absl::Status Check() const = 0;
  // Returns the notice for the peers when this member gives up for `why`; "": they know, or will without it.
  virtual std::string Notice(const absl::Status& why) const = 0;
};

// Made for one operation. Time runs from the first question: an operation that never waits never reads a
// clock. Asked by one thread, or by several once one of them has asked.
class Watch {
 public:
  Watch(const Bootstrap* bootstrap, absl::Duration timeout, const Interrupt* interrupt = nullptr)
      : bootstrap_(bootstrap), timeout_(timeout), interrupt_(interrupt) {}

  // Unavailable with the reason once the generation is over or a peer gives up; DeadlineExceeded when time is
  // up.
  absl::Status Check() const;
  std::string Notice(const absl::Status& why) const {
    return interrupt_ == nullptr ? std::string() : interrupt_->Notice(why);
  }
  // Time left, at least zero.
  absl::Duration Left() const;
  // Moves the deadline by the time that something else than the operation took. Called by the thread that
  // calls Check, while no other thread does.
  void Excuse(absl::Duration took) const {
    if (deadline_) *deadline_ = *deadline_ + took;
  }
  // Returns a new Watch with all of its time, and at least `at_least`.
  Watch Anew(absl::Duration at_least) const {
    return Watch(bootstrap_, timeout_ < at_least ? at_least : timeout_, interrupt_);
  }
  absl::Duration timeout() const { return timeout_; }
  // The time since the first Check; zero if there was none.
  absl::Duration Waited() const;

 private:
  Instant Deadline() const;

  const Bootstrap* bootstrap_;
  absl::Duration timeout_;
  const Interrupt* interrupt_;
  mutable std::optional<Instant> deadline_;
};

}  // namespace gtrain::comm
