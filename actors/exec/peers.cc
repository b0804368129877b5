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

namespace gtrain::actors {
namespace {

constexpr int kMessagesATurn = 64;  // of one connection, before others have their turn
constexpr absl::Duration kLookAtLeast = absl::Seconds(1);
constexpr absl::Duration kSendAgain = absl::Milliseconds(1);  // what a connection did not take
constexpr absl::Duration kLastAnswers = absl::Seconds(1);

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
    KeptRecord record;
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
      asleep = std::exchange(sleeping, false);
    }
    if (asleep) eventfd_write(wake.get(), 1);
    return true;
  }
  bool AddAnswer(Answer answer) {
    return Add([&](Content& to) { to.answers.push_back(std::move(answer)); });
  }
  // A reply that brings what an actor came to.
  static Reply Bring(const std::shared_ptr<Inbox>& inbox, Answer answer) {
    return [inbox, answer](const absl::Status& status, absl::string_view result) mutable {
      answer.status = status;
      answer.result = std::string(result);
      inbox->AddAnswer(std::move(answer));
    };
  }
  // All that came. `sleep`: the reader means to wait if there is nothing.
  Content TakeAll(bool sleep) {
    MutexLock lock(&mutex);
    sleeping = sleep && content.empty() && !ending;
    return std::exchange(content, {});
  }

  const UniqueFd wake;
  Mutex mutex;
  Content content ABSL_GUARDED_BY(mutex);
  bool sleeping ABSL_GUARDED_BY(mutex) = false;
  bool ending ABSL_GUARDED_BY(mutex) = false;
  bool closed ABSL_GUARDED_BY(mutex) = false;
};

class Peers::Loop {
 public:
  Loop(Host* host, std::unique_ptr<port::ServerTransport> server, Options options, const Clock& clock,
       std::shared_ptr<Inbox> inbox)
      : host_(host),
        server_(std::move(server)),
        options_(std::move(options)),
        clock_(clock),
        inbox_(std::move(inbox)),
        incoming_(options_.self, options_.callers_max, Functions()),
        epoll_(epoll_create1(EPOLL_CLOEXEC)) {
    GT_CHECK(epoll_.valid());
    Watch(server_->PollFd(), &server_fd_);
    Watch(inbox_->wake.get(), &wake_fd_);
    thread_ = StartWithoutSignals([this] { Run(); });
  }

  ~Loop() { Stop(); }

  void Stop() {
    {
      MutexLock lock(&inbox_->mutex);
      inbox_->ending = true;
    }
    eventfd_write(inbox_->wake.get(), 1);
    if (thread_.joinable()) thread_.join();
  }

  uint64_t answered() const { return answered_.load(std::memory_order_relaxed); }

 private:
  struct Peer {
    Peer(const CallerId& i, OutgoingCalls c) : id(i), calls(std::move(c)) {}
    const CallerId id;
    OutgoingCalls calls;
    std::string endpoint;  // empty: nobody has said where it is
    std::unique_ptr<port::ClientTransport> client;
    std::string unsent;  // a message that the connection did not take
    bool connected = false;
    bool named = false;      // it was among the processes
    bool confirmed = false;  // the owner of an actor has said that it is there
    std::optional<Instant> timer;
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
    functions.save = [this](uint64_t actor) { host_->Save(actor); };
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

  void Run() {
    bool again = false;
    std::optional<Instant> ends;
    for (;;) {
      Inbox::Content content = inbox_->TakeAll(/*sleep=*/!again);
      const bool wait = content.empty();
      TakeIn(content);
      Pump();
      again = incoming_.Flush(*server_) || more_;
      Tell();
      if (Ended(again, ends)) return Tell();
      if (wait) Wait(again);
    }
  }

  // The last answers go out before the end.
  bool Ended(bool unsent, std::optional<Instant>& ends) {
    MutexLock lock(&inbox_->mutex);
    if (!inbox_->ending) return false;
    const Instant now = clock_.Now();
    if (!ends) ends = now + kLastAnswers;
    if ((unsent || !inbox_->content.empty()) && now < *ends) return false;
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
    for (const auto& [ref, at] : content.located) {
      if (at.ok()) PeerOf({at->host_high, at->host_low}).confirmed = true;
      if (!at.ok() && !absl::IsNotFound(at.status()) && !absl::IsUnavailable(at.status())) {
        Locate(ref, relocations_.NotAt(ref));  // the owner is slow
        continue;
      }
      Relocations::Waited waited = relocations_.Located(ref, at, heard_);
      if (waited.moved) Move(*std::move(waited.moved), *at);
      for (OutgoingCalls::Call& call : waited.calls) Dispatch(std::move(call));
    }
    for (const Inbox::NewKept& kept : content.kept)
      incoming_.Keep(kept.actor, kept.owner, kept.id, kept.record);
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
    if (process == options_.self && call.ref->kept == 0) {
      host_->Call(*at, static_cast<int>(call.method), std::move(call.arguments), call.deadline - clock_.Now(),
                  std::move(call.reply));
      return;
    }
    Peer& peer = PeerOf(process);
    if (!peer.calls.gone() && (peer.named || peer.confirmed)) {
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
  void Pump() {
    const Instant now = clock_.Now();
    relocations_.OnTime(now, heard_);
    while (!timers_.empty() && timers_.begin()->first <= now) {
      touched_.insert(timers_.begin()->second);
      timers_.begin()->second->timer.reset();
      timers_.erase(timers_.begin());
    }
    more_ = false;
    std::set<Peer*> touched = std::exchange(touched_, {});
    for (Peer* peer : touched) {
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
    if (peer.client != nullptr || peer.endpoint.empty() || peer.calls.idle()) return;
    auto client = options_.connect(peer.endpoint);
    if (!client.ok()) {
      return Complain(absl::StrCat("there is no connection to ", peer.calls.name()), client.status());
    }
    peer.client = *std::move(client);
    Watch(peer.client->PollFd(), &peer);
    LookAtConnection(peer);
  }

  void Disconnect(Peer& peer) {
    if (peer.client == nullptr) return;
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, peer.client->PollFd(), nullptr);
    peer.client.reset();
    peer.connected = false;
    peer.unsent.clear();
  }

  void LookAtConnection(Peer& peer) {
    const bool connected = peer.client->Connected();
    if (connected == peer.connected) return;
    peer.connected = connected;
    peer.unsent.clear();
    if (connected) {
      peer.calls.Connected();
    } else {
      peer.calls.Lost();
    }
  }

  // False: the connection takes no more just now.
  bool Send(Peer& peer, Instant now) {
    while (peer.connected) {
      if (peer.unsent.empty()) peer.unsent = peer.calls.NextMessage(now);
      if (peer.unsent.empty()) return true;
      const absl::Status sent = peer.client->Send(peer.unsent);
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

  void Wait(bool again) {
    const Instant now = clock_.Now();
    absl::Duration wait = again ? kSendAgain : kLookAtLeast;
    if (!timers_.empty()) wait = std::clamp(timers_.begin()->first - now, absl::ZeroDuration(), wait);
    if (const auto next = relocations_.next_time())
      wait = std::clamp(*next - now, absl::ZeroDuration(), wait);
    std::array<epoll_event, 64> events;
    const int timeout_ms =
        static_cast<int>(absl::ToInt64Milliseconds(absl::Ceil(wait, absl::Milliseconds(1))));
    const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout_ms);
    for (int i = 0; i < count; ++i) {
      void* const what = events[static_cast<size_t>(i)].data.ptr;
      if (what == &wake_fd_) {
        eventfd_t value = 0;
        eventfd_read(inbox_->wake.get(), &value);
      } else if (what == &server_fd_) {
        ReceiveCalls();
      } else {
        ReceiveAnswers(*static_cast<Peer*>(what));
      }
    }
  }

  void ReceiveCalls() {
    for (int i = 0; i < kMessagesATurn; ++i) {
      const std::optional<port::Received> received = server_->Receive();
      if (!received) return;
      const absl::Status status = incoming_.OnMessage(received->route, received->payload);
      if (!status.ok()) Complain(absl::StrCat("a message of ", received->address, " is dropped"), status);
    }
  }

  void ReceiveAnswers(Peer& peer) {
    if (peer.client == nullptr) return;
    const uint64_t before = peer.calls.answered();
    for (int i = 0; i < kMessagesATurn; ++i) {
      const std::optional<std::string> message = peer.client->Receive();
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

  Host* const host_;
  const std::unique_ptr<port::ServerTransport> server_;
  const Options options_;
  const Clock& clock_;
  const std::shared_ptr<Inbox> inbox_;
  IncomingCalls incoming_;
  Relocations relocations_;
  std::map<CallerId, Peer> peers_;  // those that are gone stay, so that who calls them hears of it
  std::set<Peer*> touched_;
  std::set<std::pair<Instant, Peer*>> timers_;
  HeardReplies heard_;
  bool more_ = false;
  std::atomic<uint64_t> answered_{0};
  std::optional<Instant> complained_;
  char server_fd_ = 0, wake_fd_ = 0;  // their addresses name the descriptors
  const UniqueFd epoll_;
  std::thread thread_;
};

Peers::Peers(Host* host, std::unique_ptr<port::ServerTransport> server, Options options, const Clock& clock)
    : clock_(clock),
      inbox_(std::make_shared<Inbox>()),
      loop_(std::make_unique<Loop>(host, std::move(server), std::move(options), clock, inbox_)) {}
Peers::~Peers() = default;
void Peers::Stop() { loop_->Stop(); }

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
  call.deadline = clock_.Now() + timeout;
  if (!inbox_->Add([&](Inbox::Content& content) { content.calls.push_back({process, std::move(call)}); }))
    call.reply(absl::CancelledError("the cluster of this process is closed"), {});
}

uint64_t Peers::answered() const { return loop_->answered(); }

void Peers::Keep(uint64_t actor, const CallerId& owner, uint64_t id, KeptRecord record) {
  inbox_->Add([&](Inbox::Content& content) {
    content.kept.push_back({actor, owner, id, std::move(record)});
  });
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
