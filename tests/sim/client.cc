#include "tests/sim/client.h"

namespace gtrain::sim {

Client::Client(Kernel& kernel, Network& network, Checker& checker, int machine, std::string key)
    : kernel_(kernel), network_(network), checker_(checker), machine_(machine), key_(std::move(key)) {}

void Client::Ask(core::ClientRequestBody body, int64_t timeout, Done done) {
  request_ = {absl::StrCat(key_, "-", ++asked_), absl::Nanoseconds(timeout), std::move(body)};
  Begin(timeout, std::move(done));
}

void Client::AskAgain(int64_t timeout, Done done) {
  if (!request_.id.empty()) Begin(timeout, std::move(done));
}

void Client::Begin(int64_t timeout, Done done) {
  ++life_;
  done_ = std::move(done);
  pacer_.emplace(request_, kernel_.Now(), absl::Nanoseconds(timeout));
  Turn();
}

void Client::Kill() {
  ++life_;
  pacer_.reset();
  if (connection_ != nullptr) network_.CloseNear(*connection_, false);
  connection_ = nullptr;
}

void Client::Connect() {
  if (!network_.CanConnect(machine_)) return;
  connection_ = network_.Connect(machine_, {core::Role::kAdmin, key_});
  connection_->deliver = [this](core::Message message) {
    const auto* reply = std::get_if<core::ClientReply>(&message);
    if (reply == nullptr) return;
    checker_.ClientHears(*reply);
    if (!pacer_ || reply->id != request_.id) return;
    if (reply->code == static_cast<int>(absl::StatusCode::kDeadlineExceeded))
      return;  // as ControlClient: ask again
    pacer_.reset();
    if (done_) done_(*reply);
  };
}

void Client::Turn() {
  if (!pacer_) return;
  if (pacer_->Over(kernel_.Now())) {
    pacer_.reset();
    if (done_) done_(std::nullopt);
    return;
  }
  if (connection_ == nullptr || !connection_->near) Connect();
  const bool connected = connection_ != nullptr && connection_->near;
  if (pacer_->Due(connected, kernel_.Now())) {
    request_.deadline = pacer_->deadline() - kernel_.Now();
    pacer_->Sent(network_.Send(*connection_, request_), kernel_.Now(), kernel_.rng);
  }
  kernel_.After(kSec, [this, life = life_] {
    if (life == life_) Turn();
  });
}

}  // namespace gtrain::sim
