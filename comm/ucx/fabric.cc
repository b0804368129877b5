#include "comm/ucx/fabric.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "comm/ucx/network.h"
#include "comm/ucx/ucx_loader.h"

namespace gtrain::comm {
namespace {

// How long to poll before sleeping. In between others may have the core: the rank that is waited for may need
// it, and if it was gone for long, a sleeper gets it back sooner than a rank that polls.
constexpr absl::Duration kSpin = absl::Microseconds(100);
static_assert(sizeof(MessageHeader) + kPieceBytes == GTRAIN_UCX_MESSAGE_MAX);
constexpr int kNapMs = 10;  // longest; the first naps are shorter
constexpr int kHelperNapMs = 1000;
constexpr long kHelpAfterNs = 200'000;
constexpr absl::Duration kGreetingPatience = absl::Seconds(10);
constexpr int kGraceMs = 1000;
constexpr size_t kNameBytes = 16;
// Pieces of one connection that UCX has not copied yet: half a MiB, more than a socket takes at once.
constexpr size_t kFlyingMax = 8;
constexpr size_t kBuffersKept = 32;
constexpr size_t kEarlyBytesMax = 64 << 20;
constexpr size_t kClosedMax = 1 << 16;

// Once a process, as long as it lives: whom a peer finds there has not merely closed a communicator.
LinkTarget& Target(const std::string& address) {
  static auto* const target = new LinkTarget(address);
  return *target;
}

std::string RandomName() {
  Rng rng = Rng::FromSystem();
  const uint64_t words[] = {rng.Next(), rng.Next()};
  static_assert(sizeof(words) == kNameBytes);
  return std::string(reinterpret_cast<const char*>(words), sizeof(words));
}

}  // namespace

class Fabric::Peer {
 public:
  enum class State {
    kKnown,
    kWanted,  // the other calls
    kCalled,  // it has not answered yet
    kUp,
    kLost,
  };
  struct Piece {
    std::unique_ptr<char[]> memory;
    size_t bytes = 0;
    std::shared_ptr<Sending> of;
    GtrainUcxTicket* ticket = nullptr;
  };

  Peer(std::string name, std::string address) : name(std::move(name)), address(std::move(address)) {}

  const std::string name, address;  // address: UCX's
  State state = State::kKnown;
  GtrainUcxEndpoint* endpoint = nullptr;
  std::string failure;
  int contexts = 0;
  Instant wanted_at;
  bool called_here = false;  // its call has come and was not answered
  bool active = false;
  std::deque<Piece> queue, flying;
  std::deque<std::shared_ptr<Sending>> streams;
};

// ------------------------------------------------------------------ the process

Fabric::Fabric(const GtrainUcxApi* api, const std::string& address, std::string wish)
    : api_(api),
      wish_(std::move(wish)),
      target_(Target(address)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      help_(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC)),
      name_(RandomName()) {}

absl::StatusOr<std::shared_ptr<Fabric>> Fabric::Open(const std::string& address, const std::string& wish) {
  GT_ASSIGN_OR_RETURN(const GtrainUcxApi* api, UcxApi());
  const std::string device = InterfaceOf(address);
  GT_ASSIGN_OR_RETURN(const Network network, ChooseNetwork(wish, device, RdmaPortsOf(device)));
  std::shared_ptr<Fabric> fabric(new Fabric(api, address, wish));
  if (!fabric->wake_.valid() || !fabric->help_.valid())
    return absl::ResourceExhaustedError("no descriptor is left for a connection");
  // Opening sets global settings of UCX, whose text two threads at once would free twice.
  static Mutex one_at_a_time;
  const MutexLock lock(&one_at_a_time);
  SignalsKept keep;
  GtrainUcxError error{};
  fabric->worker_ = api->open(network.transports.c_str(), network.devices.c_str(), network.every ? 1 : 0,
                              &Fabric::Heard, fabric.get(), &error);
  if (fabric->worker_ == nullptr && network.every) {
    return absl::FailedPreconditionError(absl::StrCat("GTRAIN_COMM_TLS is '", wish,
                                                      "', which cannot be used: ", error.text,
                                                      ". Unset it to use what there is"));
  }
  if (fabric->worker_ == nullptr) {
    return absl::UnavailableError(absl::StrCat(
        "UCX on interface ", device.empty() ? "any" : device, " (address ", address, "): ", error.text,
        ". The interface must be up and shown in /sys/class/net (in a network namespace made by hand: "
        "mount sysfs there)"));
  }
  const void* data = nullptr;
  size_t bytes = 0;
  api->address(fabric->worker_, &data, &bytes);
  fabric->address_ = absl::StrCat(fabric->target_.where(), "\n", fabric->name_,
                                  absl::string_view(static_cast<const char*>(data), bytes));
  fabric->helper_ = std::thread([raw = fabric.get()] { raw->Help(); });  // with the signals' mask of `keep`
  return fabric;
}

Fabric::~Fabric() {
  // A forked child must not speak on its parent's connections, not even to close them.
  if (worker_ == nullptr || fork_guard_.Forked()) {
    if (helper_.joinable()) helper_.detach();
    return;
  }
  {
    MutexLock lock(&mutex_);
    ending_ = true;
    Wake();
    AskForHelp();
  }
  helper_.join();
  MutexLock lock(&mutex_);
  const Instant give_up = RealClock().Now() + absl::Milliseconds(kGraceMs);
  const absl::Status left =
      Until([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(
                mutex_) { return std::ranges::none_of(active_, &Fabric::Up) && AllLeft(); },
            [&] { return RealClock().Now() < give_up ? absl::OkStatus() : absl::DeadlineExceededError(""); });
  api_->close(worker_, left.ok() ? kGraceMs : 0);
}

void Fabric::Lock::Again() {
  ++fabric_->knocks_;
  fabric_->mutex_.Lock();
  --fabric_->knocks_;
  held_ = true;
}

void Fabric::Lock::Release() {
  held_ = false;
  fabric_->mutex_.Unlock();
}

// ------------------------------------------------------------------ who is there

absl::StatusOr<Fabric::Peer*> Fabric::Reach(const std::string& address) {
  const size_t line = address.find('\n');
  if (line == std::string::npos || address.size() <= line + 1 + kNameBytes)
    return absl::InvalidArgumentError("the address of a member is none");
  const std::string name = address.substr(line + 1, kNameBytes);
  std::unique_ptr<Peer>& peer = peers_[name];
  if (peer != nullptr && peer->contexts == 0 && Forgettable(peer.get())) {
    std::erase(active_, peer.get());
    peer = nullptr;
  }
  if (peer == nullptr) peer = std::make_unique<Peer>(name, address.substr(line + 1 + kNameBytes));
  ++peer->contexts;
  return peer.get();
}

// One that is lost, and of which UCX holds nothing.
bool Fabric::Forgettable(Peer* peer) {
  if (!Failed(peer)) return false;
  Lose(peer, Failure(peer));
  return peer->flying.empty();
}

void Fabric::Drop(Peer* peer) {
  if (--peer->contexts > 0 || !Forgettable(peer)) return;
  std::erase(active_, peer);
  peers_.erase(peer->name);
}

void Fabric::Add(ContextId id, Context* context) {
  contexts_[id] = context;
  std::deque<std::pair<ContextId, std::string>> kept = std::exchange(early_, {});
  early_bytes_ = 0;
  for (auto& [of, message] : kept) {
    if (of == id) {
      Take(message);
    } else if (of.generation >= id.generation) {  // what was said before nobody will ask for
      KeepEarly(of, message);
    }
  }
}

void Fabric::Remove(ContextId id) {
  if (contexts_.erase(id) == 0 || !closed_.insert(id).second) return;
  closed_order_.push_back(id);
  if (closed_order_.size() <= kClosedMax) return;
  closed_.erase(closed_order_.front());
  closed_order_.pop_front();
}

bool Fabric::Up(const Peer* peer) { return peer->state == Peer::State::kUp; }

bool Fabric::Unsent(const Peer* peer) const {
  return !Failed(peer) && !(peer->queue.empty() && peer->streams.empty() && peer->flying.empty());
}

bool Fabric::Greeting(const Peer* peer) {
  return peer->state == Peer::State::kWanted || peer->state == Peer::State::kCalled;
}

bool Fabric::Failed(const Peer* peer) const {
  return peer->state == Peer::State::kLost ||
         (peer->endpoint != nullptr && api_->failed(peer->endpoint) != nullptr);
}

std::string Fabric::Failure(const Peer* peer) {
  return peer->failure.empty() ? "the connection is broken" : peer->failure;
}

void Fabric::Lose(Peer* peer, absl::string_view why) {
  if (peer->state == Peer::State::kLost) return;
  peer->state = Peer::State::kLost;
  peer->failure = std::string(why);
  if (peer->endpoint != nullptr) api_->drop(worker_, std::exchange(peer->endpoint, nullptr));
  peer->queue.clear();
  peer->streams.clear();
}

// ------------------------------------------------------------------ greetings

bool Fabric::Connect(Peer* peer) {
  if (peer->endpoint != nullptr) return true;
  GtrainUcxError error{};
  peer->endpoint = api_->connect(worker_, peer->address.data(), &error);
  if (peer->endpoint == nullptr) Lose(peer, error.text);
  return peer->endpoint != nullptr;
}

void Fabric::Greet(Peer* peer, MessageKind kind) {
  if (!Connect(peer)) return;
  MessageHeader header;
  header.kind = kind;
  std::unique_ptr<char[]> piece = Buffer();
  std::memcpy(piece.get(), &header, sizeof(header));
  std::memcpy(piece.get() + sizeof(header), address_.data(), address_.size());
  Give(peer, std::move(piece), sizeof(header) + address_.size(), nullptr);
}

void Fabric::Want(Peer* peer) {
  if (peer->state != Peer::State::kKnown) return;
  peer->wanted_at = RealClock().Now();
  if (name_ > peer->name) {
    peer->state = Peer::State::kWanted;
    return;
  }
  peer->state = Peer::State::kCalled;
  Greet(peer, MessageKind::kCall);
}

void Fabric::TakeGreeting(const MessageHeader& header, absl::string_view address) {
  const auto reached = Reach(std::string(address));
  if (!reached.ok()) return;
  Peer* const peer = *reached;
  --peer->contexts;  // Reach counts who wants it
  if (header.kind == MessageKind::kCall) {
    peer->called_here = true;
  } else if (peer->state == Peer::State::kCalled) {
    peer->state = Peer::State::kUp;
  }
  Activate(peer);
}

// ------------------------------------------------------------------ messages

void Fabric::Heard(void* fabric, const void* data, size_t bytes) {
  static_cast<Fabric*>(fabric)->Take(absl::string_view(static_cast<const char*>(data), bytes));
}

void Fabric::Take(absl::string_view message) {
  MessageHeader header;
  if (message.size() < sizeof(header)) return;
  std::memcpy(&header, message.data(), sizeof(header));
  if (header.magic != kMessageMagic) return;
  const absl::string_view bytes = message.substr(sizeof(header));
  if (header.kind == MessageKind::kCall || header.kind == MessageKind::kAnswer)
    return TakeGreeting(header, bytes);
  const ContextId id{header.generation, header.context};
  const auto it = contexts_.find(id);
  if (it != contexts_.end()) {
    it->second->Hear(header, bytes);
  } else if (!closed_.contains(id)) {
    KeepEarly(id, message);
  }
}

// The oldest message is dropped where there is no room: a member that misses it has its own deadline.
void Fabric::KeepEarly(ContextId id, absl::string_view message) {
  early_bytes_ += message.size();
  early_.emplace_back(id, std::string(message));
  while (early_bytes_ > kEarlyBytesMax) {
    early_bytes_ -= early_.front().second.size();
    early_.pop_front();
  }
}

std::unique_ptr<char[]> Fabric::Buffer() {
  if (buffers_.empty()) return std::unique_ptr<char[]>(new char[GTRAIN_UCX_MESSAGE_MAX]);
  std::unique_ptr<char[]> buffer = std::move(buffers_.back());
  buffers_.pop_back();
  return buffer;
}

void Fabric::Recycle(std::unique_ptr<char[]> buffer) {
  if (buffers_.size() < kBuffersKept) buffers_.push_back(std::move(buffer));
}

void Fabric::Activate(Peer* peer) {
  if (!peer->active) active_.push_back(peer);
  peer->active = true;
  Wake();
}

void Fabric::Post(Peer* peer, const MessageHeader& header, absl::string_view bytes,
                  std::shared_ptr<Sending> of) {
  if (Failed(peer)) return;
  std::unique_ptr<char[]> piece = Buffer();
  std::memcpy(piece.get(), &header, sizeof(header));
  if (!bytes.empty()) std::memcpy(piece.get() + sizeof(header), bytes.data(), bytes.size());
  if (of != nullptr) {
    of->given += bytes.size();
    ++of->open;
  }
  const size_t size = sizeof(header) + bytes.size();
  if (!stepping_ && Up(peer) && peer->queue.empty() && peer->flying.size() < kFlyingMax) {
    Give(peer, std::move(piece), size, std::move(of));
    return;
  }
  peer->queue.push_back({std::move(piece), size, std::move(of), nullptr});
  Activate(peer);
}

void Fabric::Stream(Peer* peer, std::shared_ptr<Sending> message) {
  if (Failed(peer)) return;
  peer->streams.push_back(std::move(message));
  if (!stepping_) (void)Pump(peer);
  Activate(peer);
}

void Fabric::Give(Peer* peer, std::unique_ptr<char[]> memory, size_t bytes, std::shared_ptr<Sending> of) {
  GtrainUcxTicket* ticket = nullptr;
  GtrainUcxError error{};
  ++given_;
  const int sent = api_->send(worker_, peer->endpoint, memory.get(), bytes, &ticket, &error);
  if (sent == 0) {
    peer->flying.push_back({std::move(memory), bytes, std::move(of), ticket});
    Activate(peer);
    return;
  }
  Recycle(std::move(memory));
  if (sent < 0) return Lose(peer, error.text);
  if (of != nullptr) --of->open;
}

// Whether anything has left.
bool Fabric::TakeLeft(Peer* peer) {
  bool any = false;
  GtrainUcxError error{};
  while (!peer->flying.empty()) {
    Peer::Piece& first = peer->flying.front();
    const int sent = api_->test(worker_, first.ticket, &error);
    if (sent == 0) break;
    if (first.of != nullptr) --first.of->open;
    Recycle(std::move(first.memory));
    peer->flying.pop_front();
    any = true;
    if (sent < 0) Lose(peer, error.text);
  }
  return any;
}

// Gives UCX the next piece that waits. False: none does.
bool Fabric::GiveNext(Peer* peer) {
  if (!peer->queue.empty()) {
    Peer::Piece piece = std::move(peer->queue.front());
    peer->queue.pop_front();
    Give(peer, std::move(piece.memory), piece.bytes, std::move(piece.of));
    return true;
  }
  while (!peer->streams.empty()) {
    const std::shared_ptr<Sending> message = peer->streams.front();
    const uint64_t left = message->header.total - message->given;
    const size_t bytes = message->revoked ? 0 : std::min<uint64_t>(left, kPieceBytes);
    if (bytes == left || bytes == 0) peer->streams.pop_front();
    if (bytes == 0) continue;
    message->header.offset = message->given;
    std::unique_ptr<char[]> piece = Buffer();
    std::memcpy(piece.get(), &message->header, sizeof(MessageHeader));
    std::memcpy(piece.get() + sizeof(MessageHeader), message->data + message->given, bytes);
    message->given += bytes;
    ++message->open;
    Give(peer, std::move(piece), sizeof(MessageHeader) + bytes, message);
    return true;
  }
  return false;
}

// Whether anything moved.
bool Fabric::Pump(Peer* peer) {
  bool moved = TakeLeft(peer);
  // A process that died before it called keeps nobody busy for ever.
  if (Greeting(peer) && peer->contexts == 0 && RealClock().Now() - peer->wanted_at > kGreetingPatience)
    Lose(peer, "it does not answer");
  if (peer->endpoint != nullptr) {
    if (const char* why = api_->failed(peer->endpoint); why != nullptr) Lose(peer, why);
  }
  if (std::exchange(peer->called_here, false) && peer->state != Peer::State::kLost) {
    // One that was up has lost the connection there, which nobody has noticed here yet.
    if (Up(peer)) api_->drop(worker_, std::exchange(peer->endpoint, nullptr));
    Greet(peer, MessageKind::kAnswer);
    if (peer->state != Peer::State::kLost) peer->state = Peer::State::kUp;
    moved = true;
  }
  while (Up(peer) && peer->flying.size() < kFlyingMax && GiveNext(peer)) moved = true;
  return moved;
}

bool Fabric::AllLeft() {
  GtrainUcxError error{};
  if (flush_ != nullptr) {
    if (api_->test(worker_, flush_, &error) == 0) return false;
    flush_ = nullptr;
    left_ = flushing_;
  }
  if (left_ == given_) return true;
  flushing_ = given_;
  if (api_->flush(worker_, &flush_, &error) == 0) return false;
  left_ = flushing_;
  return true;
}

void Fabric::KeepMoving(int change) {
  keep_moving_ += change;
  if (keep_moving_ > 0) AskForHelp();
}

void Fabric::LetLeave() {
  if (keep_moving_ > 0 || !active_.empty() || !AllLeft()) AskForHelp();
}

// ------------------------------------------------------------------ waiting

int Fabric::Step() {
  stepping_ = true;
  int moved = api_->progress(worker_);
  stepping_ = false;
  for (size_t i = 0; i < active_.size();) {
    Peer* const peer = active_[i];
    moved += Pump(peer) ? 1 : 0;
    if (peer->queue.empty() && peer->flying.empty() && peer->streams.empty()) {
      peer->active = false;
      active_[i] = active_.back();
      active_.pop_back();
    } else {
      ++i;
    }
  }
  if (flush_ != nullptr) (void)AllLeft();
  return moved;
}

bool Fabric::Pending() const { return keep_moving_ > 0 || !active_.empty() || left_ != given_; }

// Help is not asked for at once: a program that sends and then receives is back in a moment, and a thread
// that wakes up for nothing costs it more than all the rest.
void Fabric::AskForHelp() {
  if ((driving_ || help_due_) && !ending_) return;
  help_due_ = true;
  const itimerspec when{{0, 0}, {0, ending_ ? 1 : kHelpAfterNs}};
  timerfd_settime(help_.get(), 0, &when, nullptr);
}

// The fabric's own thread.
void Fabric::Help() {
  for (;;) {
    uint64_t times = 0;
    (void)!read(help_.get(), &times, sizeof(times));
    Lock lock(this);
    help_due_ = false;
    if (ending_) return;
    if (driving_) continue;  // whoever drives asks again where something is left
    driving_ = helping_ = true;
    (void)Drive([this]()
                    ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ending_ || followers_ > 0 || !Pending(); },
                [] { return absl::OkStatus(); }, kHelperNapMs);
    driving_ = helping_ = false;
    if (ending_) return;
  }
}

void Fabric::Look() {
  if (!driving_) (void)Step();
}

void Fabric::Wake() {
  if (sleeping_) Interrupt();
}

void Fabric::Interrupt() {
  const uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof(one));
}

void Fabric::Sleep(int milliseconds) {
  if (api_->arm(worker_) == 0) return;  // something came in between
  pollfd fds[] = {{api_->descriptor(worker_), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
  sleeping_ = true;
  ++naps_;
  mutex_.Unlock();
  poll(fds, std::size(fds), milliseconds);
  mutex_.Lock();
  sleeping_ = false;
  uint64_t woken = 0;
  (void)!read(wake_.get(), &woken, sizeof(woken));
}

void Fabric::MakeRoom() {
  if (followers_ == 0 && knocks_.load(std::memory_order_relaxed) == 0) return;
  mutex_.Unlock();
  sched_yield();
  mutex_.Lock();
}

// Asks without the lock, which is held again also where `check` throws.
absl::Status Fabric::Ask(absl::FunctionRef<absl::Status()> check) {
  mutex_.Unlock();
  const absl::Cleanup again = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { mutex_.Lock(); };
  return check();
}

absl::Status Fabric::Drive(absl::FunctionRef<bool()> done, absl::FunctionRef<absl::Status()> check,
                           int nap_ms) {
  Instant idle_since;
  bool idle = false, busy = false;
  uint64_t moves = 0;
  for (int nap = 1;;) {
    if (done()) return absl::OkStatus();
    const bool sleep = idle && RealClock().Now() - idle_since >= kSpin;
    bool moved = false;
    // Traffic of others must not hide that time is up.
    if (sleep || std::exchange(busy, false)) {
      const absl::Status waiting = Ask(check);
      // The awaited message may have come with the news that its sender has left.
      moved = Step() != 0;
      if (done()) return absl::OkStatus();
      GT_RETURN_IF_ERROR(waiting);
    }
    // A message that has just come may be what `check` asks about: no sleep before it was asked again.
    if (moved || Step() != 0) {
      busy = ++moves % 1024 == 0;
      idle = false;
      nap = 1;
      MakeRoom();
    } else if (sleep) {
      Sleep(nap);
      nap = std::min(2 * nap, nap_ms);
    } else {
      if (!idle) idle_since = RealClock().Now();
      idle = true;
      MakeRoom();
      sched_yield();
    }
  }
}

absl::Status Fabric::Until(absl::FunctionRef<bool()> done, absl::FunctionRef<absl::Status()> check) {
  for (;;) {
    if (done()) return absl::OkStatus();
    if (!driving_) {
      driving_ = true;
      const absl::Cleanup over = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { driving_ = false; };
      return Drive(done, check, kNapMs);
    }
    ++followers_;
    if (helping_) Wake();  // it gives way
    mutex_.AwaitFor(absl::Milliseconds(kNapMs),
                    [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !driving_ || done(); });
    --followers_;
    if (done()) return absl::OkStatus();
    if (!driving_) continue;
    const absl::Status waiting = Ask(check);
    if (done()) return absl::OkStatus();
    GT_RETURN_IF_ERROR(waiting);
  }
}

// ------------------------------------------------------------------ the interface

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

}  // namespace gtrain::comm
