#include "actors/plan/call_window.h"

#include <algorithm>
#include <utility>

namespace gtrain::actors {

std::optional<uint64_t> CallWindow::Add(std::string arguments) {
  if (full()) return std::nullopt;
  calls_[++last_].arguments = std::move(arguments);
  return last_;
}

std::optional<CallToSend> CallWindow::Next(uint64_t in_flight) {
  const auto it = calls_.lower_bound(unsent_);
  if (it == calls_.end() || it->first > acknowledged() + in_flight) return std::nullopt;
  unsent_ = it->first + 1;
  it->second.ever_sent = true;
  return CallToSend{it->first, acknowledged(), it->second.given_up,
                    it->second.given_up ? "" : it->second.arguments};
}

void CallWindow::SendAgain(uint64_t from) { unsent_ = std::min(unsent_, std::max(from, acknowledged() + 1)); }

bool CallWindow::EverSent(uint64_t number) const {
  const auto it = calls_.find(number);
  return it != calls_.end() && it->second.ever_sent;
}

std::string CallWindow::TakeArguments(uint64_t number) {
  const auto it = calls_.find(number);
  return it == calls_.end() ? "" : std::move(it->second.arguments);
}

bool CallWindow::Answered(uint64_t number) {
  const auto it = calls_.find(number);
  if (it == calls_.end()) return false;
  const bool awaited = !it->second.given_up;
  calls_.erase(it);
  return awaited;
}

bool CallWindow::GiveUp(uint64_t number) {
  const auto it = calls_.find(number);
  if (it == calls_.end() || it->second.given_up) return false;
  it->second.given_up = true;
  it->second.arguments.clear();
  unsent_ = std::min(unsent_, number);  // it is said once more; what follows is, too, which costs no run
  return true;
}

}  // namespace gtrain::actors
