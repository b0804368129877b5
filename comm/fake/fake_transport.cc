#include "comm/fake/fake_transport.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace gtrain::comm {

// A thread that waits delivers the packets of all.
void FakeNetwork::Deliver() {
  std::deque<Packet> later;
  while (!packets_.empty()) {
    Packet packet = std::move(packets_.front());
    packets_.pop_front();
    const auto it = listeners_.find(packet.to);
    if (it == listeners_.end()) {
      later.push_back(std::move(packet));
    } else if (it->second != nullptr) {  // else it is closed
      it->second->Hear(packet.header, packet.bytes);
    }
  }
  packets_ = std::move(later);
}

class FakeLink final : public MessageLink {
 public:
  FakeLink(FakeNetwork* network, std::vector<std::string> names, std::string name, Listener* listener)
      : network_(network), names_(std::move(names)), name_(std::move(name)) {
    MutexLock lock(&network_->mutex_);
    network_->listeners_[name_] = listener;
  }
  ~FakeLink() override {
    MutexLock lock(&network_->mutex_);
    network_->Deliver();
    network_->listeners_[name_] = nullptr;
  }
  void Lock() override ABSL_NO_THREAD_SAFETY_ANALYSIS { network_->mutex_.Lock(); }
  void Unlock() override ABSL_NO_THREAD_SAFETY_ANALYSIS { network_->mutex_.Unlock(); }
  void Post(int member, MessageHeader header,
            absl::string_view bytes) override ABSL_NO_THREAD_SAFETY_ANALYSIS {
    const auto self = std::ranges::find(names_, name_);
    header.sender = static_cast<uint64_t>(self - names_.begin());
    network_->packets_.push_back({names_[static_cast<size_t>(member)], header, std::string(bytes)});
  }
  void Stream(int member, std::shared_ptr<Sending> message) override {
    while (message->given < message->header.total) {
      const size_t bytes = std::min<uint64_t>(message->header.total - message->given, kPieceBytes);
      message->header.offset = message->given;
      Post(member, message->header, {message->data + message->given, bytes});
      message->given += bytes;
    }
  }
  void Want(int) override {}
  bool Unsent(int) override { return false; }
  std::string Failure(int) override { return ""; }
  std::string LeftWords(int member) override ABSL_NO_THREAD_SAFETY_ANALYSIS {
    const auto it = network_->left_.find(names_[static_cast<size_t>(member)]);
    return it == network_->left_.end() ? "" : it->second;
  }
  absl::Status Heard() override ABSL_NO_THREAD_SAFETY_ANALYSIS {
    const auto it = network_->notices_.find(name_);
    return it == network_->notices_.end() ? absl::OkStatus() : GaveUp(it->second);
  }
  absl::Status Until(absl::FunctionRef<bool()> done,
                     absl::FunctionRef<absl::Status()> check) override ABSL_NO_THREAD_SAFETY_ANALYSIS {
    const auto over = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      network_->Deliver();
      return done();
    };
    for (;;) {
      if (network_->mutex_.AwaitFor(absl::Milliseconds(5), over)) return absl::OkStatus();
      network_->mutex_.Unlock();
      const absl::Status status = check();
      network_->mutex_.Lock();
      if (over()) return absl::OkStatus();
      GT_RETURN_IF_ERROR(status);
    }
  }
  void LetLeave() override {}
  void KeepMoving(bool) override {}
  void Interrupt() override {}
  void Waiting(const std::vector<int>&, Instant) override {}

 private:
  FakeNetwork* const network_;
  const std::vector<std::string> names_;
  const std::string name_;
};

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

  absl::StatusOr<std::unique_ptr<MessageLink>> Messages(MessageLink::Listener* listener) override {
    return std::make_unique<FakeLink>(network_, peers_, name_, listener);
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
