#include "runtime/core/values/request_pacer.h"

#include <algorithm>

namespace gtrain::core {
namespace {

constexpr absl::Duration kSilenceMin = absl::Seconds(4);
constexpr absl::Duration kUnsentPause = absl::Milliseconds(200);
constexpr absl::Duration kBusyMax = absl::Seconds(1);

}  // namespace

RequestPacer::RequestPacer(const ClientRequest& request, Instant start, absl::Duration timeout)
    : deadline_(start + timeout), next_(start), silence_min_(kSilenceMin) {
  const auto* events = std::get_if<ClientEvents>(&request.body);
  if (events != nullptr) silence_min_ += events->wait;
  silence_ = silence_min_;
}

bool RequestPacer::Due(bool connected, Instant now) {
  if (connected) return now >= next_;
  next_ = now;
  return false;
}

void RequestPacer::Sent(bool sent, Instant now, Rng& rng) {
  next_ = now + (sent ? silence_ * (1 + rng.Unit()) : kUnsentPause);
  if (sent) silence_ *= 2;
}

void RequestPacer::Refused(Instant now, Rng& rng) {
  next_ = now + busy_ * (1 + rng.Unit());
  busy_ = std::min(2 * busy_, kBusyMax);
  silence_ = silence_min_;  // nothing was lost
}

}  // namespace gtrain::core
