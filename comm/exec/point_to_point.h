// Messages between two ranks of a communicator, which match by tag as MPI's do (MPI 4.1, chapter 3): in the
// order in which they were sent, and receives in the order in which they were posted.
//
// A message of at most kUnaskedBytes leaves at once, and its receiver keeps it until it is received; of each
// sender it keeps at most kWindowBytes that nobody has taken. A longer message, and one that does not fit the
// window, is offered, and sent when the receiver has memory for it, so that no message stands in the way of
// one with another tag. Inside a machine packets go through the inbox of the receiver (comm/shm/inbox.h), two
// copies; between machines through the fabric, two copies and the wire.
//
// Costs, among n ranks: with a link between machines ten bytes for each of n, some hundred bytes for each
// rank that it has exchanged a message with, and 130 bytes beside the data for each message that waits, with
// its receiver, too. A message is one packet, one that is offered three and one a piece; a receiver reports
// what it has taken once in kWindowBytes / 2 and when it is asked, which a sender does once where it finds no
// room. A receive looks at the messages that have come and not been taken, a message at the receives that
// wait: linear in either. Between machines the first receive from any rank begins connections with all of
// them. There is one thread, from the first operation on that goes on while nobody waits and that concerns
// this machine.
#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "comm/exec/left_patience.h"
#include "comm/port/bootstrap.h"
#include "comm/port/communicator.h"
#include "comm/port/data_transport.h"
#include "comm/port/message_link.h"
#include "comm/port/watch.h"
#include "comm/shm/shm_group.h"

namespace gtrain::comm {

// The tag of the messages within a collective: no caller's tag, and no receive of any tag gets them.
inline constexpr int kCollectiveTag = -2;
inline constexpr uint64_t kWindowBytes = 256 << 10;
// Longer than one packet, and still sent before its receiver has memory for it.
inline constexpr uint64_t kUnaskedBytes = 128 << 10;
// The bytes of all messages together that Send copies so that it need not wait.
inline constexpr uint64_t kBufferedBytesMax = 64 << 20;
// The most operations that may be under way; and the most copies of Send, beyond which it waits.
inline constexpr size_t kOpenMessagesMax = 1 << 16;

// Thread-safe. Outlived by what Start returns.
class PointToPoint final : public std::enable_shared_from_this<PointToPoint>, private MessageLink::Listener {
 public:
  struct Place {
    int self = 0;
    int size = 1;
    std::vector<int> local;   // by rank: its number on this machine, -1: it is on another
    ShmGroup* shm = nullptr;  // nullptr: no other rank is on this machine. Until Close
    Bootstrap* bootstrap = nullptr;
    std::function<std::string(int rank)> name_of;
    // The communicator is dead from now on, for this; with no lock held.
    std::function<void(const absl::Status&)> give_up;
  };
  explicit PointToPoint(Place place);
  // Once, before anything else, where ranks are on other machines.
  absl::Status Connect(DataTransport* transport);
  ~PointToPoint() override;

  // Begins all messages, receives first. `timeout` is that of each wait.
  absl::StatusOr<std::shared_ptr<PendingMessages>> Start(absl::Span<const Message> messages,
                                                         absl::Duration timeout);
  // Like Start and a wait for a single send, but does not wait for the receiver if there is room for a copy.
  absl::Status Send(const Message& message, absl::Duration timeout);

  // Ends every operation with `why`, and so every one that is started later.
  void Fail(const absl::Status& why);
  // Ends the messages of the communicator: waits at most for `patience` until the receivers have taken what
  // was sent, then does as Fail. Nothing that the communicator owns is touched any more.
  void Close(absl::Duration patience);

 private:
  class Pending;
  class Hold;
  struct Op {
    Message message;
    size_t bytes = 0;
    std::string copy;  // of a send that nobody waits for
    bool detached = false;
    std::shared_ptr<Sending> sending;  // of a long send
    uint64_t got = 0;
    bool done = false;
    absl::Status status;
    MessageInfo info;
  };
  using OpPtr = std::shared_ptr<Op>;
  // A message that has come, or its offer, and that no receive wanted yet.
  struct Come {
    MessageHeader header;
    std::string bytes;
    uint64_t got = 0;  // of a long one whose pieces come unasked
  };
  // Whether a peer has room for messages without asking. kUnknown: it was not asked; kAsked: its answer is
  // awaited; kNone: it has taken nothing more.
  enum class Room { kUnknown, kAsked, kNone };
  struct Peer {
    // The direction to the peer.
    uint64_t next = 0, sent = 0, taken = 0;
    Room room = Room::kUnknown;
    std::deque<OpPtr> waiting;          // not begun
    std::map<uint64_t, OpPtr> offered;  // by number
    std::deque<OpPtr> streams;          // inside the machine
    std::deque<MessageHeader> control;  // likewise: what found no room
    bool busy = false;                  // among busy_
    // The direction from the peer.
    uint64_t expected = 0, consumed = 0, told = 0;
    std::map<uint64_t, Come> ahead;                        // by number
    std::map<uint64_t, OpPtr> receiving;                   // likewise
    std::map<uint64_t, std::list<Come>::iterator> coming;  // likewise: in come_, of kComing
    std::vector<Come> early;                               // pieces whose message is not known yet
  };

  void Lock();
  void Unlock();
  bool Local(int rank) const { return place_.local[static_cast<size_t>(rank)] >= 0; }
  Inbox* InboxOf(int rank) const { return place_.shm->InboxOf(place_.local[static_cast<size_t>(rank)]); }
  absl::Status Good(const Message& message) const;
  std::string Describe(const Message& message) const;
  absl::StatusOr<std::vector<OpPtr>> Begin(absl::Span<const Message> messages);
  void Complete(const OpPtr& op, absl::Status status);
  std::vector<OpPtr> AllOpen();
  void EndAll(const absl::Status& why);

  // Functions that need the lock.
  void BeginReceive(const OpPtr& op);
  void BeginSend(const OpPtr& op);
  void Push(int rank, Peer& peer);
  bool PushFirst(int rank, Peer& peer);
  void Tell(int rank, MessageKind kind, uint64_t number);
  void Hear(const MessageHeader& header, absl::string_view bytes) override;
  void InOrder(Peer& peer, const MessageHeader& header, absl::string_view bytes);
  void Arrive(const MessageHeader& header, absl::string_view bytes);
  void Match(const OpPtr& op, const MessageHeader& header, absl::string_view bytes, uint64_t got);
  void TakePiece(Peer& peer, const MessageHeader& header, absl::string_view bytes);
  void TakeEarly(Peer& peer);
  void Consumed(int from, uint64_t cost);
  void Stream(int rank, Peer& peer, const OpPtr& op, uint64_t number);
  bool Pump(int rank, Peer& peer);
  void Busy(int rank, Peer& peer);
  bool Turn();
  absl::Status Until(absl::FunctionRef<bool()> done, absl::FunctionRef<absl::Status()> check);
  absl::Status UntilHere(absl::FunctionRef<bool()> done, absl::FunctionRef<absl::Status()> check);
  void Settle();
  bool AllGone();

  // Members of a wait.
  std::optional<absl::Status> Wait(absl::Span<const OpPtr> ops, absl::Duration timeout,
                                   absl::Duration longest);
  struct Waited {
    LeftPatience left;
    bool last_look = false, broken = false;
    Instant broken_since;
  };
  static bool AllDone(absl::Span<const OpPtr> ops);
  std::optional<absl::Status> UntilDone(absl::Span<const OpPtr> ops, const Watch& watch, Instant give_up);
  absl::Status StillWaiting(absl::Span<const OpPtr> ops, const Watch& watch, Waited* waited);
  std::optional<std::string> AllLeft(int peer) const;
  void Help();

  const Place place_;
  std::unique_ptr<MessageLink> link_;
  Mutex mutex_;  // where there is no link, whose lock guards the rest elsewhere
  absl::Status dead_;
  std::map<int, Peer> peers_;
  std::vector<int> busy_;      // of this machine, with something to push
  std::list<OpPtr> posted_;    // receives, in their order
  std::list<Come> come_;       // in the order of coming
  std::vector<OpPtr> flying_;  // long sends to other machines that have begun
  size_t open_ = 0;
  size_t open_sends_ = 0;  // of open_
  size_t copies_ = 0;      // of those, what Send has copied
  uint64_t buffered_ = 0;  // their copies, and what this rank has sent to itself
  int waiters_ = 0;
  bool changed_ = false;  // something was completed
  bool wants_all_ = false;
  bool ended_ = false;
  std::atomic<bool> closed_ = false;
  std::atomic<int> inside_ = 0;  // threads in Wait
  Mutex help_mutex_;             // taken last
  bool help_wanted_ ABSL_GUARDED_BY(help_mutex_) = false, help_ended_ ABSL_GUARDED_BY(help_mutex_) = false;
  std::thread helper_;
  Wakers::Handle waking_;
};

}  // namespace gtrain::comm
