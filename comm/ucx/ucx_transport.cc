// Tag of a message: 32 bits of the communicator's nonce | 16 bits sender | 16 bits number of the message
// between the two. A receive accepts its exact tag only, so what an old generation or another communicator
// may still deliver to a reused address matches nothing. The number may wrap: far fewer than
// 65536 messages between two members are ever open. A notice has the upper bit of the sender set and the
// number 0: receives do not match it, a look for notices matches that of any sender. So has what a member
// says that leaves, with the number 1.
#include "comm/ucx/ucx_transport.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <map>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "base/module.h"
#include "base/status_macros.h"
#include "comm/ucx/fabric.h"
#include "comm/ucx/ucx_abi.h"

namespace gtrain::comm {
namespace {

constexpr const char kModuleName[] = "libgtrain_comm_ucx.so";
// How long to look again and again before sleeping. In between others may have the core: who is waited for
// may need it, and if it was gone for long, a sleeper gets it back sooner than one who asks.
constexpr absl::Duration kSpin = absl::Microseconds(100);
constexpr int kNapMs = 10;  // longest; the first naps are shorter
constexpr int kGraceMs = 1000;
constexpr uint64_t kNoticeTag = uint64_t{1} << 31, kNonceMask = ~uint64_t{0} << 32, kNumberMask = 0xffff;
constexpr uint64_t kGaveUpNumber = 0, kLeftNumber = 1;
constexpr size_t kMembersMax = 1 << 15;
constexpr absl::Duration kTellTime = absl::Seconds(1);
constexpr absl::Duration kTidyEvery = absl::Milliseconds(500);
// Longer than it takes the head to find a machine dead, or a link broken.
constexpr absl::Duration kVerdictPatience = absl::Seconds(30);

// ------------------------------------------------------------------ loading

// UCX catches fatal signals as soon as it is loaded; a library inside someone's program must not. The
// threads it starts inherit a mask that leaves all signals to the program's own.
class SignalsKept {
 public:
  SignalsKept() {
    for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], nullptr, &before_[i]);
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &mask_);
  }
  ~SignalsKept() {
    for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &before_[i], nullptr);
    pthread_sigmask(SIG_SETMASK, &mask_, nullptr);
  }

 private:
  static constexpr int kSignals[] = {SIGILL, SIGSEGV, SIGBUS,  SIGFPE, SIGABRT,
                                     SIGHUP, SIGINT,  SIGTERM, SIGPIPE};
  struct sigaction before_[std::size(kSignals)];
  sigset_t mask_;
};

// What UCX does in its constructors (patching the code of mmap, catching signals) only its environment can
// prevent. Not setenv(): other threads may be in getenv() now. They see either the old array or this one,
// which is never freed.
class UcxEnvironment {
 public:
  UcxEnvironment() : before_(environ) {
    static const char* const settings[] = {"UCX_MEM_EVENTS=n", "UCX_HANDLE_ERRORS=none",
                                           "UCX_LOG_LEVEL=fatal", "UCX_VFS_ENABLE=n"};
    static std::vector<char*>* const copy =
        new std::vector<char*>;  // reachable: no leak for who looks for leaks
    for (const char* setting : settings) copy->push_back(const_cast<char*>(setting));
    for (char** entry = before_; entry != nullptr && *entry != nullptr; ++entry) copy->push_back(*entry);
    copy->push_back(nullptr);
    environ = copy->data();
  }
  ~UcxEnvironment() { environ = before_; }

 private:
  char** const before_;
};

absl::StatusOr<const GtrainUcxApi*> Load() {
  SignalsKept keep;
  UcxEnvironment quiet;
  GT_ASSIGN_OR_RETURN(void* const module,
                      LoadModule(kModuleName, "GTRAIN_COMM_UCX", "ranks on several machines need"));
  GT_ASSIGN_OR_RETURN(void* const entry, ModuleEntry(module, GTRAIN_UCX_ENTRY, kModuleName));
  const GtrainUcxApi* api = reinterpret_cast<const GtrainUcxApi* (*)()>(entry)();
  if (api == nullptr || api->abi != GTRAIN_UCX_ABI || api->bytes != sizeof(GtrainUcxApi)) {
    return absl::FailedPreconditionError(absl::StrCat(kModuleName, " belongs to another version of gtrain"));
  }
  return api;
}

// Once a process; the module is never unloaded.
absl::StatusOr<const GtrainUcxApi*> Api() {
  static const auto* loaded = new absl::StatusOr<const GtrainUcxApi*>(Load());
  return *loaded;
}

// Once a process, as long as it lives: whom a peer finds there has not merely closed a communicator.
LinkTarget& Target(const std::string& address) {
  static auto* const target = new LinkTarget(address);
  return *target;
}

// ------------------------------------------------------------------ the transport

class UcxTransport final : public DataTransport {
 public:
  UcxTransport(const GtrainUcxApi* api, GtrainUcxWorker* worker, uint64_t nonce, const std::string& address,
               LinkWatch::Report report, std::vector<int> at_once)
      : api_(api),
        worker_(worker),
        nonce_((nonce ^ nonce >> 32) << 32),
        at_once_(std::move(at_once)),
        target_(Target(address)),
        links_(std::move(report)) {}
  ~UcxTransport() override { Close(kGraceMs); }

  // A line that says where the way to here can be tried, then what UCX needs.
  absl::StatusOr<std::string> Address() override {
    const void* data = nullptr;
    size_t bytes = 0;
    api_->address(worker_, &data, &bytes);
    return absl::StrCat(target_.where(), "\n", absl::string_view(static_cast<const char*>(data), bytes));
  }

  absl::Status Connect(const std::vector<std::string>& addresses, int self) override {
    addresses_.clear();
    for (size_t i = 0; i < addresses.size(); ++i) {
      const size_t line = addresses[i].find('\n');
      if (line == std::string::npos) {
        return absl::InvalidArgumentError(absl::StrCat("the address of member ", i, " is none"));
      }
      if (static_cast<int>(i) != self) links_.SetPeer(static_cast<int>(i), addresses[i].substr(0, line));
      addresses_.push_back(addresses[i].substr(line + 1));
    }
    if (addresses.size() > kMembersMax) {
      return absl::InvalidArgumentError(
          absl::StrCat(addresses.size(), " ranks on several machines are more than ", kMembersMax));
    }
    self_ = static_cast<uint64_t>(self);
    peers_.resize(addresses.size());
    absl::Status status;
    for (size_t i = 0; i < at_once_.size() && status.ok(); ++i) {
      if (at_once_[i] != self) status = Call(at_once_[i]);
    }
    if (!status.ok()) Close(0);
    return status;
  }

  absl::Status Exchange(absl::Span<const Transfer> transfers, absl::FunctionRef<void(size_t)> done,
                        const Watch& watch) override {
    if (worker_ == nullptr) return absl::FailedPreconditionError("the transport has failed before");
    transfers_ = transfers;
    unfinished_.clear();
    spent_ = 0;
    absl::Status status = PostAll(transfers, watch);
    for (size_t i = 0; i < transfers.size() && status.ok(); ++i) {
      awaited_ = transfers[i].peer;
      status = Await(tickets_[i], watch);
      if (status.ok()) done(i), ++spent_;
    }
    awaited_ = -1;
    if (status.ok()) status = Flush(watch);
    if (!status.ok()) NoteUnfinished();
    tickets_.clear();
    transfers_ = {};
    links_.Done();
    if (status.ok()) return status;
    Tell(watch.Notice(status), kGaveUpNumber);
    Close(0);
    return status;
  }

  void Fail(absl::string_view notice) override {
    Tell(notice, kGaveUpNumber);
    Close(notice.empty() ? 0 : kGraceMs);
  }

  void Leave(absl::string_view words) override {
    Tell(words, kLeftNumber);
    Close(kGraceMs);
  }

  std::vector<int> Unfinished() const override { return unfinished_; }

  absl::Status Heard() override {
    if (worker_ == nullptr) return absl::OkStatus();
    if (!heard_.empty()) return GaveUp(heard_);
    api_->progress(worker_, 0);
    int from = 0;
    const std::string words = Find(kGaveUpNumber, &from);
    return words.empty() ? absl::OkStatus() : GaveUp(heard_ = words);
  }

 private:
  enum class Greeting { kNone, kCalled, kAnswered, kDone };
  struct PeerState {
    uint16_t sent = 0;
    uint16_t received = 0;
    Greeting greeting = Greeting::kNone;
    char call = 0, answer = 0;
    void* ticket = nullptr;  // of the call, then of the answer
    absl::Status failed;     // the greeting
  };

  // Starts a greeting, which every wait moves on and Greet waits for. One of two members calls, with a
  // message of one byte, and the other answers on that connection; nothing else is sent meanwhile. For
  // UCX 1.13:
  // - When both call at once, it has to choose between two TCP connections, and on a busy machine what one
  //   of them had sent was sometimes never seen by the other.
  // - An endpoint must learn the other's identity before its first large message. It asks, and if the reply
  //   has to wait in the other process (for its half of the connection, or behind data) while the asking
  //   process dies, an assertion ends the other (openucx/ucx#8175). So the answer is the message that asks:
  //   the caller's half of the connection stands by then and is idle, so the reply leaves at once.
  absl::Status Call(int peer) {
    PeerState& state = peers_[static_cast<size_t>(peer)];
    if (state.greeting != Greeting::kNone) return absl::OkStatus();
    if (Calls(peer)) GT_RETURN_IF_ERROR(Open(peer));
    GT_ASSIGN_OR_RETURN(state.ticket, Start({peer, Calls(peer), &state.call, 1}));
    state.greeting = Greeting::kCalled;
    greeting_.push_back(peer);
    return absl::OkStatus();
  }

  bool Calls(int peer) const { return static_cast<uint64_t>(peer) > self_; }

  absl::Status Open(int peer) {
    GtrainUcxError error{};
    if (api_->connect(worker_, peer, addresses_[static_cast<size_t>(peer)].data(), &error) == 0)
      return absl::OkStatus();
    return absl::UnavailableError(absl::StrCat("connecting to member ", peer, ": ", error.text));
  }

  // Whether the greeting has ended, one way or the other.
  bool MoveOn(int peer) {
    PeerState& state = peers_[static_cast<size_t>(peer)];
    GtrainUcxError error{};
    const int done = api_->test(worker_, state.ticket, &error);
    if (done == 0) return false;
    if (done > 0 && state.greeting == Greeting::kAnswered) {
      state.greeting = Greeting::kDone;
      return true;
    }
    state.failed = done > 0 ? Answer(peer) : absl::UnavailableError(error.text);
    return !state.failed.ok();
  }

  absl::Status Answer(int peer) {
    PeerState& state = peers_[static_cast<size_t>(peer)];
    state.greeting = Greeting::kAnswered;
    if (!Calls(peer)) GT_RETURN_IF_ERROR(Open(peer));
    GT_ASSIGN_OR_RETURN(state.ticket,
                        Start({peer, !Calls(peer), &state.answer, 1}, GTRAIN_UCX_SEND_RECEIVED));
    return absl::OkStatus();
  }

  // Also of peers that are not waited for: they may wait for this one.
  void MoveGreetingsOn() {
    std::erase_if(greeting_, [this](int peer) { return MoveOn(peer); });
  }

  absl::Status Greet(int peer, const Watch& watch) {
    const PeerState& state = peers_[static_cast<size_t>(peer)];
    GT_RETURN_IF_ERROR(Until(watch, [&] { return state.greeting == Greeting::kDone || !state.failed.ok(); }));
    return state.failed.ok() ? absl::OkStatus() : AwaitVerdict(state.failed.message(), watch);
  }

  absl::Status PostAll(absl::Span<const Transfer> transfers, const Watch& watch) {
    for (const Transfer& t : transfers) {
      if (absl::Status called = Call(t.peer); !called.ok()) return AwaitVerdict(called.message(), watch);
    }
    for (const Transfer& t : transfers) {
      GT_RETURN_IF_ERROR(Greet(t.peer, watch));
      absl::StatusOr<void*> started = Start(t);
      if (!started.ok()) return AwaitVerdict(started.status().message(), watch);
      tickets_.push_back(*started);
    }
    return absl::OkStatus();
  }

  // The ticket.
  absl::StatusOr<void*> Start(const Transfer& t, GtrainUcxWay sending = GTRAIN_UCX_SEND) {
    PeerState& peer = peers_[static_cast<size_t>(t.peer)];
    const uint64_t from = t.send ? self_ : static_cast<uint64_t>(t.peer);
    const uint64_t number = t.send ? peer.sent++ : peer.received++;
    GtrainUcxError error{};
    void* ticket = api_->post(worker_, t.peer, t.send ? sending : GTRAIN_UCX_RECEIVE, t.data, t.bytes,
                              nonce_ | from << 16 | number, t.received, &error);
    if (ticket == nullptr) return absl::UnavailableError(error.text);
    return ticket;
  }

  // A send is complete when UCX has a copy. Nobody drives UCX once the collective has returned, so what it
  // holds must have left before.
  absl::Status Flush(const Watch& watch) {
    GtrainUcxError error{};
    void* ticket = api_->flush(worker_, &error);
    if (ticket == nullptr) return AwaitVerdict(error.text, watch);
    return Await(ticket, watch);
  }

  absl::Status Await(void* ticket, const Watch& watch) {
    int state = 0;
    GtrainUcxError error{};
    GT_RETURN_IF_ERROR(Until(watch, [&] { return (state = api_->test(worker_, ticket, &error)) != 0; }));
    return state > 0 ? absl::OkStatus() : AwaitVerdict(error.text, watch);
  }

  absl::Status Until(const Watch& watch, absl::FunctionRef<bool()> done) {
    Instant idle_since;
    bool idle = false, busy = false;
    for (int nap = 1;;) {
      if (!greeting_.empty()) MoveGreetingsOn();
      if (done()) return absl::OkStatus();
      const bool sleep = idle && RealClock().Now() - idle_since >= kSpin;
      // Traffic of others must not hide that time is up.
      if (sleep || std::exchange(busy, false)) {
        // What is waited for may have come with the news that its sender has left.
        const absl::Status waiting = StillWaiting(watch);
        // Looking moves messages, too; a nap behind the one that is waited for would be for nothing.
        if (done()) return absl::OkStatus();
        GT_RETURN_IF_ERROR(waiting);
      }
      if (api_->progress(worker_, sleep ? nap : 0) != 0) {
        busy = ++moves_ % 1024 == 0;
        idle = false;
        nap = 1;
      } else if (sleep) {
        nap = std::min(2 * nap, kNapMs);
      } else {
        if (!idle) idle_since = RealClock().Now();
        idle = true;
        sched_yield();
      }
    }
  }

  // Whether the member that is waited for has left. All that it sent before was there first.
  absl::Status Left(int peer) {
    int from = 0;
    for (std::string words; !(words = Find(kLeftNumber, &from)).empty();) left_.emplace(from, words);
    const auto it = left_.find(peer);
    return it == left_.end() ? absl::OkStatus() : absl::UnavailableError(it->second);
  }

  absl::Status StillWaiting(const Watch& watch, bool broken = false) {
    GT_RETURN_IF_ERROR(watch.Check());
    if (awaited_ >= 0) GT_RETURN_IF_ERROR(Left(awaited_));
    const Instant now = RealClock().Now();
    std::vector<int> peers;
    for (const Transfer& t : transfers_) peers.push_back(t.peer);
    links_.Waiting(peers, now, broken);
    if (now >= tidy_at_) {
      target_.Tidy();
      tidy_at_ = now + kTidyEvery;
    }
    return absl::OkStatus();
  }

  // A broken connection is a symptom: whoever knows the cause (the keeper that saw a rank die) revokes the
  // generation with it, a moment later. Only without such a verdict the symptom is the answer.
  absl::Status AwaitVerdict(absl::string_view symptom, const Watch& watch) {
    const Instant give_up = RealClock().Now() + kVerdictPatience;
    while (RealClock().Now() < give_up) {
      GT_RETURN_IF_ERROR(StillWaiting(watch, /*broken=*/true));
      absl::SleepFor(absl::Milliseconds(kNapMs));
    }
    return absl::UnavailableError(absl::StrCat("the connection to another machine: ", symptom));
  }

  void NoteUnfinished() {
    GtrainUcxError error{};
    for (size_t i = 0; i < transfers_.size(); ++i) {
      if (i < spent_) continue;
      // The one that was awaited is not done, and is gone if it failed.
      if (i > spent_ && i < tickets_.size() && api_->test(worker_, tickets_[i], &error) > 0) continue;
      if (std::ranges::count(unfinished_, transfers_[i].peer) == 0) unfinished_.push_back(transfers_[i].peer);
    }
  }

  // The next notice of this number that has come; "": none has.
  std::string Find(uint64_t number, int* from) {
    uint64_t tag = 0;
    size_t bytes = 0;
    if (api_->find(worker_, nonce_ | kNoticeTag | number, kNonceMask | kNoticeTag | kNumberMask, &tag,
                   &bytes) == 0) {
      return "";
    }
    *from = static_cast<int>((tag & ~(kNonceMask | kNoticeTag)) >> 16);
    return Read(tag, bytes, *from);
  }

  // A notice that has come, which UCX only has to copy. One that is longer than notices are is not taken:
  // its length is the peer's word alone.
  std::string Read(uint64_t tag, size_t bytes, int from) {
    const std::string unread = absl::StrCat("member ", from, " gave up; why did not arrive");
    if (bytes == 0 || bytes > kNoticeBytesMax) return unread;
    notice_.resize(bytes);
    GtrainUcxError error{};
    void* const ticket =
        api_->post(worker_, from, GTRAIN_UCX_RECEIVE, notice_.data(), bytes, tag, nullptr, &error);
    int state = ticket == nullptr ? -1 : 0;
    const Instant give_up = RealClock().Now() + kTellTime;
    while (state == 0 && RealClock().Now() < give_up) {
      if ((state = api_->test(worker_, ticket, &error)) == 0) api_->progress(worker_, 1);
    }
    return state > 0 ? notice_ : unread;
  }

  // Also members whose greeting is under way, because they may wait for this one.
  void Tell(absl::string_view notice, uint64_t number) {
    if (worker_ == nullptr || notice.empty() || !heard_.empty()) return;
    notice_ = std::string(notice.substr(0, kNoticeBytesMax));
    const Instant give_up = RealClock().Now() + kTellTime;
    std::vector<bool> told(peers_.size());
    GtrainUcxError error{};
    const auto tell = [&] {
      MoveGreetingsOn();
      for (size_t i = 0; i < peers_.size(); ++i) {
        if (told[i] || peers_[i].greeting != Greeting::kDone) continue;
        told[i] = true;
        (void)api_->post(worker_, static_cast<int>(i), GTRAIN_UCX_SEND, notice_.data(), notice_.size(),
                         nonce_ | kNoticeTag | self_ << 16 | number, nullptr, &error);
      }
    };
    for (tell(); !greeting_.empty() && RealClock().Now() < give_up; tell()) api_->progress(worker_, 1);
    void* const flushed = api_->flush(worker_, &error);
    while (flushed != nullptr && RealClock().Now() < give_up && api_->test(worker_, flushed, &error) == 0)
      api_->progress(worker_, 1);
  }

  void Close(int grace_ms) {
    if (worker_ != nullptr) api_->close(worker_, grace_ms);
    worker_ = nullptr;
  }

  const GtrainUcxApi* const api_;
  GtrainUcxWorker* worker_;
  const uint64_t nonce_;  // in the upper half
  std::vector<std::string> addresses_;
  uint64_t self_ = 0;
  const std::vector<int> at_once_;
  uint64_t moves_ = 0;
  std::vector<PeerState> peers_;
  std::vector<int> greeting_;  // peers in the middle of it
  std::vector<void*> tickets_;
  size_t spent_ = 0;  // of them, in their order
  int awaited_ = -1;  // the member that the running exchange waits for
  std::vector<int> unfinished_;
  std::map<int, std::string> left_;       // what members said that left
  absl::Span<const Transfer> transfers_;  // of the exchange that is running
  std::string heard_, notice_;
  LinkTarget& target_;
  LinkWatch links_;
  Instant tidy_at_;
};

}  // namespace

std::string InterfaceOf(const std::string& address) {
  in6_addr six{};
  in_addr four{};
  const bool is_four = inet_pton(AF_INET, address.c_str(), &four) == 1;
  if (!is_four && inet_pton(AF_INET6, address.c_str(), &six) != 1) return "";
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return "";
  absl::Cleanup free_all = [&] { freeifaddrs(all); };
  for (const ifaddrs* i = all; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr) continue;
    if (is_four && i->ifa_addr->sa_family == AF_INET) {
      const auto* a = reinterpret_cast<const sockaddr_in*>(i->ifa_addr);
      const bool loopback = (ntohl(four.s_addr) >> 24) == 127 && (ntohl(a->sin_addr.s_addr) >> 24) == 127;
      if (a->sin_addr.s_addr == four.s_addr || loopback) return i->ifa_name;
    }
    if (!is_four && i->ifa_addr->sa_family == AF_INET6) {
      const auto* a = reinterpret_cast<const sockaddr_in6*>(i->ifa_addr);
      if (IN6_ARE_ADDR_EQUAL(&a->sin6_addr, &six)) return i->ifa_name;
    }
  }
  return "";
}

absl::StatusOr<std::unique_ptr<DataTransport>> OpenUcxTransport(const Bootstrap& bootstrap, uint64_t nonce,
                                                                const std::string& wish,
                                                                LinkWatch::Report report,
                                                                std::vector<int> at_once) {
  GT_ASSIGN_OR_RETURN(const GtrainUcxApi* api, Api());
  const Member& me = bootstrap.members()[static_cast<size_t>(bootstrap.rank())];
  const std::string device = InterfaceOf(me.address);
  GT_ASSIGN_OR_RETURN(const Fabric fabric, ChooseFabric(wish, device, RdmaPortsOf(device)));
  SignalsKept keep;
  GtrainUcxError error{};
  GtrainUcxWorker* worker =
      api->open(fabric.transports.c_str(), fabric.devices.c_str(), fabric.every ? 1 : 0, &error);
  if (worker == nullptr && fabric.every) {
    return absl::FailedPreconditionError(absl::StrCat("GTRAIN_COMM_TLS is '", wish,
                                                      "', which cannot be used: ", error.text,
                                                      ". Unset it to use what there is"));
  }
  if (worker == nullptr) {
    return absl::UnavailableError(absl::StrCat(
        "UCX on interface ", device.empty() ? "any" : device, " (address ", me.address, "): ", error.text,
        ". The interface must be up and shown in /sys/class/net (in a network namespace made by hand: "
        "mount sysfs there)"));
  }
  return std::make_unique<UcxTransport>(api, worker, nonce, me.address, std::move(report),
                                        std::move(at_once));
}

}  // namespace gtrain::comm
