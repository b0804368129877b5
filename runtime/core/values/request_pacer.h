// When a client sends a request, and when again. PURE. The id stays the same, so the head executes it once
// (fault H15): at once on each new connection, else after 4 to 8 s without an answer, doubling, until the
// deadline. After the word that the head has too much to do just now: 0.1 to 0.2 s, doubling up to 1 to 2 s.
#pragma once
#include <optional>

#include "absl/time/time.h"
#include "base/clock.h"
#include "base/rng.h"
#include "runtime/core/values/messages.h"

namespace gtrain::core {

// Not thread-safe. A value.
class RequestPacer {
 public:
  RequestPacer(const ClientRequest& request, Instant start, absl::Duration timeout);

  bool Over(Instant now) const { return now >= deadline_; }
  Instant deadline() const { return deadline_; }
  // Whether to send now. A connection that is gone makes the next one send at once.
  bool Due(bool connected, Instant now);
  // Says whether the request that Due asked for was sent; `sent` false: the connection does not take it now.
  void Sent(bool sent, Instant now, Rng& rng);
  // Says that the head has received the request and had no room for it.
  void Refused(Instant now, Rng& rng);

 private:
  Instant deadline_;
  Instant next_;
  absl::Duration silence_min_;
  absl::Duration silence_;                         // the head may take so long without being asked again
  absl::Duration busy_ = absl::Milliseconds(100);  // it is left alone for so long at least
};

}  // namespace gtrain::core
