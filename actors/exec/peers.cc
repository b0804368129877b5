#include "actors/exec/peers.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "actors/exec/incoming.h"
#include "actors/exec/outgoing.h"
#include "actors/exec/relocations.h"
#include "base/check.h"
#include "base/logging.h"
#include "base/mutex.h"
#include "base/threads.h"
#include "base/unique_fd.h"
#include "net/shm/server.h"

namespace gtrain::actors {
namespace {

constexpr int kMessagesATurn = 64;  // of one connection, before others have their turn
constexpr absl::Duration kLookAtLeast = absl::Seconds(1);
constexpr absl::Duration kSendAgain = absl::Milliseconds(1);  // what a connection did not take
constexpr absl::Duration kAskAgain = absl::Milliseconds(50);  // where an actor is
constexpr absl::Duration kLastAnswers = absl::Seconds(1);
// How long a thread without work looks for what comes over shared memory, which is about what it costs to be
// woken: half as long whenever nothing came, and as long as this again once something has.
constexpr absl::Duration kLookMax = absl::Microseconds(50), kLookMin = absl::Microseconds(2);
constexpr int kPauses = 4;           // of the processor, in which the other end has the memory to itself
constexpr uint32_t kLooksATime = 8;  // before the next look at the clock, which costs as much as one
// So long it may run what it found before others are awake for what comes.
constexpr absl::Duration kAwayMax = absl::Microseconds(500);

}  // namespace

// What other threads bring. Shared with replies that may come when the peers are gone.
struct Peers::Inbox {
  struct NewCall {
    CallerId process;
    OutgoingCalls::Call call;
  };
  // Of one actor after the other, in the order in which they happened.
  struct Answer {
    enum class What { kDone, kSaved, kKept, kUndone, kEnded } what = What::kDone;
    CallerId caller;
    uint64_t actor = 0, number = 0;
    bool changes = false;
    absl::Status status;
    std::string result;
  };
  struct NewKept {
    uint64_t actor = 0;
    CallerId owner;
    uint64_t id = 0;
    std::optional<KeptRecord> record;  // none: another process owns it now
    bool detached = false;
  };
  struct Content {
    std::vector<NewCall> calls;
    std::vector<Answer> answers;
    std::vector<NewKept> kept;
    std::vector<std::vector<PeerProcess>> processes;
    std::vector<std::pair<ActorRef, absl::StatusOr<ActorAddress>>> located;
    bool empty() const {
      return calls.empty() && answers.empty() && kept.empty() && processes.empty() && located.empty();
    }
  };

  Inbox() : wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) { GT_CHECK(wake.valid()); }

  // False: nobody reads any more.
  template <typename Put>
  bool Add(const Put& put) {
    bool asleep = false;
    {
      MutexLock lock(&mutex);
      if (closed) return false;
      put(content);
      has_content.store(true, std::memory_order_relaxed);
      asleep = std::exchange(sleeping, false);
    }
    if (asleep) Wake();
    return true;
  }
  void Wake() const { eventfd_write(wake.get(), 1); }
  bool AddAnswer(Answer answer) {
    return Add([&](Content& to) { to.answers.push_back(std::move(answer)); });
  }
  // A reply that brings what an actor came to.
  static Reply Bring(const std::shared_ptr<Inbox>& inbox, const Answer& answer);
  // All that came. `sleep`: the reader means to wait if there is nothing.
  Content TakeAll(bool sleep) {
    MutexLock lock(&mutex);
    sleeping = sleep && content.empty() && !ending;
    has_content.store(false, std::memory_order_relaxed);
    return std::exchange(content, {});
  }

  // Until `on` is false a thread looks by itself whether something has come, so that none need be woken. Then
  // true: there is nothing.
  bool Watch(bool on) {
    MutexLock lock(&mutex);
    sleeping = !on && content.empty() && !ending;
    return content.empty();
  }

  const UniqueFd wake;
  // Without a lock: whoever has the loop sees what happened before, and all of it that was taken is done.
  std::atomic<bool> has_content{false};
  std::weak_ptr<Loop> loop;  // set before anybody reads it
  Mutex mutex;
  Content content ABSL_GUARDED_BY(mutex);
  bool sleeping ABSL_GUARDED_BY(mutex) = false;
  bool ending ABSL_GUARDED_BY(mutex) = false;
  bool closed ABSL_GUARDED_BY(mutex) = false;
};

class Peers::Loop : public std::enable_shared_from_this<Peers::Loop> {
 public:
  Loop(Host* host, std::unique_ptr<port::ServerTransport> server, Options options, const Clock& clock,
       std::shared_ptr<Inbox> inbox)
      : host_(host),
        server_(std::move(server)),
        local_(std::move(options.local)),
        options_(std::move(options)),
        clock_(clock),
        inbox_(std::move(inbox)),
        incoming_(options_.self, options_.callers_max, Functions()),
        epoll_(epoll_create1(EPOLL_CLOEXEC)) {
    GT_CHECK(epoll_.valid());
    Watch(server_->PollFd(), &server_fd_);
    Watch(inbox_->wake.get(), &wake_fd_);
    if (local_ != nullptr) Watch(local_->fd(), &local_fd_);
  }

  void Start() {
    if (!options_.thread) return;
    thread_ = StartWithoutSignals([this] { Run(); });
  }

  void Stop() {
    {
      MutexLock lock(&inbox_->mutex);
      inbox_->ending = true;
    }
    inbox_->Wake();
    if (!options_.thread && !ended_) {
      ends_ = clock_.Now();  // time stands still here
      Turn();
    }
    if (thread_.joinable()) thread_.join();
  }

  absl::Duration Turn() {
    const bool any = Receive(0);
    const absl::Duration wait = absl::Milliseconds(Work().value_or(0));
    return any ? absl::ZeroDuration() : wait;  // there may be more
  }

  void Quiet() {
    MutexLock lock(&mutex_);
    incoming_.Quiet();
  }

  // Sends the call from this thread. False: it is not taken, since its process is not on this machine, others
  // are before it, or there is more to it; the thread of the loop has to.
  bool CallNow(const CallerId& process, OutgoingCalls::Call& call, Instant now) {
    if (!Enter()) return false;
    const bool taken = TakeCall(process, call, now);
    Leave();
    return taken;
  }

  // Likewise sends what a call came to.
  bool AnswerNow(const Inbox::Answer& answer) {
    if (!Enter()) return false;
    const port::Route* const route = incoming_.RouteOf(answer.caller);
    const bool taken = !ended_ && route != nullptr && net::ShmServer::IsRoute(*route) &&
                       !inbox_->has_content.load(std::memory_order_relaxed);
    if (taken) {
      OnAnswer(answer);
      if (incoming_.FlushOne(answer.caller, LocalSender())) inbox_->Wake();
    }
    Leave();
    return taken;
  }

  // Host::LookAround: what comes over shared memory is taken in by the thread that runs what it asks for.
  bool LookAround(absl::FunctionRef<bool()> stop) {
    if (!near_.load(std::memory_order_relaxed)) return false;
    const Instant begun = clock_.Now();
    absl::Duration length;
    {
      MutexLock lock(&mutex_);
      looked_until_ = begun;
      if (ended_ || look_for_ < kLookMin) return false;
      length = look_for_;
      looking_ = true;
      if (std::exchange(armed_, false)) Disarm();
      inbox_->Watch(true);
    }
    bool found = false;
    for (uint32_t i = 1; !found && (i % kLooksATime != 0 || clock_.Now() - begun < length); ++i) {
      if (stop()) break;
      for (int pause = 0; pause < kPauses; ++pause) Pause();
      if (!mutex_.TryLock()) continue;
      found = !ended_ && StepHere();
      mutex_.Unlock();
    }
    MutexLock lock(&mutex_);
    looking_ = false;
    if (ended_) return false;
    if (!found && !stop()) {
      look_for_ = length / 2;
      looked_until_ = clock_.Now();
    } else {
      look_for_ = kLookMax;
    }
    if (!found) armed_ = Arm();  // whatever comes from here on wakes the thread of the loop
    // A thread that has found something is about to look again, and to ring it meanwhile would cost more than
    // the call. If it is away for long the thread of the loop sees to it.
    left_at_ = found ? clock_.Now() : Instant();
    if (!inbox_->Watch(false) || (!armed_ && !ticks_)) inbox_->Wake();
    return found || stop();
  }

  uint64_t answered() const { return answered_.load(std::memory_order_relaxed); }

 private:
  struct Peer {
    Peer(const CallerId& i, OutgoingCalls c) : id(i), calls(std::move(c)) {}
    const CallerId id;
    OutgoingCalls calls;
    std::string endpoint;  // empty: nobody has said where it is
    std::unique_ptr<port::ClientTransport> client;
    std::unique_ptr<net::ShmLink> link;  // instead of it, on this machine
    bool far = false;                    // there is no link to it, or no more
    std::string unsent;                  // a message that the connection did not take
    bool connected = false;
    bool named = false;  // it was among the processes
    std::optional<Instant> timer;
  };

  // And not by where they lie in memory: a simulation takes the same course again.
  struct ById {
    bool operator()(const Peer* a, const Peer* b) const { return a->id < b->id; }
    bool operator()(const std::pair<Instant, Peer*>& a, const std::pair<Instant, Peer*>& b) const {
      return a.first != b.first ? a.first < b.first : a.second->id < b.second->id;
    }
  };

  IncomingCalls::Functions Functions() {
    IncomingCalls::Functions functions;
    functions.call = [this](uint64_t actor, int method, std::string& arguments, absl::Duration timeout,
                            Reply& reply) {
      ActorAddress address = host_->address();
      address.number = actor;
      return host_->CallIfRoom(address, method, arguments, timeout, reply);
    };
    functions.lives = [this](uint64_t actor) { return host_->Lives(actor); };
    functions.control = options_.control;
    functions.reply = [this](const CallerId& caller, uint64_t actor, uint64_t number, bool changes) {
      return Inbox::Bring(inbox_, {Inbox::Answer::What::kDone, caller, actor, number, changes, {}, {}});
    };
    functions.constant = [this](uint64_t actor, int method) { return host_->Constant(actor, method); };
    functions.save = [this](uint64_t actor, bool again) { host_->Save(actor, again); };
    functions.keep = [this](uint64_t actor, const CallerId& owner, uint64_t id, const std::string& record) {
      options_.keep(owner, id, record,
                    Inbox::Bring(inbox_, {Inbox::Answer::What::kKept, {}, actor, 0, false, {}, {}}));
    };
    functions.end = [this](uint64_t actor, const std::string& why) {
      ActorAddress address = host_->address();
      address.number = actor;
      host_->End(address, why);
    };
    return functions;
  }

  void Watch(int fd, void* what) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = what;
    GT_CHECK(epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0);
  }

  // Threads take turns with the loop. False: another one has it, and does what there is to do.
  bool Enter() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return near_.load(std::memory_order_relaxed) && within != this && mutex_.TryLock();
  }
  void Leave() ABSL_NO_THREAD_SAFETY_ANALYSIS { mutex_.Unlock(); }

  // Whoever runs a turn may be called by it: replies call and answer.
  struct Within {
    explicit Within(const Loop* loop) { within = loop; }
    ~Within() { within = nullptr; }
  };

  void Run() {
    while (const std::optional<int> timeout_ms = Work()) Receive(*timeout_ms);
  }

  // Waits so long for what the connections have. False: nothing came.
  bool Receive(int timeout_ms) {
    std::array<epoll_event, 64> events;
    const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout_ms);
    if (count <= 0) return false;
    MutexLock lock(&mutex_);
    const Within here(this);
    for (int i = 0; i < count; ++i) OnReadable(events[static_cast<size_t>(i)].data.ptr);
    return true;
  }

  // All that there is to do but to receive. How long it may wait then, in milliseconds; none:
  // the peers are closed.
  std::optional<int> Work() {
    MutexLock lock(&mutex_);
    const Within here(this);
    Inbox::Content content = inbox_->TakeAll(/*sleep=*/!again_);
    const bool content_was_empty = content.empty();
    bool waits = content_was_empty;
    TakeIn(content);
    waits &= !ReceiveNear();
    Pump(/*all=*/true);
    again_ = incoming_.Flush(Sender()) || more_;
    agains_ = again_ && content_was_empty ? agains_ + 1 : 0;
    Tell();
    if (Ended()) {
      ended_ = true;
      near_.store(false, std::memory_order_relaxed);
      Tell();
      return std::nullopt;
    }
    const Instant now = clock_.Now();
    if (waits && !looking_ && !armed_ && now - left_at_ >= kAwayMax) armed_ = waits = Arm();
    ticks_ = !armed_;
    int timeout_ms = 0;
    if (waits) timeout_ms = ticks_ ? 1 : WaitMs(again_);
    wakes_at_ = now + absl::Milliseconds(timeout_ms);
    return timeout_ms;
  }

  // A turn of another thread: what came over shared memory, and what other threads bring. False: nothing.
  bool StepHere() {
    const Within here(this);
    bool any = false;
    if (inbox_->has_content.load(std::memory_order_relaxed)) {
      Inbox::Content content = inbox_->TakeAll(/*sleep=*/false);
      any = !content.empty();
      TakeIn(content);
    }
    any |= ReceiveNear();
    if (!any) return false;
    Pump(/*all=*/false);
    const bool left = incoming_.Flush(LocalSender()) || more_;
    Tell();
    if (left || WakesTooLate()) inbox_->Wake();
    return true;
  }
  bool WakesTooLate() const { return !timers_.empty() && timers_.begin()->first < wakes_at_; }

  bool TakeCall(const CallerId& process, OutgoingCalls::Call& call, Instant now) {
    if (ended_ || (call.ref && !relocations_.GoesThere(*call.ref))) return false;
    const auto it = peers_.find(process);
    if (it == peers_.end()) return false;
    Peer& peer = it->second;
    if (peer.link == nullptr || peer.calls.gone() || !peer.calls.welcome() ||
        inbox_->has_content.load(std::memory_order_relaxed))
      return false;
    if (call.ref) call.actor = call.ref->at.number;
    peer.calls.Add(std::move(call), heard_);
    const bool sent = Send(peer, now);
    if (!sent) touched_.insert(&peer);
    SetTimer(peer);
    if (!sent || !heard_.empty() || WakesTooLate()) inbox_->Wake();
    return true;
  }

  // ---- connections over shared memory

  // True: something came.
  bool ReceiveNear() {
    bool any = false;
    if (local_ != nullptr && local_->HasWork()) {
      ReceiveCalls([this] { return local_->Receive(); });
      any = true;
    }
    for (size_t i = 0; i < linked_.size(); ++i) {  // one that is lost goes from the list
      Peer& peer = *linked_[i];
      if (!peer.link->HasWork()) continue;
      ReceiveAnswers(peer);
      any = true;
    }
    return any;
  }
  // False: there is something to do.
  bool Arm() {
    bool armed = local_ == nullptr || local_->Arm();
    for (Peer* peer : linked_) armed &= peer->link->Arm();
    return armed;
  }
  void Disarm() {
    if (local_ != nullptr) local_->Disarm();
    for (Peer* peer : linked_) peer->link->Disarm();
  }
  void SetNear() {
    near_.store(!linked_.empty() || (local_ != nullptr && local_->connections() > 0),
                std::memory_order_relaxed);
  }

  IncomingCalls::SendFunction Sender() { return send_; }
  IncomingCalls::SendFunction LocalSender() { return send_near_; }

  // The last answers go out before the end.
  bool Ended() {
    MutexLock lock(&inbox_->mutex);
    if (!inbox_->ending) return false;
    const Instant now = clock_.Now();
    if (!ends_) ends_ = now + kLastAnswers;
    if ((again_ || !inbox_->content.empty()) && now < *ends_) return false;
    inbox_->closed = true;
    for (Inbox::NewCall& call : inbox_->content.calls)
      heard_.push_back({std::move(call.call.reply), Closed(), ""});
    inbox_->content = {};
    for (auto& [id, peer] : peers_) {
      if (!peer.calls.gone()) peer.calls.Cancel(Closed(), heard_);
    }
    relocations_.Cancel(Closed(), heard_);
    return true;
  }

  static absl::Status Closed() { return absl::CancelledError("the cluster of this process is closed"); }

  void TakeIn(Inbox::Content& content) {
    for (std::vector<PeerProcess>& processes : content.processes) {
      Tell();  // what came of a process while it lived
      SetProcesses(std::move(processes));
    }
    for (Inbox::NewCall& call : content.calls) {
      if (call.call.ref) {
        Dispatch(std::move(call.call));
      } else {
        Give(call.process, std::move(call.call));
      }
    }
    for (const auto& [ref, at] : content.located) OnLocated(ref, at);
    for (const Inbox::NewKept& kept : content.kept) {
      if (kept.record) {
        incoming_.Keep(kept.actor, kept.owner, kept.id, *kept.record, kept.detached);
      } else {
        incoming_.KeptBy(kept.actor, kept.owner, kept.id);
      }
    }
    for (const Inbox::Answer& answer : content.answers) OnAnswer(answer);
  }

  void OnAnswer(const Inbox::Answer& answer) {
    switch (answer.what) {
      case Inbox::Answer::What::kDone:
        return incoming_.Done(answer.caller, answer.actor, answer.number, answer.changes, answer.status,
                              answer.result);
      case Inbox::Answer::What::kSaved:
        return incoming_.Saved(answer.actor, answer.status, answer.result);
      case Inbox::Answer::What::kKept:
        return incoming_.Kept(answer.actor, answer.status);
      case Inbox::Answer::What::kUndone:
        return incoming_.Undone(answer.actor);
      case Inbox::Answer::What::kEnded:
        return incoming_.ActorEnded(answer.actor);
    }
  }

  void OnLocated(const ActorRef& ref, const absl::StatusOr<ActorAddress>& at) {
    if (!at.ok() && !absl::IsNotFound(at.status()) && !absl::IsUnavailable(at.status())) {
      const ActorAddress before = relocations_.NotAt(ref);  // the owner is slow
      return Locate(ref, Knows({before.host_high, before.host_low}) ? before : ActorAddress());
    }
    if (at.ok() && !Knows({at->host_high, at->host_low})) {
      // It has come up, and this process is to hear so; or it was lost before this process came up, and the
      // owner is to hear so. Its word will do once both have.
      return relocations_.AskLater(ref, clock_.Now() + kAskAgain);
    }
    Relocations::Waited waited = relocations_.Located(ref, at, heard_);
    if (waited.moved) Move(*std::move(waited.moved), *at);
    for (OutgoingCalls::Call& call : waited.calls) Dispatch(std::move(call));
  }

  // Its process was among those that there are.
  bool Knows(const CallerId& process) const {
    const auto it = peers_.find(process);
    return it != peers_.end() && (it->second.named || it->second.calls.gone());
  }

  Peer& PeerOf(const CallerId& id) {
    auto it = peers_.find(id);
    if (it == peers_.end())
      it = peers_.try_emplace(id, id, OutgoingCalls(options_.self, id, "a process that nobody here knows"))
               .first;
    return it->second;
  }

  void Give(const CallerId& process, OutgoingCalls::Call call) {
    Peer& peer = PeerOf(process);
    if (peer.calls.gone()) {
      heard_.push_back({std::move(call.reply), peer.calls.WhyGone(/*sent=*/false), ""});
      return;
    }
    peer.calls.Add(std::move(call), heard_);
    touched_.insert(&peer);
  }

  // To wherever its actor is, or when that is known.
  void Dispatch(OutgoingCalls::Call call) {
    const std::optional<ActorAddress> at = relocations_.Find(call, heard_);
    if (!at) return;
    const CallerId process{at->host_high, at->host_low};
    call.actor = at->number;
    if (process == options_.self && !call.ref->kept()) {
      host_->Call(*at, static_cast<int>(call.method), std::move(call.arguments), call.deadline - clock_.Now(),
                  std::move(call.reply));
      return;
    }
    Peer& peer = PeerOf(process);
    if (!peer.calls.gone() && peer.named) {
      peer.calls.Add(std::move(call), heard_);
      touched_.insert(&peer);
      return;
    }
    // It is gone; or was before this process came up, or has come up behind it: the owner knows.
    const ActorRef ref = *call.ref;
    if (relocations_.Lost(std::move(call), *at)) Locate(ref, peer.calls.gone() ? *at : ActorAddress());
  }

  void Move(OutgoingCalls::Moved moved, const ActorAddress& at) {
    Peer& peer = PeerOf({at.host_high, at.host_low});
    if (peer.calls.gone()) {
      const ActorRef ref = moved.ref;
      if (relocations_.Lost(std::move(moved), at)) Locate(ref, at);
      return;
    }
    peer.calls.Adopt(at.number, std::move(moved));
    touched_.insert(&peer);
  }

  void Locate(const ActorRef& ref, const ActorAddress& not_at) {
    options_.locate(ref, not_at, [inbox = inbox_, ref](const absl::Status& status, absl::string_view result) {
      const absl::StatusOr<ActorAddress> at = status.ok() ? ActorAddress::Parse(result) : status;
      inbox->Add([&](Inbox::Content& content) { content.located.emplace_back(ref, at); });
    });
  }

  void SetProcesses(std::vector<PeerProcess> processes) {
    std::set<CallerId> now;
    for (PeerProcess& process : processes) {
      now.insert(process.process);
      Peer& peer = PeerOf(process.process);
      peer.named = true;
      peer.endpoint = std::move(process.endpoint);
      peer.calls.set_name(std::move(process.name));
      touched_.insert(&peer);
    }
    for (auto& [id, peer] : peers_) {
      if (!peer.named || now.contains(id) || peer.calls.gone()) continue;
      Lose(id, peer, "its process has ended");
    }
  }

  void Lose(const CallerId& id, Peer& peer, absl::string_view why) {
    std::vector<OutgoingCalls::Call> unsent;
    std::vector<OutgoingCalls::Moved> moved;
    incoming_.Forget(id);
    peer.calls.Gone(why, heard_, unsent, moved);
    touched_.insert(&peer);
    if (options_.on_gone) options_.on_gone(id);
    for (OutgoingCalls::Moved& one : moved) {
      const ActorRef ref = one.ref;
      ActorAddress at{id.high, id.low, 0};
      at.number = one.number;
      if (relocations_.Lost(std::move(one), at)) Locate(ref, at);
    }
    for (OutgoingCalls::Call& call : unsent) Dispatch(std::move(call));
  }

  // Connects, sends, and knows when it has to look again.
  // `all` false: what other threads may do, those over shared memory alone.
  void Pump(bool all) {
    const Instant now = clock_.Now();
    relocations_.OnTime(now, heard_);
    for (const ActorRef& ref : relocations_.ToAsk(now)) Locate(ref, ActorAddress());
    while (!timers_.empty() && timers_.begin()->first <= now) {
      touched_.insert(timers_.begin()->second);
      timers_.begin()->second->timer.reset();
      timers_.erase(timers_.begin());
    }
    more_ = false;
    for (Peer* peer : std::exchange(touched_, {})) {
      if (!all && (peer->link == nullptr || peer->calls.gone())) {
        touched_.insert(peer);
        more_ = true;
        continue;
      }
      peer->calls.OnTime(now, heard_);
      if (peer->calls.gone()) {
        Disconnect(*peer);
      } else {
        Connect(*peer);
        if (!Send(*peer, now)) {
          touched_.insert(peer);
          more_ = true;
        }
      }
      SetTimer(*peer);
    }
  }

  void Connect(Peer& peer) {
    if (peer.client != nullptr || peer.link != nullptr || peer.endpoint.empty() || peer.calls.idle()) return;
    if (!peer.far && options_.connect_near) peer.link = options_.connect_near(peer.endpoint);
    peer.far = peer.link == nullptr;
    if (!peer.far) {
      linked_.push_back(&peer);
      armed_ = false;
      SetNear();
      Watch(peer.link->fd(), &peer);
      return LookAtConnection(peer);
    }
    auto client = options_.connect(peer.endpoint);
    if (!client.ok()) {
      return Complain(absl::StrCat("there is no connection to ", peer.calls.name()), client.status());
    }
    peer.client = *std::move(client);
    Watch(peer.client->PollFd(), &peer);
    LookAtConnection(peer);
  }

  void Disconnect(Peer& peer) {
    if (peer.client == nullptr && peer.link == nullptr) return;
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, peer.link ? peer.link->fd() : peer.client->PollFd(), nullptr);
    peer.client.reset();
    std::erase(linked_, &peer);
    peer.link.reset();
    SetNear();
    peer.connected = false;
    peer.unsent.clear();
  }

  void LookAtConnection(Peer& peer) {
    const bool connected = peer.link ? !peer.link->lost() : peer.client->Connected();
    if (connected == peer.connected) return;
    peer.connected = connected;
    peer.unsent.clear();
    if (connected) return peer.calls.Connected();
    peer.calls.Lost();
    if (peer.link == nullptr) return;
    // It does not come again: the other process is dead, or is called as one of another machine.
    Disconnect(peer);
    peer.far = true;
    touched_.insert(&peer);
    inbox_->Wake();
  }

  // False: the connection takes no more just now.
  bool Send(Peer& peer, Instant now) {
    if (peer.link != nullptr) peer.link->Flush();
    while (peer.connected) {
      if (peer.unsent.empty()) peer.unsent = peer.calls.NextMessage(now);
      if (peer.unsent.empty()) return true;
      const absl::Status sent = peer.link ? peer.link->Send(peer.unsent) : peer.client->Send(peer.unsent);
      if (absl::IsResourceExhausted(sent)) return false;
      if (!sent.ok()) {
        LookAtConnection(peer);
        return true;
      }
      peer.unsent.clear();
    }
    return true;
  }

  void SetTimer(Peer& peer) {
    const std::optional<Instant> next = peer.calls.next_time();
    if (peer.timer == next) return;
    if (peer.timer) timers_.erase({*peer.timer, &peer});
    peer.timer = next;
    if (next) timers_.emplace(*next, &peer);
  }

  int WaitMs(bool again) const {
    const Instant now = clock_.Now();
    absl::Duration wait =
        again ? std::min(kSendAgain * (1 << std::min(agains_, 5)), kLookAtLeast) : kLookAtLeast;
    if (!timers_.empty()) wait = std::clamp(timers_.begin()->first - now, absl::ZeroDuration(), wait);
    if (const auto next = relocations_.next_time())
      wait = std::clamp(*next - now, absl::ZeroDuration(), wait);
    return static_cast<int>(absl::ToInt64Milliseconds(absl::Ceil(wait, absl::Milliseconds(1))));
  }

  void OnReadable(void* what) {
    if (what == &wake_fd_) {
      eventfd_t value = 0;
      eventfd_read(inbox_->wake.get(), &value);
    } else if (what == &server_fd_) {
      ReceiveCalls([this] { return server_->Receive(); });
    } else if (what == &local_fd_) {
      Rung();
      local_->OnReadable();
      SetNear();
      ReceiveCalls([this] { return local_->Receive(); });
    } else {
      Peer& peer = *static_cast<Peer*>(what);
      if (peer.link != nullptr) {
        Rung();
        peer.link->OnReadable();
      }
      ReceiveAnswers(peer);
    }
  }

  // Whoever rings does so once, and a new connection has never been armed. What rings soon would have been
  // seen by a thread that had looked a little longer.
  void Rung() {
    armed_ = false;
    if (looked_until_ && clock_.Now() - *looked_until_ < kLookMax) look_for_ = kLookMax;
  }

  void ReceiveCalls(absl::FunctionRef<std::optional<port::Received>()> receive) {
    for (int i = 0; i < kMessagesATurn; ++i) {
      const std::optional<port::Received> received = receive();
      if (!received) return;
      const absl::Status status = incoming_.OnMessage(received->route, received->payload);
      if (!status.ok()) Complain(absl::StrCat("a message of ", received->address, " is dropped"), status);
    }
  }

  void ReceiveAnswers(Peer& peer) {
    if (peer.client == nullptr && peer.link == nullptr) return;
    const uint64_t before = peer.calls.answered();
    // Of a link that is lost all that came, which is no more than the ring has.
    for (int i = 0; i < kMessagesATurn || (peer.link && peer.link->lost()); ++i) {
      const std::optional<std::string> message = peer.link ? peer.link->Receive() : peer.client->Receive();
      if (!message) break;
      const absl::Status status = peer.calls.OnMessage(*message, clock_.Now(), heard_);
      if (absl::IsNotFound(status)) return Lose(peer.id, peer, status.message());
      if (!status.ok()) Complain(absl::StrCat("a message of ", peer.calls.name(), " is dropped"), status);
    }
    answered_.fetch_add(peer.calls.answered() - before, std::memory_order_relaxed);
    LookAtConnection(peer);
    touched_.insert(&peer);
  }

  void Complain(const std::string& what, const absl::Status& status) {
    const Instant now = clock_.Now();
    if (complained_ && now - *complained_ < absl::Seconds(10)) return;
    complained_ = now;
    LogWarning(what, ": ", status.message());
  }

  void Tell() {
    HeardReplies heard = std::exchange(heard_, {});
    for (HeardReply& one : heard) {
      if (one.reply) one.reply(one.status, one.result);
    }
  }

  static void Pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  inline static thread_local const Loop* within = nullptr;  // the loop that this thread has

  Host* const host_;
  const std::unique_ptr<port::ServerTransport> server_;
  const std::unique_ptr<net::ShmServer> local_;
  const Options options_;
  const Clock& clock_;
  const std::shared_ptr<Inbox> inbox_;
  std::atomic<bool> near_{false};  // there are connections over shared memory

  // Whoever runs a function below the public ones has it, but for Run, Start and Stop. What was here before
  // other threads took turns is not annotated one by one.
  Mutex mutex_;
  bool ended_ = false;
  bool looking_ = false;  // a thread does, so the links need not be armed
  bool armed_ = false;    // they are
  bool ticks_ = false;    // the thread of the loop wakes soon, since they are not
  Instant left_at_;       // a thread has looked until then, and is to look again
  absl::Duration look_for_ = kLookMax;
  std::optional<Instant> looked_until_;
  Instant wakes_at_;           // the thread of the loop looks then by itself
  std::vector<Peer*> linked_;  // over shared memory
  const std::function<absl::Status(const port::Route&, absl::string_view)> send_ =
      [this](const port::Route& route, absl::string_view message) {
        return net::ShmServer::IsRoute(route) ? local_->Send(route, message) : server_->Send(route, message);
      };
  const std::function<absl::Status(const port::Route&, absl::string_view)> send_near_ =
      [this](const port::Route& route, absl::string_view message) {
        return net::ShmServer::IsRoute(route) ? local_->Send(route, message)
                                              : absl::ResourceExhaustedError("the thread of the loop does");
      };
  IncomingCalls incoming_;
  Relocations relocations_;
  std::map<CallerId, Peer> peers_;  // those that are gone stay, so that who calls them hears of it
  std::set<Peer*, ById> touched_;
  std::set<std::pair<Instant, Peer*>, ById> timers_;
  HeardReplies heard_;
  bool more_ = false;
  bool again_ = false;           // some connections took nothing
  std::optional<Instant> ends_;  // the last answers leave until then
  int agains_ = 0;               // turns in a row in which connections took nothing
  std::atomic<uint64_t> answered_{0};
  std::optional<Instant> complained_;
  char server_fd_ = 0, wake_fd_ = 0, local_fd_ = 0;  // their addresses name the descriptors
  const UniqueFd epoll_;
  std::thread thread_;
};

Reply Peers::Inbox::Bring(const std::shared_ptr<Inbox>& inbox, const Answer& answer) {
  return [inbox, answer = answer](const absl::Status& status, absl::string_view result) mutable {
    // A copy of its own: that of the thread which says it goes meanwhile.
    answer.status = status.ok() ? absl::OkStatus() : absl::Status(status.code(), status.message());
    answer.result = std::string(result);
    if (answer.what == Answer::What::kDone) {
      const std::shared_ptr<Loop> loop = inbox->loop.lock();
      if (loop != nullptr && loop->AnswerNow(answer)) return;
    }
    inbox->AddAnswer(std::move(answer));
  };
}

Peers::Peers(Host* host, std::unique_ptr<port::ServerTransport> server, Options options, const Clock& clock)
    : host_(host),
      clock_(clock),
      inbox_(std::make_shared<Inbox>()),
      loop_(std::make_shared<Loop>(host, std::move(server), std::move(options), clock, inbox_)) {
  inbox_->loop = loop_;
  loop_->Start();
  host->SetLookAround([loop = loop_](absl::FunctionRef<bool()> stop) { return loop->LookAround(stop); });
}
Peers::~Peers() { Stop(); }
void Peers::Stop() {
  host_->SetLookAround(nullptr);
  loop_->Stop();
}

void Peers::Quiet() { loop_->Quiet(); }
absl::Duration Peers::Turn() { return loop_->Turn(); }

void Peers::SetProcesses(std::vector<PeerProcess> processes) {
  inbox_->Add([&](Inbox::Content& content) { content.processes.push_back(std::move(processes)); });
}

void Peers::Call(const ActorRef& ref, int method, std::string arguments, absl::Duration timeout,
                 Reply reply) {
  OutgoingCalls::Call call;
  call.ref = ref;
  call.method = static_cast<uint32_t>(method);
  call.arguments = std::move(arguments);
  call.reply = std::move(reply);
  Add({ref.at.host_high, ref.at.host_low}, std::move(call), timeout);
}

void Peers::Ask(const CallerId& process, uint32_t method, std::string arguments, absl::Duration timeout,
                Reply reply, std::function<void(absl::string_view)> on_late) {
  OutgoingCalls::Call call;
  call.method = method;
  call.arguments = std::move(arguments);
  call.reply = std::move(reply);
  call.on_late = std::move(on_late);
  Add(process, std::move(call), timeout);
}

void Peers::Add(const CallerId& process, OutgoingCalls::Call call, absl::Duration timeout) {
  if (call.arguments.size() > kCallBytesMax) {
    return call.reply(
        absl::InvalidArgumentError(absl::StrCat("the arguments have ", call.arguments.size(), " bytes, and ",
                                                kCallBytesMax, " are the most")),
        {});
  }
  const Instant now = clock_.Now();
  call.deadline = now + timeout;
  if (loop_->CallNow(process, call, now)) return;
  if (!inbox_->Add([&](Inbox::Content& content) { content.calls.push_back({process, std::move(call)}); }))
    call.reply(absl::CancelledError("the cluster of this process is closed"), {});
}

uint64_t Peers::answered() const { return loop_->answered(); }

void Peers::Keep(uint64_t actor, const CallerId& owner, uint64_t id, KeptRecord record, bool detached) {
  inbox_->Add([&](Inbox::Content& content) {
    content.kept.push_back({actor, owner, id, std::move(record), detached});
  });
}
void Peers::KeptBy(uint64_t actor, const CallerId& owner, uint64_t id) {
  inbox_->Add([&](Inbox::Content& content) { content.kept.push_back({actor, owner, id, std::nullopt}); });
}

std::function<void(uint64_t)> Peers::OnEnd() const {
  return [inbox = inbox_](uint64_t actor) {
    inbox->AddAnswer({Inbox::Answer::What::kEnded, {}, actor, 0, false, {}, {}});
  };
}
std::function<void(uint64_t, const absl::Status&, const std::string&)> Peers::OnSaved() const {
  return [inbox = inbox_](uint64_t actor, const absl::Status& status, const std::string& state) {
    inbox->AddAnswer({Inbox::Answer::What::kSaved, {}, actor, 0, false, status, state});
  };
}
std::function<void(uint64_t)> Peers::OnUndone() const {
  return [inbox = inbox_](uint64_t actor) {
    inbox->AddAnswer({Inbox::Answer::What::kUndone, {}, actor, 0, false, {}, {}});
  };
}

}  // namespace gtrain::actors
