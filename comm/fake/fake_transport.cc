#include "comm/fake/fake_transport.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace gtrain::comm {

class FakeTransport final : public DataTransport {
 public:
  FakeTransport(FakeNetwork* network, std::string name) : network_(network), name_(std::move(name)) {}

  absl::StatusOr<std::string> Address() override { return name_; }
  absl::Status Connect(const std::vector<std::string>& addresses, int) override {
    peers_ = addresses;
    return absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<DataTransport>> Part(const std::vector<int>& members, int self,
                                                      uint64_t id) override {
    const auto name = [&](const std::string& whole) { return absl::StrCat(whole, "/", id); };
    auto part = std::make_unique<FakeTransport>(
        network_, name(peers_[static_cast<size_t>(members[static_cast<size_t>(self)])]));
    for (const int member : members) part->peers_.push_back(name(peers_[static_cast<size_t>(member)]));
    return part;
  }

  absl::Status Exchange(absl::Span<const Transfer> transfers, absl::FunctionRef<void(size_t)> done,
                        const Watch& watch) override {
    if (dead_) return absl::FailedPreconditionError("the transport has failed before");
    spoke_ |= !transfers.empty();
    unfinished_.clear();
    const absl::Status status = Move(transfers, done, watch);
    if (!status.ok()) Fail(watch.Notice(status));
    return status;
  }

  void Fail(absl::string_view notice) override {
    if (std::exchange(dead_, true) || notice.empty() || !spoke_) return;
    MutexLock lock(&network_->mutex_);
    if (network_->notices_.contains(name_)) return;
    for (const std::string& peer : peers_) {
      if (peer != name_) network_->notices_.emplace(peer, notice);
    }
  }

  void Leave(absl::string_view words) override {
    if (std::exchange(dead_, true) || !spoke_) return;
    MutexLock lock(&network_->mutex_);
    network_->left_.emplace(name_, words);
  }

  std::vector<int> Unfinished() const override { return unfinished_; }

  absl::Status Heard() override {
    MutexLock lock(&network_->mutex_);
    const auto it = network_->notices_.find(name_);
    return it == network_->notices_.end() ? absl::OkStatus() : GaveUp(it->second);
  }

 private:
  absl::Status Move(absl::Span<const Transfer> transfers, absl::FunctionRef<void(size_t)> done,
                    const Watch& watch) {
    for (const Transfer& t : transfers) {
      if (!t.send) continue;
      MutexLock lock(&network_->mutex_);
      network_->mail_[{name_, Peer(t)}].emplace_back(static_cast<const char*>(t.data), t.bytes);
    }
    for (size_t i = 0; i < transfers.size(); ++i) {
      const absl::Status moved = transfers[i].send ? absl::OkStatus() : Receive(transfers[i], watch);
      if (!moved.ok()) {
        unfinished_ = {transfers[i].peer};
        return moved;
      }
      done(i);
    }
    return absl::OkStatus();
  }

  const std::string& Peer(const Transfer& t) const { return peers_[static_cast<size_t>(t.peer)]; }

  absl::Status Receive(const Transfer& t, const Watch& watch) {
    for (;;) {
      {
        MutexLock lock(&network_->mutex_);
        std::deque<std::string>& box = network_->mail_[{Peer(t), name_}];
        if (network_->mutex_.AwaitFor(absl::Milliseconds(20), [&box] { return !box.empty(); }))
          return Take(t, box);
        if (const auto left = network_->left_.find(Peer(t)); left != network_->left_.end())
          return absl::UnavailableError(left->second);
      }
      GT_RETURN_IF_ERROR(watch.Check());
    }
  }

  static absl::Status Take(const Transfer& t, std::deque<std::string>& box) {
    const std::string& message = box.front();
    if (t.received == nullptr ? message.size() != t.bytes : message.size() > t.bytes) {
      return absl::InternalError("message of an unexpected size");
    }
    if (t.received != nullptr) *t.received = message.size();
    std::memcpy(t.data, message.data(), message.size());
    box.pop_front();
    return absl::OkStatus();
  }

  FakeNetwork* const network_;
  const std::string name_;
  std::vector<std::string> peers_;
  bool dead_ = false;
  bool spoke_ = false;  // who never did is connected with nobody
  std::vector<int> unfinished_;
};

std::unique_ptr<DataTransport> FakeNetwork::MakeTransport() {
  MutexLock lock(&mutex_);
  return std::make_unique<FakeTransport>(this, absl::StrCat("member-", transports_++));
}

}  // namespace gtrain::comm
