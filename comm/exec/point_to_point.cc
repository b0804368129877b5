// The lock is that of the link where there are other machines, because the link receives packets with it
// held, and else a mutex of its own. A thread that waits makes progress for all: it takes packets from the
// inbox and pushes those that wait for room. While nobody waits a helper thread does it for this machine, and
// the link does it for itself.
#include "comm/exec/point_to_point.h"

#include <algorithm>
#include <cstring>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "base/threads.h"
#include "comm/plan/op_record.h"
#include "comm/port/data_transport.h"
#include "comm/port/watch.h"
#include "comm/shm/futex.h"

namespace gtrain::comm {
namespace {

// The share of the window that a message without bytes takes.
constexpr uint64_t kCostOfOne = 64;
constexpr int kNapMs = 20, kHelperNapMs = 200;
// The same patience as for exchanges (comm/ucx/fabric_transport.cc): the head knows the cause a moment later.
constexpr absl::Duration kVerdictPatience = absl::Seconds(30);
constexpr size_t kTurnMax = 4 * kCells;

// Where there is no room its reader rings when there is some.
bool PushTo(Inbox* inbox, const MessageHeader& header, absl::string_view bytes) {
  if (inbox->Push(header, bytes)) return true;
  inbox->WantRoom();
  return inbox->Push(header, bytes);  // it may have been emptied in between
}

bool Wants(const Message& receive, const MessageHeader& h) {
  return (receive.peer == kAnySource || receive.peer == static_cast<int>(h.sender)) &&
         (receive.tag == h.tag || (receive.tag == kAnyTag && h.tag >= 0));
}

}  // namespace

class PointToPoint::Hold {
 public:
  explicit Hold(PointToPoint* of) : of_(of) { of_->Lock(); }
  ~Hold() { of_->Unlock(); }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

 private:
  PointToPoint* const of_;
};

class PointToPoint::Pending final : public PendingMessages {
 public:
  Pending(std::shared_ptr<PointToPoint> of, std::vector<OpPtr> ops, absl::Duration longest)
      : of_(std::move(of)), ops_(std::move(ops)), longest_(longest) {}
  std::optional<absl::Status> Wait(absl::Duration timeout) override {
    return of_->Wait(ops_, timeout, longest_);
  }
  MessageInfo info(size_t i) const override { return ops_[i]->info; }

 private:
  const std::shared_ptr<PointToPoint> of_;
  const std::vector<OpPtr> ops_;
  const absl::Duration longest_;
};

PointToPoint::PointToPoint(Place place) : place_(std::move(place)) {
  if (place_.shm == nullptr) return;
  waking_ = place_.bootstrap->wakers().Add([inbox = InboxOf(place_.self)] { inbox->Ring(); });
}

absl::Status PointToPoint::Connect(DataTransport* transport) {
  GT_ASSIGN_OR_RETURN(link_, transport->Messages(this));
  return absl::OkStatus();
}

PointToPoint::~PointToPoint() {
  if (!ended_) Close(absl::ZeroDuration());
}

void PointToPoint::Lock() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  if (link_ != nullptr) {
    link_->Lock();
  } else {
    mutex_.Lock();
  }
}

void PointToPoint::Unlock() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  if (link_ != nullptr) {
    link_->Unlock();
  } else {
    mutex_.Unlock();
  }
}

// ------------------------------------------------------------------ calls

std::string PointToPoint::Describe(const Message& m) const {
  const bool send = m.kind == Message::Kind::kSend;
  return absl::StrCat(send ? "send of " : "receive of ", m.at_most ? "up to " : "", m.count, " ",
                      DTypeName(m.dtype), send ? " to " : " from ",
                      m.peer == kAnySource ? "any rank" : place_.name_of(m.peer),
                      m.tag == kAnyTag ? ", any tag" : absl::StrCat(", tag ", m.tag));
}

absl::Status PointToPoint::Good(const Message& m) const {
  const bool send = m.kind == Message::Kind::kSend;
  const bool any = !send && m.peer == kAnySource;
  if (!any && (m.peer < 0 || m.peer >= place_.size)) {
    return absl::InvalidArgumentError(absl::StrCat(send ? "send to" : "receive from", " rank ", m.peer,
                                                   ": the ranks are 0..", place_.size - 1));
  }
  if (m.tag < 0 && m.tag != kCollectiveTag && (send || m.tag != kAnyTag))
    return absl::InvalidArgumentError(absl::StrCat(Describe(m), ": a tag is 0 or more"));
  if (m.data == nullptr && m.count > 0)
    return absl::InvalidArgumentError(absl::StrCat(Describe(m), ": no data"));
  if (m.count > (uint64_t{1} << 62) / DTypeSize(m.dtype))
    return absl::InvalidArgumentError(absl::StrCat(Describe(m), " cannot be in memory"));
  return absl::OkStatus();
}

// Holds the lock on return.
absl::StatusOr<std::vector<PointToPoint::OpPtr>> PointToPoint::Begin(absl::Span<const Message> messages) {
  std::vector<OpPtr> ops;
  uint64_t to_self = 0;
  for (const Message& m : messages) {
    GT_RETURN_IF_ERROR(Good(m));
    auto op = std::make_shared<Op>();
    op->message = m;
    op->bytes = m.count * DTypeSize(m.dtype);
    if (m.kind == Message::Kind::kSend && m.peer == place_.self) to_self += op->bytes;
    ops.push_back(std::move(op));
  }
  GT_RETURN_IF_ERROR(dead_);
  if (open_ - copies_ + ops.size() > kOpenMessagesMax) {
    return absl::ResourceExhaustedError(absl::StrCat(open_ - copies_, " messages go on, and at most ",
                                                     kOpenMessagesMax, " may: wait for some of them first"));
  }
  if (to_self > 0 && buffered_ + to_self > kBufferedBytesMax) {
    return absl::ResourceExhaustedError(absl::StrCat("copies of what was sent take ", buffered_,
                                                     " bytes, and at most ", kBufferedBytesMax,
                                                     " may: receive what this rank sends to itself first"));
  }
  for (const OpPtr& op : ops) {
    if (op->message.kind == Message::Kind::kReceive) BeginReceive(op);
  }
  for (const OpPtr& op : ops) {
    if (op->message.kind == Message::Kind::kSend) BeginSend(op);
  }
  (void)Turn();
  return ops;
}

absl::StatusOr<std::shared_ptr<PendingMessages>> PointToPoint::Start(absl::Span<const Message> messages,
                                                                     absl::Duration timeout) {
  const Hold hold(this);
  GT_ASSIGN_OR_RETURN(std::vector<OpPtr> ops, Begin(messages));
  Settle();
  return std::make_shared<Pending>(shared_from_this(), std::move(ops), timeout);
}

absl::Status PointToPoint::Send(const Message& message, absl::Duration timeout) {
  std::vector<OpPtr> ops;
  {
    const Hold hold(this);
    GT_ASSIGN_OR_RETURN(ops, Begin({&message, 1}));
    Op& op = *ops[0];
    if (!op.done && buffered_ + op.bytes <= kBufferedBytesMax && copies_ < kOpenMessagesMax) {
      if (op.bytes > 0) op.copy.assign(static_cast<const char*>(message.data), op.bytes);
      op.message.data = op.copy.data();
      if (op.sending != nullptr) op.sending->data = op.copy.data();
      op.detached = true;
      ++copies_;
      buffered_ += op.bytes;
    }
    if (op.done || op.detached) {
      Settle();
      return op.done ? op.status : absl::OkStatus();
    }
  }
  return *Wait(ops, absl::InfiniteDuration(), timeout);
}

void PointToPoint::Complete(const OpPtr& op, absl::Status status) {
  if (op->done) return;
  op->done = true;
  op->status = std::move(status);
  if (op->sending != nullptr) op->sending->revoked = true;
  if (op->detached) {
    buffered_ -= op->bytes;
    --copies_;
  }
  if (op->message.kind == Message::Kind::kSend) --open_sends_;
  --open_;
  changed_ = true;
}

// ------------------------------------------------------------------ sending, with the lock

void PointToPoint::BeginSend(const OpPtr& op) {
  ++open_;
  ++open_sends_;
  const int to = op->message.peer;
  if (to == place_.self) {
    MessageHeader header;
    header.kind = MessageKind::kEager;
    header.sender = static_cast<uint64_t>(to);
    header.total = op->bytes;
    header.tag = op->message.tag;
    header.dtype = static_cast<uint32_t>(op->message.dtype);
    buffered_ += op->bytes;  // until it is consumed
    Arrive(header, absl::string_view(static_cast<const char*>(op->message.data), op->bytes));
    return Complete(op, absl::OkStatus());
  }
  Peer& peer = peers_[to];
  peer.waiting.push_back(op);
  Push(to, peer);
}

// Pushes as many waiting messages as there is room for, in their order.
void PointToPoint::Push(int rank, Peer& peer) {
  while (!peer.waiting.empty() && PushFirst(rank, peer)) peer.waiting.pop_front();
}

bool PointToPoint::PushFirst(int rank, Peer& peer) {
  const OpPtr op = peer.waiting.front();
  const bool local = Local(rank);
  bool eager = op->bytes <= (local ? kCellBytes : kPieceBytes), unasked = eager || op->bytes <= kUnaskedBytes;
  if (unasked && peer.sent != peer.taken && peer.sent - peer.taken + kCostOfOne + op->bytes > kWindowBytes) {
    // The window may only look full because the receiver has not reported all that it has taken, so it is
    // asked. If the window is really full, an offer goes: a message that waited here would hold up messages
    // with another tag, and collectives.
    if (peer.room == Room::kUnknown) {
      peer.room = Room::kAsked;
      Tell(rank, MessageKind::kAskTaken, 0);
    }
    if (peer.room == Room::kAsked) return false;
    eager = unasked = false;
  }
  const uint64_t cost = kCostOfOne + (unasked ? op->bytes : 0);
  MessageHeader header;
  header.kind = eager ? MessageKind::kEager : unasked ? MessageKind::kComing : MessageKind::kOffer;
  header.sender = static_cast<uint64_t>(place_.self);
  header.number = peer.next;
  header.total = op->bytes;
  header.tag = op->message.tag;
  header.dtype = static_cast<uint32_t>(op->message.dtype);
  const absl::string_view bytes(static_cast<const char*>(op->message.data), eager ? op->bytes : 0);
  if (!local) {
    link_->Post(rank, header, bytes);
  } else {
    // Control messages that found no room before go first.
    if (!peer.control.empty() || !PushTo(InboxOf(rank), header, bytes)) {
      Busy(rank, peer);
      return false;
    }
    InboxOf(rank)->Ring();
  }
  ++peer.next;
  peer.sent += cost;
  if (eager) {
    Complete(op, absl::OkStatus());
  } else if (unasked) {
    Stream(rank, peer, op, header.number);
  } else {
    peer.offered[header.number] = op;
  }
  return true;
}

// Answers to `rank`.
void PointToPoint::Tell(int rank, MessageKind kind, uint64_t number) {
  MessageHeader header;
  header.kind = kind;
  header.sender = static_cast<uint64_t>(place_.self);
  header.number = number;
  if (!Local(rank)) return link_->Post(rank, header, "");
  Peer& peer = peers_[rank];
  peer.control.push_back(header);
  Busy(rank, peer);
}

void PointToPoint::Stream(int rank, Peer& peer, const OpPtr& op, uint64_t number) {
  op->sending = std::make_shared<Sending>();
  op->sending->header.kind = MessageKind::kBulk;
  op->sending->header.sender = static_cast<uint64_t>(place_.self);
  op->sending->header.number = number;
  op->sending->header.total = op->bytes;
  op->sending->data = static_cast<const char*>(op->message.data);
  if (Local(rank)) {
    peer.streams.push_back(op);
    return Busy(rank, peer);
  }
  flying_.push_back(op);
  link_->Stream(rank, op->sending);
}

void PointToPoint::Busy(int rank, Peer& peer) {
  if (!std::exchange(peer.busy, true)) busy_.push_back(rank);
}

// Into the inbox of a rank of this machine. Whether anything moved.
bool PointToPoint::Pump(int rank, Peer& peer) {
  Inbox* const inbox = InboxOf(rank);
  bool moved = false;
  const auto push = [&](const MessageHeader& header, absl::string_view bytes) {
    const bool pushed = PushTo(inbox, header, bytes);
    moved |= pushed;
    return pushed;
  };
  while (!peer.control.empty() && push(peer.control.front(), "")) peer.control.pop_front();
  if (peer.control.empty()) {
    const size_t before = peer.waiting.size();
    Push(rank, peer);
    moved |= peer.waiting.size() != before;
  }
  bool room = peer.control.empty();
  while (room && !peer.streams.empty()) {
    const OpPtr op = peer.streams.front();
    MessageHeader& header = op->sending->header;
    header.offset = op->sending->given;
    const size_t bytes = std::min<uint64_t>(op->bytes - header.offset, kCellBytes);
    room = push(header, {op->sending->data + header.offset, bytes});
    if (!room) break;
    op->sending->given += bytes;
    if (op->sending->given < op->bytes) continue;
    peer.streams.pop_front();
    Complete(op, absl::OkStatus());
  }
  if (moved) inbox->Ring();
  return moved;
}

// ------------------------------------------------------------------ receiving, with the lock

void PointToPoint::BeginReceive(const OpPtr& op) {
  ++open_;
  for (auto it = come_.begin(); it != come_.end(); ++it) {
    if (!Wants(op->message, it->header)) continue;
    const Come come = std::move(*it);
    come_.erase(it);
    if (come.header.kind == MessageKind::kComing)
      peers_[static_cast<int>(come.header.sender)].coming.erase(come.header.number);
    return Match(op, come.header, come.bytes, come.got);
  }
  posted_.push_back(op);
  if (link_ == nullptr) return;
  const int peer = op->message.peer;
  if (peer != kAnySource) {
    if (!Local(peer)) link_->Want(peer);
  } else if (!std::exchange(wants_all_, true)) {
    for (int rank = 0; rank < place_.size; ++rank) {
      if (!Local(rank)) link_->Want(rank);
    }
  }
}

// True when nothing that this rank has sent is still waiting here to leave.
bool PointToPoint::AllGone() {
  if (open_sends_ > 0) return false;
  return std::ranges::none_of(peers_, [this](const auto& entry) {
    return !Local(entry.first) && entry.second.sent > 0 && link_->Unsent(entry.first);
  });
}

void PointToPoint::Hear(const MessageHeader& h, absl::string_view bytes) {
  if (h.sender >= static_cast<uint64_t>(place_.size) || !dead_.ok()) return;
  const auto from = static_cast<int>(h.sender);
  Peer& peer = peers_[from];
  switch (h.kind) {
    case MessageKind::kEager:
    case MessageKind::kComing:
    case MessageKind::kOffer:
      return InOrder(peer, h, bytes);
    case MessageKind::kTake:
      if (const auto it = peer.offered.find(h.number); it != peer.offered.end()) {
        const OpPtr op = it->second;
        peer.offered.erase(it);
        if (op->bytes == 0) return Complete(op, absl::OkStatus());
        Stream(from, peer, op, h.number);
      }
      return;
    case MessageKind::kAskTaken:
      peer.told = peer.consumed;
      return Tell(from, MessageKind::kAnswerTaken, peer.consumed);
    case MessageKind::kTaken:
    case MessageKind::kAnswerTaken:
      if (h.number > peer.taken && h.number <= peer.sent) {
        peer.taken = h.number;
        peer.room = Room::kUnknown;
      } else if (h.kind == MessageKind::kAnswerTaken && peer.room == Room::kAsked) {
        peer.room = Room::kNone;
      }
      return Push(from, peer);
    case MessageKind::kBulk:
      return TakePiece(peer, h, bytes);
    default:
      return;
  }
}

// Into the memory of its receive, or what is kept until there is one.
void PointToPoint::TakePiece(Peer& peer, const MessageHeader& h, absl::string_view bytes) {
  if (h.offset > h.total || bytes.size() > h.total - h.offset) return;
  if (const auto it = peer.receiving.find(h.number); it != peer.receiving.end()) {
    const OpPtr op = it->second;
    if (h.total > op->bytes) return;
    std::memcpy(static_cast<char*>(op->message.data) + h.offset, bytes.data(), bytes.size());
    op->got += bytes.size();
    if (op->got < h.total) return;
    peer.receiving.erase(it);
    Complete(op, absl::OkStatus());
  } else if (const auto come = peer.coming.find(h.number); come != peer.coming.end()) {
    if (h.total != come->second->bytes.size()) return;
    std::memcpy(come->second->bytes.data() + h.offset, bytes.data(), bytes.size());
    come->second->got += bytes.size();
  } else if (h.number >= peer.expected) {
    peer.early.push_back({h, std::string(bytes), 0});  // before what announces it
  }
}

// UCX does not say that messages arrive in their order.
void PointToPoint::InOrder(Peer& peer, const MessageHeader& h, absl::string_view bytes) {
  if (h.number != peer.expected) {
    if (h.number > peer.expected) peer.ahead[h.number] = {h, std::string(bytes), 0};
    return;
  }
  ++peer.expected;
  Arrive(h, bytes);
  TakeEarly(peer);
  for (auto it = peer.ahead.begin(); it != peer.ahead.end() && it->first == peer.expected;) {
    const Come come = std::move(it->second);
    it = peer.ahead.erase(it);
    ++peer.expected;
    Arrive(come.header, come.bytes);
    TakeEarly(peer);
  }
}

void PointToPoint::TakeEarly(Peer& peer) {
  for (const Come& piece : std::exchange(peer.early, {})) TakePiece(peer, piece.header, piece.bytes);
}

void PointToPoint::Arrive(const MessageHeader& h, absl::string_view bytes) {
  const auto it = std::ranges::find_if(posted_, [&](const OpPtr& op) { return Wants(op->message, h); });
  if (it == posted_.end()) {
    come_.push_back({h, std::string(bytes), 0});
    if (h.kind == MessageKind::kComing && h.total <= kUnaskedBytes) {
      come_.back().bytes.resize(h.total);
      peers_[static_cast<int>(h.sender)].coming[h.number] = std::prev(come_.end());
    }
    return;
  }
  const OpPtr op = *it;
  posted_.erase(it);
  Match(op, h, bytes, 0);
}

// `bytes`: of a short message all, of one whose pieces come unasked room for all, of which `got` are there.
void PointToPoint::Match(const OpPtr& op, const MessageHeader& h, absl::string_view bytes, uint64_t got) {
  const auto from = static_cast<int>(h.sender);
  const bool eager = h.kind == MessageKind::kEager;
  if (from == place_.self) {
    buffered_ -= h.total;
  } else {
    Consumed(from, kCostOfOne + (h.kind == MessageKind::kOffer ? 0 : h.total));
  }
  const auto theirs = static_cast<DType>(h.dtype);
  const size_t element = DTypeSize(op->message.dtype);
  op->info = {from, h.tag, h.total / element};
  const bool long_or_short = h.total > op->bytes || (h.total < op->bytes && !op->message.at_most);
  if (theirs != op->message.dtype || long_or_short || (eager && bytes.size() != h.total)) {
    return Complete(op, absl::FailedPreconditionError(absl::StrCat(
                            place_.name_of(from), " sent ", h.total / std::max<size_t>(1, DTypeSize(theirs)),
                            " ", DTypeName(theirs), " with tag ", h.tag)));
  }
  if (eager) {
    if (!bytes.empty()) std::memcpy(op->message.data, bytes.data(), bytes.size());
    return Complete(op, absl::OkStatus());
  }
  // The pieces that have come lie at any offset: the copy takes them as they are, and the later pieces
  // overwrite the gaps.
  if (got > 0) std::memcpy(op->message.data, bytes.data(), bytes.size());
  op->got = got;
  if (h.kind == MessageKind::kOffer) Tell(from, MessageKind::kTake, h.number);
  if (got == h.total) return Complete(op, absl::OkStatus());
  peers_[from].receiving[h.number] = op;
}

void PointToPoint::Consumed(int from, uint64_t cost) {
  Peer& peer = peers_[from];
  peer.consumed += cost;
  if (peer.consumed - peer.told < kWindowBytes / 2) return;
  peer.told = peer.consumed;
  Tell(from, MessageKind::kTaken, peer.consumed);
}

// ------------------------------------------------------------------ turning and waiting, with the lock

// Whether anything moved.
bool PointToPoint::Turn() {
  if (ended_) return false;
  bool moved = false;
  if (place_.shm != nullptr) {
    Inbox* const own = InboxOf(place_.self);
    size_t took = 0;
    while (took < kTurnMax &&
           own->Take([&](const MessageHeader& h, absl::string_view bytes) { Hear(h, bytes); }))
      ++took;
    moved = took > 0;
    if (moved && own->RoomWanted()) {
      for (int rank = 0; rank < place_.size; ++rank) {
        if (rank != place_.self && Local(rank)) InboxOf(rank)->Ring();
      }
    }
    for (size_t i = 0; i < busy_.size();) {
      Peer& peer = peers_[busy_[i]];
      moved |= Pump(busy_[i], peer);
      if (peer.control.empty() && peer.streams.empty() && peer.waiting.empty()) {
        peer.busy = false;
        busy_[i] = busy_.back();
        busy_.pop_back();
      } else {
        ++i;
      }
    }
  }
  std::erase_if(flying_, [&](const OpPtr& op) {
    if (!op->done && op->sending->given < op->bytes) return false;
    Complete(op, absl::OkStatus());
    return true;
  });
  return moved;
}

absl::Status PointToPoint::Until(absl::FunctionRef<bool()> done, absl::FunctionRef<absl::Status()> check) {
  if (link_ == nullptr) return UntilHere(done, check);
  const auto over = [&] {
    (void)Turn();
    return done();
  };
  const absl::Status status = link_->Until(over, check);
  link_->LetLeave();
  return status;
}

absl::Status PointToPoint::UntilHere(absl::FunctionRef<bool()> done,
                                     absl::FunctionRef<absl::Status()> check) {
  Inbox* const own = place_.shm == nullptr ? nullptr : InboxOf(place_.self);
  const int looks_max = place_.shm == nullptr ? 0 : place_.shm->spins();
  for (int looks = 0;;) {
    const uint32_t seen = own == nullptr ? 0 : own->Announce();
    looks = Turn() ? 0 : looks + 1;
    bool over = done();
    absl::Status status;
    if (!over && looks >= looks_max) {
      Unlock();
      status = check();
      Lock();
      (void)Turn();
      over = done();
    }
    if (!over && status.ok()) {
      Unlock();
      if (looks < looks_max) {
        if (looks_max > 1000) {
          Pause();
        } else {
          sched_yield();
        }
      } else if (own != nullptr) {
        own->Sleep(seen, kNapMs);
      } else {
        absl::SleepFor(absl::Milliseconds(1));
      }
      Lock();
    }
    if (own != nullptr) own->Retract();
    if (over || !status.ok()) return over ? absl::OkStatus() : status;
  }
}

// Called before the lock is released: wakes threads that wait for completed operations, and helpers for the
// rest.
void PointToPoint::Settle() {
  if (std::exchange(changed_, false) && waiters_ > 0) {
    if (place_.shm != nullptr) InboxOf(place_.self)->Ring();
    if (link_ != nullptr) link_->Interrupt();
  }
  const bool goes_on = open_ > 0 && waiters_ == 0 && !ended_;
  if (link_ != nullptr) {
    link_->LetLeave();
    link_->KeepMoving(goes_on);
  }
  if (place_.shm == nullptr) return;
  // A waiter that sleeps in the link does not hear the bell.
  const bool help = !ended_ && (goes_on || (link_ != nullptr && waiters_ > 0));
  if (help && !helper_.joinable()) helper_ = StartWithoutSignals([this] { Help(); });
  const MutexLock lock(&help_mutex_);
  help_wanted_ = help;
}

void PointToPoint::Help() {
  Inbox* const own = InboxOf(place_.self);
  for (;;) {
    {
      const MutexLock lock(&help_mutex_);
      help_mutex_.Await(
          [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(help_mutex_) { return help_wanted_ || help_ended_; });
      if (help_ended_) return;
    }
    const uint32_t seen = own->Announce();
    bool moved = false;
    {
      const Hold hold(this);
      moved = Turn();
      Settle();
    }
    if (!moved) own->Sleep(seen, kHelperNapMs);
    own->Retract();
  }
}

bool PointToPoint::AllDone(absl::Span<const OpPtr> ops) {
  return std::ranges::all_of(ops, [](const OpPtr& op) { return op->done; });
}

// Called with the lock. nullopt: they are not done, and the time is up.
std::optional<absl::Status> PointToPoint::UntilDone(absl::Span<const OpPtr> ops, const Watch& watch,
                                                    Instant give_up) {
  ++waiters_;
  Settle();
  Waited waited;
  bool time_up = false;
  const absl::Status status = Until([&] { return AllDone(ops); },
                                    [&]() -> absl::Status {
                                      GT_RETURN_IF_ERROR(StillWaiting(ops, watch, &waited));
                                      time_up = RealClock().Now() >= give_up;
                                      return time_up ? absl::CancelledError("") : absl::OkStatus();
                                    });
  --waiters_;
  if (link_ != nullptr && waiters_ == 0) link_->Waiting({}, RealClock().Now());
  if (time_up && !status.ok()) return std::nullopt;
  return status;
}

std::optional<absl::Status> PointToPoint::Wait(absl::Span<const OpPtr> ops, absl::Duration timeout,
                                               absl::Duration longest) {
  ++inside_;
  const absl::Cleanup outside = [this] { --inside_; };
  if (closed_) {  // nothing changes any more
    const auto bad = std::ranges::find_if(ops, [](const OpPtr& op) { return !op->status.ok(); });
    return bad == ops.end() ? absl::OkStatus() : (*bad)->status;
  }
  const Instant give_up = RealClock().Now() + timeout;
  const Watch watch(place_.bootstrap, longest, nullptr);
  absl::Status status;
  std::string waited_for;
  {
    const Hold hold(this);
    (void)Turn();
    if (!AllDone(ops) && timeout <= absl::ZeroDuration()) {
      Settle();
      return std::nullopt;
    }
    std::optional<absl::Status> waited = absl::OkStatus();
    if (!AllDone(ops)) waited = UntilDone(ops, watch, give_up);
    Settle();
    if (!waited && dead_.ok()) return std::nullopt;
    status = waited.value_or(dead_);
    for (const OpPtr& op : ops) {
      if (!op->done && waited_for.empty()) waited_for = Describe(op->message);
      if (!op->done || op->status.ok()) continue;
      if (!dead_.ok()) return op->status;
      status =
          absl::Status(op->status.code(), absl::StrCat(Describe(op->message), ": ", op->status.message()));
      waited_for.clear();
      break;
    }
    if (status.ok()) return status;
    if (!dead_.ok()) return dead_;
  }
  if (absl::IsDeadlineExceeded(status) && !waited_for.empty()) {
    status = absl::DeadlineExceededError(absl::StrCat("not over after ", absl::FormatDuration(longest)));
  }
  if (!waited_for.empty()) status = Annotate(status, waited_for);
  place_.give_up(status);
  return status;
}

// Called with the lock. Returns the last words of `peer`, or of the last of all others for any source;
// nullopt: one is there.
std::optional<std::string> PointToPoint::AllLeft(int peer) const {
  const bool any = peer == kAnySource;
  std::string words;
  for (int rank = any ? 0 : peer; rank < (any ? place_.size : peer + 1); ++rank) {
    if (rank == place_.self) continue;
    words =
        Local(rank) ? place_.shm->LeftWords(place_.local[static_cast<size_t>(rank)]) : link_->LeftWords(rank);
    if (words.empty()) return std::nullopt;
  }
  return words;
}

// Whether what is waited for may still come. Without the lock.
absl::Status PointToPoint::StillWaiting(absl::Span<const OpPtr> ops, const Watch& watch, Waited* waited) {
  GT_RETURN_IF_ERROR(watch.Check());
  if (place_.shm != nullptr) GT_RETURN_IF_ERROR(place_.shm->Failure());
  if (const std::vector<int> left = place_.bootstrap->Left(); !left.empty())
    GT_RETURN_IF_ERROR(waited->left.Look(place_.name_of(left[0])));
  const Instant now = RealClock().Now();
  const Hold hold(this);
  if (link_ != nullptr) GT_RETURN_IF_ERROR(link_->Heard());
  std::vector<int> far;
  std::string broken;
  for (const OpPtr& op : ops) {
    const int peer = op->message.peer;
    if (op->done || peer == place_.self) continue;
    if (const std::optional<std::string> words = AllLeft(peer)) {
      // Once more: what it sent before it left was there before the words.
      if (waited->last_look) return absl::UnavailableError(*words);
      waited->last_look = true;
      return absl::OkStatus();
    }
    if (peer == kAnySource || Local(peer)) continue;
    far.push_back(peer);
    if (broken.empty()) broken = link_->Failure(peer);
  }
  if (link_ != nullptr && !far.empty()) link_->Waiting(far, now);
  if (broken.empty()) return absl::OkStatus();
  if (!waited->broken) waited->broken_since = now;
  waited->broken = true;
  if (now - waited->broken_since < kVerdictPatience) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("the connection to another machine: ", broken));
}

// ------------------------------------------------------------------ the end

void PointToPoint::EndAll(const absl::Status& why) {
  const auto end = [&](auto& of) {
    for (const OpPtr& op : std::exchange(of, {})) Complete(op, why);
  };
  for (auto& [rank, peer] : peers_) {
    end(peer.waiting);
    end(peer.streams);
    for (const auto& [number, op] : std::exchange(peer.offered, {})) Complete(op, why);
    for (const auto& [number, op] : std::exchange(peer.receiving, {})) Complete(op, why);
    peer.coming.clear();
    peer.early.clear();
    peer.control.clear();
  }
  end(posted_);
  end(flying_);
  come_.clear();
  busy_.clear();
}

void PointToPoint::Fail(const absl::Status& why) {
  const Hold hold(this);
  if (!dead_.ok()) return;
  dead_ = why;
  EndAll(why);
  Settle();
}

void PointToPoint::Close(absl::Duration patience) {
  const Instant give_up = RealClock().Now() + patience;
  {
    const Hold hold(this);
    if (ended_) return;
    if (dead_.ok() && patience > absl::ZeroDuration()) {
      (void)Until([this] { return AllGone(); },
                  [&]() -> absl::Status {
                    GT_RETURN_IF_ERROR(place_.bootstrap->Alive());
                    if (place_.shm != nullptr) GT_RETURN_IF_ERROR(place_.shm->Failure());
                    return RealClock().Now() < give_up ? absl::OkStatus() : absl::DeadlineExceededError("");
                  });
    }
    ended_ = true;
    if (dead_.ok()) dead_ = absl::CancelledError("the communicator was closed");
    EndAll(dead_);
    Settle();
    (void)Until([this] { return waiters_ == 0; }, [] { return absl::OkStatus(); });
  }
  {
    const MutexLock lock(&help_mutex_);
    help_ended_ = true;
  }
  if (place_.shm != nullptr) InboxOf(place_.self)->Ring();
  if (helper_.joinable()) helper_.join();
  waking_ = {};
  closed_ = true;
  while (inside_ > 0) absl::SleepFor(absl::Microseconds(100));  // they have their answer and are on their way
  link_.reset();
}

}  // namespace gtrain::comm
