// The connections of a rank's process to those of other machines. They outlive communicators and generations;
// a communicator is a *context* on them (comm/ucx/fabric_transport.h) and costs no message and no descriptor.
//
// One UCX worker, one listening port and one thread a process, which are eleven descriptors, for all its
// communicators. To each process that it has exchanged anything with it has a connection, which over TCP is a
// descriptor, some hundred bytes, and up to kFlyingMax buffers of 60 KiB while data is under way. Nothing is
// kept of the other ranks.
//
// Everything leaves from memory of the fabric: a call may end, and its buffers go, while a peer that is
// stopped has not read them. A message of more than one piece waits until the receiver is ready
// (comm/port/message.h), so at most a piece of each message comes unexpectedly.
//
// Many threads, one worker: a thread that waits drives it, and the others sleep until their own wait is over
// or it is their turn. A driver holds the lock while it looks and not while it sleeps. A thread of the
// fabric's own drives when no thread waits and something has not left yet: mostly the socket takes all at
// once and it sleeps.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/clock.h"
#include "base/fork_guard.h"
#include "base/mutex.h"
#include "base/unique_fd.h"
#include "comm/port/message.h"
#include "comm/port/message_link.h"
#include "comm/ucx/link_probe.h"
#include "comm/ucx/ucx_abi.h"

namespace gtrain::comm {

// The id of a communicator, unlike that of every other one of the processes that may ever speak with each
// other.
struct ContextId {
  uint64_t generation = 0;
  uint64_t context = 0;
  auto operator<=>(const ContextId&) const = default;
};

// Thread-safe where nothing else is said. Nothing blocks but Until and the destructor.
class Fabric {
 public:
  // Receives the messages of a context.
  class Context {
   public:
    virtual ~Context() = default;
    // Called with the lock held. Must not call the fabric, except Post and Stream.
    virtual void Hear(const MessageHeader& header, absl::string_view bytes) = 0;
  };

  // Another process.
  class Peer;

  // Binds to the interface that has `address` and to the RDMA ports that belong to it; `wish`: what
  // GTRAIN_COMM_TLS says (comm/ucx/network.h). FailedPrecondition, NotFound: UCX or what was wished for is
  // not here.
  static absl::StatusOr<std::shared_ptr<Fabric>> Open(const std::string& address, const std::string& wish);
  // Lets leave what was sent, a second at most, and closes connections, another one where a peer does not
  // look.
  ~Fabric();
  Fabric(const Fabric&) = delete;
  Fabric& operator=(const Fabric&) = delete;

  const std::string& wish() const { return wish_; }
  // The address by which other processes reach this one: at most some hundred bytes.
  const std::string& address() const { return address_; }
  LinkTarget& target() const { return target_; }
  // The measurements of the links, as communicators wrote them down; "" before.
  std::string links() const {
    const MutexLock lock(&links_mutex_);
    return links_;
  }
  void RememberLinks(std::string links) {
    const MutexLock lock(&links_mutex_);
    links_ = std::move(links);
  }
  // Pieces that have been given to UCX so far.
  uint64_t given() {
    const MutexLock lock(&mutex_);
    return given_;
  }

  // How often a thread that waits for others has slept so far.
  uint64_t naps() const { return naps_; }

  // Calls of contexts need the lock, which a driver gives away between two looks when another thread asks for
  // it.
  class Lock {
   public:
    explicit Lock(Fabric* fabric, bool now = true) : fabric_(fabric) {
      if (now) Again();
    }
    ~Lock() {
      if (held_) Release();
    }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;
    void Again() ABSL_NO_THREAD_SAFETY_ANALYSIS;
    void Release() ABSL_NO_THREAD_SAFETY_ANALYSIS;

   private:
    Fabric* const fabric_;
    bool held_ = false;
  };

  // The process with this address, known or not; Drop for each. InvalidArgument: it is no address.
  absl::StatusOr<Peer*> Reach(const std::string& address) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Drop(Peer* peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Delivers the messages of a context from now on, and those that came before: 64 MiB are kept of messages
  // for contexts that are not open yet.
  void Add(ContextId id, Context* context) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Remove(ContextId id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // A connection is begun, once both want it, and with it what is posted leaves. The process with the smaller
  // name calls and the other answers on that connection, and the caller sends nothing before: when both call
  // at once, UCX 1.13 has to choose between two TCP connections, and on a busy machine what one of them had
  // sent was sometimes never seen by the other.
  void Want(Peer* peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Posts one piece: header and at most kPieceBytes, copied. It leaves at once where it can, else when a
  // thread drives. `of` is told of its end if there is one.
  void Post(Peer* peer, const MessageHeader& header, absl::string_view bytes,
            std::shared_ptr<Sending> of = nullptr) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Sends the rest of a message, piece by piece.
  void Stream(Peer* peer, std::shared_ptr<Sending> message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // While a context wants it, the fabric's own thread takes in messages when no thread waits.
  void KeepMoving(int change) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Called when a thread that posted messages returns to the program: what is still here leaves all the same.
  // Not inside Hear.
  void LetLeave() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // True while a message that was posted to the peer is still here, and may leave.
  bool Unsent(const Peer* peer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // True when messages go to and from the peer.
  static bool Up(const Peer* peer);
  // True when a context has wanted the peer, and it is neither up nor lost yet.
  static bool Greeting(const Peer* peer);
  // The reason of a peer's failure, as far as it is known.
  static std::string Failure(const Peer* peer);
  bool Failed(const Peer* peer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Returns when `done`, which is asked with the lock held, or with what `check` says, which is asked without
  // before each sleep. Short sleeps first, 10 ms at most.
  absl::Status Until(absl::FunctionRef<bool()> done, absl::FunctionRef<absl::Status()> check)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Makes the driver ask its `check` again. From any thread, without the lock.
  void Interrupt();
  // Looks once at what has come, unless somebody does already.
  void Look() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

 private:
  Fabric(const GtrainUcxApi* api, const std::string& address, std::string wish);
  static void Heard(void* fabric, const void* data, size_t bytes);
  void Take(absl::string_view message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TakeGreeting(const MessageHeader& header, absl::string_view address)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void KeepEarly(ContextId id, absl::string_view message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Connect(Peer* peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Greet(Peer* peer, MessageKind kind) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Give(Peer* peer, std::unique_ptr<char[]> piece, size_t bytes, std::shared_ptr<Sending> of)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Lose(Peer* peer, absl::string_view why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Forgettable(Peer* peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool AllLeft() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Pending() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AskForHelp() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Help();
  void Wake() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int Step() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Ask(absl::FunctionRef<absl::Status()> check) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Drive(absl::FunctionRef<bool()> done, absl::FunctionRef<absl::Status()> check, int nap_ms)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Sleep(int milliseconds) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void MakeRoom() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Activate(Peer* peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Pump(Peer* peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool TakeLeft(Peer* peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool GiveNext(Peer* peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::unique_ptr<char[]> Buffer() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Recycle(std::unique_ptr<char[]> buffer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const GtrainUcxApi* const api_;
  const std::string wish_;
  const ForkGuard fork_guard_;
  LinkTarget& target_;
  const UniqueFd wake_, help_;  // of a driver that sleeps; of the fabric's own thread
  GtrainUcxWorker* worker_ = nullptr;
  std::string name_, address_;
  mutable Mutex links_mutex_;
  std::string links_ ABSL_GUARDED_BY(links_mutex_);
  Mutex mutex_;
  std::map<std::string, std::unique_ptr<Peer>> peers_ ABSL_GUARDED_BY(mutex_);  // by name
  std::map<ContextId, Context*> contexts_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::pair<ContextId, std::string>> early_ ABSL_GUARDED_BY(mutex_);
  size_t early_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::set<ContextId> closed_ ABSL_GUARDED_BY(mutex_);
  std::deque<ContextId> closed_order_ ABSL_GUARDED_BY(mutex_);
  std::vector<Peer*> active_ ABSL_GUARDED_BY(mutex_);  // with something to send
  std::vector<std::unique_ptr<char[]>> buffers_ ABSL_GUARDED_BY(mutex_);
  bool driving_ ABSL_GUARDED_BY(mutex_) = false, sleeping_ ABSL_GUARDED_BY(mutex_) = false;
  bool stepping_ ABSL_GUARDED_BY(mutex_) = false;  // UCX may be calling Heard
  int followers_ ABSL_GUARDED_BY(mutex_) = 0;
  int keep_moving_ ABSL_GUARDED_BY(mutex_) = 0;
  std::atomic<int> knocks_ = 0;
  bool help_due_ ABSL_GUARDED_BY(mutex_) = false;
  bool helping_ ABSL_GUARDED_BY(mutex_) = false, ending_ ABSL_GUARDED_BY(mutex_) = false;
  // Pieces that UCX took, and of them those that had left when a flush was over.
  uint64_t given_ ABSL_GUARDED_BY(mutex_) = 0, left_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t flushing_ ABSL_GUARDED_BY(mutex_) = 0;
  GtrainUcxTicket* flush_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::atomic<uint64_t> naps_ = 0;
  std::thread helper_;
};

// Name of the network interface with this IP address; empty if none has it.
std::string InterfaceOf(const std::string& address);

}  // namespace gtrain::comm
