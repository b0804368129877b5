// How long a wait goes on for ranks that have ended with exit code 0. A member that has ended takes no part
// in a call any more; its earlier messages may still be on their way here, and this process may have stood
// still: only a wait that goes on and looks many times was in vain. One object serves one wait, on one thread
// at a time.
#pragma once
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/clock.h"

namespace gtrain::comm {

class LeftPatience {
 public:
  // Called at each look that found `name` among the ranks that have ended.
  absl::Status Look(const std::string& name) {
    const Instant now = RealClock().Now();
    if (looks_++ == 0) since_ = now;
    if (looks_ <= kLooks || now - since_ < kPatience) return absl::OkStatus();
    return absl::UnavailableError(
        absl::StrCat(name, " ended with exit code 0 while others still wait for it"));
  }

 private:
  static constexpr absl::Duration kPatience = absl::Seconds(2);
  static constexpr int kLooks = 20;

  int looks_ = 0;
  Instant since_;
};

}  // namespace gtrain::comm
