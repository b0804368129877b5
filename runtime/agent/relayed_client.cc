#include "runtime/agent/relayed_client.h"

#include <utility>

#include "runtime/agent/relay.h"
#include "runtime/wire/codec.h"
#include "runtime/wire/packed.h"

namespace gtrain::agent {
namespace {

constexpr absl::Duration kOpenAgain = absl::Seconds(1);  // an answer may be lost with the relay's connection

}  // namespace

RelayedClient::RelayedClient(std::unique_ptr<port::ClientTransport> link, NodeId self, std::string secret,
                             std::shared_ptr<const Clock> clock, double jitter)
    : link_(std::move(link)),
      self_(std::move(self)),
      secret_(std::move(secret)),
      clock_(std::move(clock)),
      patience_(kRelayPatience * (1 + jitter / 3)),
      down_since_(clock_->Now()) {}

absl::Status RelayedClient::SendPart(core::RelayPart part) {
  core::RelayedUp up;
  up.parts.push_back(std::move(part));
  return link_->Send(wire::Encode(up));
}

void RelayedClient::Open() {
  half_ = net::NewSessionHalf();
  open_again_ = clock_->Now() + kOpenAgain;
  (void)SendPart({self_, core::RelayStage::kOpen, half_});
}

void RelayedClient::Close() {
  half_.clear();
  unanswered_since_.reset();
  if (std::exchange(heard_, false)) down_since_ = clock_->Now();
  if (std::exchange(session_, std::nullopt)) broken_ = true;
}

void RelayedClient::Turn() {
  const bool linked = link_->Connected();
  if (linked != linked_) {
    linked_ = linked;
    Close();
    if (linked) Open();
  }
  if (linked_ && !session_ && clock_->Now() >= open_again_) Open();
}

void RelayedClient::Renew() {
  Close();
  if (linked_) Open();
}

absl::Status RelayedClient::Say(absl::string_view payload, bool waits) {
  if (!session_) return absl::UnavailableError("no conversation with the head through the relay");
  if (payload.size() > kRelayedBytesMax) return absl::InvalidArgumentError("too long for a relay");
  const absl::Status sent =
      SendPart({self_, core::RelayStage::kSealed, session_->Seal(payload), 0, 0, waits});
  if (!sent.ok()) {  // the next one would not open
    Close();
    open_again_ = clock_->Now();
  }
  return sent;
}

// Behind the head's half is what it alone can seal: a relay cannot make an answer up.
void RelayedClient::OnAnswer(absl::string_view bytes) {
  if (half_.empty() || session_ || bytes.size() < net::kSessionHalfBytes) return;
  net::SealedSession session(net::SealedSession::End::kNode, secret_, half_,
                             bytes.substr(0, net::kSessionHalfBytes));
  if (!session.Open(bytes.substr(net::kSessionHalfBytes)).ok()) return;
  session_.emplace(session);
  half_.clear();
}

void RelayedClient::OnPart(const core::RelayedDown& down, const core::RelayPart& part) {
  switch (part.stage) {
    case core::RelayStage::kAnswer:
      return OnAnswer(part.bytes);
    case core::RelayStage::kOver:
    case core::RelayStage::kFound:
      Close();
      open_again_ = std::max(open_again_, clock_->Now());  // not more often than it is tried anyway
      if (part.stage == core::RelayStage::kFound) Open();
      return;
    case core::RelayStage::kLost:
      Close();
      open_again_ = clock_->Now() + kOpenAgain;
      return;
    case core::RelayStage::kSealed:
    case core::RelayStage::kShared: {
      if (!session_) return;
      absl::StatusOr<std::string> opened = session_->Open(part.bytes);
      if (opened.ok() && part.stage == core::RelayStage::kShared) {
        opened = part.body < down.bodies.size() ? net::OpenShared(down.bodies[part.body], *opened)
                                                : absl::DataLossError("a shared message without a body");
        if (opened.ok()) opened = wire::Unpack(*opened);
      }
      if (opened.ok()) {
        waiting_.push_back(*std::move(opened));
        opened_at_ = clock_->Now();
        heard_ = true;
        return;
      }
      Close();  // changed, repeated or left out on the way
      open_again_ = clock_->Now();
      return;
    }
    case core::RelayStage::kOpen:
      return;
  }
}

std::optional<std::string> RelayedClient::Receive() {
  Turn();
  while (waiting_.empty()) {
    const std::optional<std::string> payload = link_->Receive();
    if (!payload) return std::nullopt;
    absl::StatusOr<core::Message> message = wire::Decode(*payload, wire::Sender::kHead);
    const auto* down = message.ok() ? std::get_if<core::RelayedDown>(&*message) : nullptr;
    if (down == nullptr) continue;
    unanswered_since_.reset();
    for (const core::RelayPart& part : down->parts) {
      if (part.node == self_) OnPart(*down, part);
    }
  }
  std::string first = std::move(waiting_.front());
  waiting_.pop_front();
  return first;
}

bool RelayedClient::Connected() const { return !std::exchange(broken_, false) && session_.has_value(); }

void RelayedClient::Beat() {
  if (!session_) return;
  if (!unanswered_since_) unanswered_since_ = clock_->Now();
  (void)link_->Send(wire::Encode(core::RelayedUp{}));
}

bool RelayedClient::Failed() const {
  const Instant now = clock_->Now();
  if (!session_) return now - down_since_ > patience_;
  if (unanswered_since_ && now - *unanswered_since_ > kRelaySilence) return true;
  return heard_ ? now - opened_at_ > kHeadSilence : now - down_since_ > kHelloPatience;
}

}  // namespace gtrain::agent
