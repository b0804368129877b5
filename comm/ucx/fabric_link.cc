#include "comm/ucx/fabric_link.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "comm/port/watch.h"

namespace gtrain::comm {
namespace {

class FabricLink final : public MessageLink, private Fabric::Context {
 public:
  FabricLink(std::shared_ptr<Fabric> fabric, ContextId id, int self, std::shared_ptr<const FabricNews> news,
             Listener* listener, LinkWatch::Report report)
      : fabric_(std::move(fabric)),
        id_(id),
        self_(self),
        news_(std::move(news)),
        listener_(listener),
        watch_(std::move(report)) {}

  absl::Status Open(const std::vector<std::string>& addresses) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    Fabric::Lock lock(fabric_.get());
    for (size_t i = 0; i < addresses.size(); ++i) {
      peers_.push_back(nullptr);
      if (static_cast<int>(i) == self_) continue;
      watch_.SetPeer(static_cast<int>(i), addresses[i].substr(0, addresses[i].find('\n')));
      GT_ASSIGN_OR_RETURN(peers_.back(), fabric_->Reach(addresses[i]));
    }
    fabric_->Add(id_, this);
    return absl::OkStatus();
  }

  ~FabricLink() override ABSL_NO_THREAD_SAFETY_ANALYSIS {
    Fabric::Lock lock(fabric_.get());
    if (moving_) fabric_->KeepMoving(-1);
    fabric_->Remove(id_);
    for (Fabric::Peer* const peer : peers_) {
      if (peer != nullptr) fabric_->Drop(peer);
    }
    fabric_->LetLeave();
  }

  void Lock() override { lock_.Again(); }
  void Unlock() override { lock_.Release(); }

  void Post(int member, MessageHeader header,
            absl::string_view bytes) override ABSL_NO_THREAD_SAFETY_ANALYSIS {
    Fabric::Peer* const peer = PeerOf(member);
    fabric_->Want(peer);
    fabric_->Post(peer, Addressed(header), bytes);
  }

  void Stream(int member, std::shared_ptr<Sending> message) override ABSL_NO_THREAD_SAFETY_ANALYSIS {
    message->header = Addressed(message->header);
    fabric_->Stream(PeerOf(member), std::move(message));
  }

  void Want(int member) override ABSL_NO_THREAD_SAFETY_ANALYSIS { fabric_->Want(PeerOf(member)); }

  bool Unsent(int member) override ABSL_NO_THREAD_SAFETY_ANALYSIS { return fabric_->Unsent(PeerOf(member)); }

  std::string Failure(int member) override ABSL_NO_THREAD_SAFETY_ANALYSIS {
    const Fabric::Peer* const peer = PeerOf(member);
    return fabric_->Failed(peer) ? Fabric::Failure(peer) : "";
  }

  std::string LeftWords(int member) override { return news_->left[static_cast<size_t>(member)]; }

  absl::Status Heard() override { return news_->gave_up.empty() ? absl::OkStatus() : GaveUp(news_->gave_up); }

  absl::Status Until(absl::FunctionRef<bool()> done,
                     absl::FunctionRef<absl::Status()> check) override ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return fabric_->Until(done, check);
  }

  void LetLeave() override ABSL_NO_THREAD_SAFETY_ANALYSIS { fabric_->LetLeave(); }

  void KeepMoving(bool keep) override ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (std::exchange(moving_, keep) != keep) fabric_->KeepMoving(keep ? 1 : -1);
  }

  void Interrupt() override { fabric_->Interrupt(); }

  void Waiting(const std::vector<int>& members, Instant now) override {
    if (members.empty()) {
      watch_.Done();
    } else {
      watch_.Waiting(members, now);
    }
  }

 private:
  Fabric::Peer* PeerOf(int member) const { return peers_[static_cast<size_t>(member)]; }

  MessageHeader Addressed(MessageHeader header) const {
    header.generation = id_.generation;
    header.context = id_.context;
    header.sender = static_cast<uint64_t>(self_);
    return header;
  }

  void Hear(const MessageHeader& header, absl::string_view bytes) override {
    if (header.sender < peers_.size() && static_cast<int>(header.sender) != self_) {
      listener_->Hear(header, bytes);
    }
  }

  const std::shared_ptr<Fabric> fabric_;
  const ContextId id_;
  const int self_;
  const std::shared_ptr<const FabricNews> news_;
  Listener* const listener_;
  Fabric::Lock lock_{fabric_.get(), /*now=*/false};
  std::vector<Fabric::Peer*> peers_;
  bool moving_ = false;
  LinkWatch watch_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<MessageLink>> OpenFabricLink(std::shared_ptr<Fabric> fabric, ContextId id,
                                                            const FabricMembers& members,
                                                            std::shared_ptr<const FabricNews> news,
                                                            MessageLink::Listener* listener,
                                                            LinkWatch::Report report) {
  auto link = std::make_unique<FabricLink>(std::move(fabric), id, members.self, std::move(news), listener,
                                           std::move(report));
  GT_RETURN_IF_ERROR(link->Open(members.addresses));
  return link;
}

}  // namespace gtrain::comm
