#include "comm/ucx/fabric_transport.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "comm/ucx/fabric_link.h"
#include "comm/ucx/mailbox.h"

namespace gtrain::comm {
namespace {

constexpr size_t kMembersMax = 1 << 16;
constexpr absl::Duration kNap = absl::Milliseconds(10);
constexpr absl::Duration kTidyEvery = absl::Milliseconds(500);
// Longer than it takes the head to find a machine dead, or a link broken.
constexpr absl::Duration kVerdictPatience = absl::Seconds(30);

class FabricTransport final : public DataTransport, private Fabric::Context {
 public:
  FabricTransport(std::shared_ptr<Fabric> fabric, ContextId id, LinkWatch::Report report)
      : fabric_(std::move(fabric)), id_(id), report_(std::move(report)), links_(report_) {}
  ~FabricTransport() override { Close(); }

  // A line that says where the way to here can be tried, then what the fabric needs.
  absl::StatusOr<std::string> Address() override { return fabric_->address(); }

  absl::Status Connect(const std::vector<std::string>& addresses, int self) override {
    if (addresses.size() > kMembersMax) {
      return absl::InvalidArgumentError(
          absl::StrCat(addresses.size(), " ranks on several machines are more than ", kMembersMax));
    }
    addresses_ = addresses;
    self_ = self;
    members_.resize(addresses.size());
    news_->left.resize(addresses.size());
    mailbox_ = std::make_unique<Mailbox>(addresses.size());
    for (size_t i = 0; i < addresses.size(); ++i) {
      if (static_cast<int>(i) != self)
        links_.SetPeer(static_cast<int>(i), addresses[i].substr(0, addresses[i].find('\n')));
    }
    Fabric::Lock lock(fabric_.get());
    open_ = true;
    fabric_->Add(id_, this);
    return ReachAll();
  }

  absl::StatusOr<std::unique_ptr<DataTransport>> Part(const std::vector<int>& members, int self,
                                                      uint64_t id) override {
    std::vector<std::string> addresses;
    for (const int member : members) addresses.push_back(addresses_[static_cast<size_t>(member)]);
    LinkWatch::Report report = [report = report_, members](int peer, const std::string& symptom) {
      if (report) report(members[static_cast<size_t>(peer)], symptom);
    };
    auto part = std::make_unique<FabricTransport>(fabric_, ContextId{id_.generation, id}, std::move(report));
    GT_RETURN_IF_ERROR(part->Connect(addresses, self));
    return part;
  }

  absl::StatusOr<std::unique_ptr<MessageLink>> Messages(MessageLink::Listener* listener) override {
    constexpr uint64_t kOfMessages =
        0x6d65737361676573;  // unlike the contexts of communicators, which are random
    return OpenFabricLink(fabric_, {id_.generation, id_.context ^ kOfMessages}, {addresses_, self_}, news_,
                          listener, report_);
  }

  absl::Status Exchange(absl::Span<const Transfer> transfers, absl::FunctionRef<void(size_t)> done,
                        const Watch& watch) override {
    if (!open_) return absl::FailedPreconditionError("the transport has failed before");
    transfers_ = transfers;
    unfinished_.clear();
    spent_ = 0;
    absl::Status status;
    {
      Fabric::Lock lock(fabric_.get());
      lock_ = &lock;
      for (const Transfer& t : transfers) Begin(t);
      for (size_t i = 0; i < transfers.size() && status.ok(); ++i) {
        awaited_ = &ops_[i];
        status = Await(watch, [&] { return Complete(ops_[i]); });
        if (!status.ok()) break;
        ++spent_;
        if (transfers[i].send) continue;
        lock.Release();
        done(i);
        lock.Again();
      }
      awaited_ = nullptr;
      fabric_->LetLeave();
      if (!status.ok()) NoteUnfinished();
    }
    ops_.clear();
    transfers_ = {};
    links_.Done();
    if (!status.ok()) Fail(watch.Notice(status));
    return status;
  }

  void Fail(absl::string_view notice) override {
    if (!open_) return;
    Tell(notice, MessageKind::kGaveUp);
    Close();
  }

  void Leave(absl::string_view words) override {
    if (!open_) return;
    Tell(words, MessageKind::kLeft);
    Close();
  }

  std::vector<int> Unfinished() const override { return unfinished_; }

  absl::Status Heard() override {
    if (!open_) return absl::OkStatus();
    Fabric::Lock lock(fabric_.get());
    if (news_->gave_up.empty()) fabric_->Look();
    return news_->gave_up.empty() ? absl::OkStatus() : GaveUp(news_->gave_up);
  }

 private:
  struct Member {
    Fabric::Peer* peer = nullptr;
    uint64_t sent = 0;       // messages
    uint64_t left_from = 0;  // what it says when it leaves
  };
  struct Op {
    int member = 0;
    std::shared_ptr<Sending> sending;  // null: a receive
    uint64_t number = 0;
  };

  Member& MemberOf(int member) { return members_[static_cast<size_t>(member)]; }

  absl::Status ReachAll() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    for (size_t i = 0; i < members_.size(); ++i) {
      if (static_cast<int>(i) == self_) continue;
      const auto peer = fabric_->Reach(addresses_[i]);
      if (!peer.ok())
        return absl::InvalidArgumentError(absl::StrCat(peer.status().message(), ": member ", i));
      members_[i].peer = *peer;
    }
    return absl::OkStatus();
  }

  MessageHeader HeaderOf(MessageKind kind) const {
    MessageHeader header;
    header.kind = kind;
    header.generation = id_.generation;
    header.context = id_.context;
    header.sender = static_cast<uint64_t>(self_);
    return header;
  }

  // ---------------------------------------------------------------- an exchange, with the lock

  void Begin(const Transfer& t) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    Member& member = MemberOf(t.peer);
    fabric_->Want(member.peer);
    Op op{t.peer, nullptr, 0};
    if (!t.send) {
      op.number = mailbox_->Expect(t.peer, t.data, t.bytes, t.received);
      SayReady();
    } else {
      op.sending = std::make_shared<Sending>();
      op.sending->header = HeaderOf(MessageKind::kData);
      op.sending->header.number = op.number = member.sent++;
      op.sending->header.total = t.bytes;
      op.sending->data = static_cast<const char*>(t.data);
      const size_t first = std::min(t.bytes, kPieceBytes);
      fabric_->Post(member.peer, op.sending->header, {op.sending->data, first}, op.sending);
      if (first < t.bytes) {
        if (asked_.erase({t.peer, op.number}) > 0) {
          fabric_->Stream(member.peer, op.sending);
        } else {
          unasked_[{t.peer, op.number}] = op.sending;
        }
      }
    }
    ops_.push_back(std::move(op));
  }

  bool Complete(const Op& op) {
    return op.sending == nullptr ? mailbox_->Done(op.member, op.number) : op.sending->done();
  }

  // Called with the lock, which is also held on return.
  absl::Status Await(const Watch& watch, absl::FunctionRef<bool()> done) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    const auto over = [&] { return done() || Broken(); };
    GT_RETURN_IF_ERROR(fabric_->Until(over, [&] { return StillWaiting(watch); }));
    if (done()) return absl::OkStatus();
    if (!strange_.ok()) return strange_;
    if (!mailbox_->wrong().empty()) return absl::InternalError(mailbox_->wrong());
    const std::string symptom = Fabric::Failure(MemberOf(awaited_->member).peer);
    lock_->Release();
    const absl::Status verdict = AwaitVerdict(symptom, watch);
    lock_->Again();
    return verdict;
  }

  // True when the awaited message will never come.
  bool Broken() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (!strange_.ok() || !mailbox_->wrong().empty()) return true;
    return awaited_ != nullptr && fabric_->Failed(MemberOf(awaited_->member).peer);
  }

  void NoteUnfinished() {
    for (size_t i = spent_; i < ops_.size(); ++i) {
      if (Complete(ops_[i])) continue;
      if (std::ranges::count(unfinished_, ops_[i].member) == 0) unfinished_.push_back(ops_[i].member);
    }
  }

  // ---------------------------------------------------------------- waiting, without the lock

  // Whether the member that is waited for has left. All that it sent before was there first.
  absl::Status Left() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (awaited_ == nullptr) return absl::OkStatus();
    const Member& member = MemberOf(awaited_->member);
    const bool missed = awaited_->sending != nullptr || awaited_->number >= member.left_from;
    const std::string& left = news_->left[static_cast<size_t>(awaited_->member)];
    return left.empty() || !missed ? absl::OkStatus() : absl::UnavailableError(left);
  }

  absl::Status StillWaiting(const Watch& watch, bool broken = false) {
    GT_RETURN_IF_ERROR(watch.Check());
    {
      Fabric::Lock lock(fabric_.get());
      GT_RETURN_IF_ERROR(Left());
    }
    const Instant now = RealClock().Now();
    std::vector<int> peers;
    for (const Transfer& t : transfers_) peers.push_back(t.peer);
    links_.Waiting(peers, now, broken);
    if (now >= tidy_at_) {
      fabric_->target().Tidy();
      tidy_at_ = now + kTidyEvery;
    }
    return absl::OkStatus();
  }

  // A broken connection is a symptom: the head, which learns the cause from the keeper that saw a rank die,
  // revokes the generation with it, a moment later. Only without such a verdict the symptom is the answer.
  absl::Status AwaitVerdict(absl::string_view symptom, const Watch& watch) {
    const Instant give_up = RealClock().Now() + kVerdictPatience;
    while (RealClock().Now() < give_up) {
      GT_RETURN_IF_ERROR(StillWaiting(watch, /*broken=*/true));
      absl::SleepFor(kNap);
    }
    return absl::UnavailableError(absl::StrCat("the connection to another machine: ", symptom));
  }

  // ---------------------------------------------------------------- what is heard, with the lock

  void Hear(const MessageHeader& header, absl::string_view bytes) override ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (header.sender >= members_.size() || static_cast<int>(header.sender) == self_) return;
    const auto from = static_cast<int>(header.sender);
    switch (header.kind) {
      case MessageKind::kData:
        if (absl::Status taken = mailbox_->Take(header, bytes); !taken.ok()) strange_ = taken;
        SayReady();
        return;
      case MessageKind::kReady:
        if (const auto it = unasked_.find({from, header.number}); it != unasked_.end()) {
          fabric_->Stream(MemberOf(from).peer, it->second);
          unasked_.erase(it);
        } else if (asked_.size() < Mailbox::kAheadMax) {
          asked_.insert({from, header.number});
        }
        return;
      case MessageKind::kGaveUp:
        if (news_->gave_up.empty()) news_->gave_up = Words(from, bytes);
        return;
      case MessageKind::kLeft:
        news_->left[header.sender] = Words(from, bytes);
        MemberOf(from).left_from = header.number;
        return;
      default:
        return;
    }
  }

  // A notice that is longer than notices are is not taken.
  static std::string Words(int from, absl::string_view bytes) {
    if (bytes.empty() || bytes.size() > kNoticeBytesMax)
      return absl::StrCat("member ", from, " gave up; why did not arrive");
    return std::string(bytes);
  }

  void SayReady() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (!mailbox_->AnyReady()) return;
    for (const Mailbox::Ready& ready : mailbox_->TakeReady()) {
      MessageHeader header = HeaderOf(MessageKind::kReady);
      header.number = ready.number;
      fabric_->Post(MemberOf(ready.from).peer, header, "");
    }
  }

  // ---------------------------------------------------------------- the end

  // Tells the members that are connected, and those whose greeting is under way, because they may wait for
  // this one. Not if this one has heard a notice: its sender told the others.
  void Tell(absl::string_view words, MessageKind kind) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    Fabric::Lock lock(fabric_.get());
    Revoke();
    if (words.empty() || !news_->gave_up.empty()) return;
    for (const Member& member : members_) {
      Fabric::Peer* const peer = member.peer;
      if (peer == nullptr || fabric_->Failed(peer) || !(Fabric::Up(peer) || Fabric::Greeting(peer))) continue;
      MessageHeader header = HeaderOf(kind);
      header.number = member.sent;
      fabric_->Post(peer, header, words.substr(0, kNoticeBytesMax));
    }
    fabric_->LetLeave();
  }

  // Nothing of the caller's memory is read or written from now on.
  void Revoke() {
    for (const Op& op : ops_) {
      if (op.sending != nullptr) op.sending->revoked = true;
    }
    for (const auto& [key, sending] : unasked_) sending->revoked = true;
    unasked_.clear();
    ops_.clear();
  }

  void Close() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (!std::exchange(open_, false)) return;
    Fabric::Lock lock(fabric_.get());
    Revoke();
    fabric_->Remove(id_);
    for (const Member& member : members_) {
      if (member.peer != nullptr) fabric_->Drop(member.peer);
    }
  }

  const std::shared_ptr<Fabric> fabric_;
  const ContextId id_;
  const LinkWatch::Report report_;
  const std::shared_ptr<FabricNews> news_ = std::make_shared<FabricNews>();
  int self_ = 0;
  bool open_ = false;
  std::vector<std::string> addresses_;
  // Members that Hear uses, with the lock.
  std::vector<Member> members_;
  std::unique_ptr<Mailbox> mailbox_;
  std::map<std::pair<int, uint64_t>, std::shared_ptr<Sending>> unasked_;  // the receiver is not ready
  std::set<std::pair<int, uint64_t>> asked_;                              // it was, before
  absl::Status strange_;
  // The state of the exchange that is running.
  absl::Span<const Transfer> transfers_;
  Fabric::Lock* lock_ = nullptr;
  std::vector<Op> ops_;
  size_t spent_ = 0;  // of them, in their order
  const Op* awaited_ = nullptr;
  std::vector<int> unfinished_;
  LinkWatch links_;
  Instant tidy_at_;
};

}  // namespace

std::unique_ptr<DataTransport> OpenFabricTransport(std::shared_ptr<Fabric> fabric, ContextId id,
                                                   LinkWatch::Report report) {
  return std::make_unique<FabricTransport>(std::move(fabric), id, std::move(report));
}

}  // namespace gtrain::comm
