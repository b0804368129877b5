#include "runtime/core/request_pacer.h"

namespace gtrain::core {
namespace {

constexpr absl::Duration kSilenceMin = absl::Seconds(4);
constexpr absl::Duration kUnsentPause = absl::Milliseconds(200);

}  // namespace

RequestPacer::RequestPacer(const ClientRequest& request, Instant start, absl::Duration timeout)
    : deadline_(start + timeout), next_(start), silence_(kSilenceMin) {
  const auto* events = std::get_if<ClientEvents>(&request.body);
  if (events != nullptr) silence_ += events->wait;
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

}  // namespace gtrain::core
