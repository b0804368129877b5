#include "net/shm/link.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/rng.h"
#include "base/status_macros.h"

namespace gtrain::net {
namespace {

constexpr size_t kRingBytes = 256 << 10;
constexpr uint32_t kMagic = 0x4c4d5347;  // "GSML"
constexpr uint32_t kVersion = 1;
constexpr size_t kSecretMax = 128;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// The one message of whoever connects, with the descriptor of the memory.
struct Greeting {
  uint32_t magic = kMagic, version = kVersion;
  uint32_t secret_size = 0;
  std::array<char, kSecretMax> secret{};
};

// A message of recvmsg and sendmsg (recvmsg(2), cmsg(3)): a greeting, and room for one descriptor behind it.
struct GreetingMessage {
  explicit GreetingMessage(Greeting& greeting) : data{&greeting, sizeof(greeting)} {
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = control.size();
  }
  GreetingMessage(const GreetingMessage&) = delete;
  GreetingMessage& operator=(const GreetingMessage&) = delete;
  iovec data;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr header{};
};

sockaddr_un AddressOf(const std::string& name, socklen_t* size) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  GT_CHECK(name.size() + 1 < sizeof(address.sun_path));
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // a leading 0: abstract
  *size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

bool OfThisUser(int socket) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) == 0 &&
         credentials.uid == geteuid();
}

int OpenSpare() { return open("/dev/null", O_RDONLY | O_CLOEXEC); }

// Takes as long wherever the two differ.
bool SameSecret(const Greeting& greeting, const std::string& secret) {
  if (greeting.secret_size != secret.size()) return false;
  int differs = 0;
  for (size_t i = 0; i < secret.size(); ++i) differs |= greeting.secret[i] ^ secret[i];
  return differs == 0;
}

// The one that came; more of them are closed, and none is taken.
UniqueFd TakeDescriptor(const cmsghdr* header) {
  if (header == nullptr || header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) return {};
  UniqueFd taken;
  const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
  for (size_t i = 0; i < count; ++i) {
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
    taken.reset(fd);
  }
  return count == 1 ? std::move(taken) : UniqueFd();
}

}  // namespace

// Positions count bytes and never go back. `written` is the writer's, `read` the reader's.
struct ShmLink::Direction {
  alignas(64) std::atomic<uint64_t> written;
  std::atomic<uint32_t> writer_sleeps;  // until there is room
  alignas(64) std::atomic<uint64_t> read;
  std::atomic<uint32_t> reader_sleeps;  // until there is something
  alignas(64) std::array<char, kRingBytes> bytes;
};

struct alignas(4096) ShmLink::Shared {
  Direction from_listener, to_listener;
};

ShmLink::ShmLink(UniqueFd socket, void* memory, bool listener, size_t message_bytes_max)
    : socket_(std::move(socket)),
      memory_(memory),
      out_(listener ? static_cast<Shared*>(memory)->from_listener
                    : static_cast<Shared*>(memory)->to_listener),
      in_(listener ? static_cast<Shared*>(memory)->to_listener : static_cast<Shared*>(memory)->from_listener),
      message_bytes_max_(message_bytes_max) {}

ShmLink::~ShmLink() { munmap(memory_, sizeof(Shared)); }

absl::StatusOr<std::unique_ptr<ShmLink>> ShmLink::Connect(const std::string& name,
                                                          const ShmOptions& options) {
  GT_CHECK(!options.secret.empty() && options.secret.size() <= kSecretMax);
  if (name.empty() || name.size() > 64) return absl::InvalidArgumentError("no name of a listener");
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) return absl::UnavailableError(absl::StrCat("socket: ", std::strerror(errno)));
  socklen_t size = 0;
  const sockaddr_un address = AddressOf(name, &size);
  if (connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0) {
    const std::string why = absl::StrCat("connect: ", std::strerror(errno));
    return errno == EAGAIN ? absl::ResourceExhaustedError(why) : absl::UnavailableError(why);
  }
  if (!OfThisUser(socket.get()))
    return absl::PermissionDeniedError("a process of another user listens there");

  const UniqueFd memory(memfd_create("gtrain-link", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.valid() || ftruncate(memory.get(), sizeof(Shared)) != 0 ||
      fcntl(memory.get(), F_ADD_SEALS, kSeals) != 0)
    return absl::UnavailableError(absl::StrCat("shared memory: ", std::strerror(errno)));
  void* const mapped = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
  if (mapped == MAP_FAILED) return absl::UnavailableError(absl::StrCat("mmap: ", std::strerror(errno)));
  std::unique_ptr<ShmLink> link(new ShmLink(std::move(socket), mapped, false, options.message_bytes_max));

  Greeting greeting;
  greeting.secret_size = static_cast<uint32_t>(options.secret.size());
  std::copy(options.secret.begin(), options.secret.end(), greeting.secret.begin());
  GreetingMessage message(greeting);
  cmsghdr* const header = CMSG_FIRSTHDR(&message.header);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  const int fd = memory.get();
  std::memcpy(CMSG_DATA(header), &fd, sizeof(fd));
  if (sendmsg(link->fd(), &message.header, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof(greeting)))
    return absl::UnavailableError(absl::StrCat("sendmsg: ", std::strerror(errno)));
  return link;
}

// ---- bytes

size_t ShmLink::Write(absl::string_view bytes) {
  const uint64_t read = out_.read.load(std::memory_order_acquire);
  if (read > written_ || written_ - read > kRingBytes) return Lose(), 0;
  const size_t count = std::min(bytes.size(), static_cast<size_t>(kRingBytes - (written_ - read)));
  if (count == 0) return 0;
  const size_t at = written_ % kRingBytes, first = std::min(count, kRingBytes - at);
  std::memcpy(out_.bytes.data() + at, bytes.data(), first);
  std::memcpy(out_.bytes.data(), bytes.data() + first, count - first);
  written_ += count;
  return count;
}

size_t ShmLink::Available() {
  const uint64_t written = in_.written.load(std::memory_order_acquire);
  if (written < read_ || written - read_ > kRingBytes) return Lose(), 0;
  return static_cast<size_t>(written - read_);
}

void ShmLink::Read(char* to, size_t size) {
  const size_t at = read_ % kRingBytes, first = std::min(size, kRingBytes - at);
  std::memcpy(to, in_.bytes.data() + at, first);
  std::memcpy(to + first, in_.bytes.data(), size - first);
  read_ += size;
}

void ShmLink::Ring() {
  const char bell = 0;
  // One that is full rings already; one that is closed is seen by OnReadable.
  (void)!send(socket_.get(), &bell, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
}

absl::Status ShmLink::Send(absl::string_view message) {
  if (message.empty() || message.size() > message_bytes_max_)
    return absl::InvalidArgumentError(absl::StrCat("a message of ", message.size(), " bytes"));
  if (Flush()) return absl::ResourceExhaustedError("a message is still going out");
  if (lost_) return absl::UnavailableError("the connection is lost");
  const auto length = static_cast<uint32_t>(message.size());
  std::array<char, sizeof(length)> prefix;
  std::memcpy(prefix.data(), &length, sizeof(length));
  const uint64_t read = out_.read.load(std::memory_order_acquire);
  if (read <= written_ && written_ - read + sizeof(length) + message.size() <= kRingBytes) {
    Write({prefix.data(), prefix.size()});
    Write(message);
  } else {
    unsent_.assign(prefix.data(), prefix.size());
    unsent_.append(message.data(), message.size());
    unsent_from_ = 0;
    Flush();
    return lost_ ? absl::UnavailableError("the connection is lost") : absl::OkStatus();
  }
  Publish();
  return absl::OkStatus();
}

// The reader arms, then looks once more; this has written, and looks now whether it has armed. That one of
// the two sees the other takes sequential consistency of all four (Dekker); no fences, which ThreadSanitizer
// does not know.
void ShmLink::Publish() {
  out_.written.store(written_);
  if (out_.reader_sleeps.load() != 0 && out_.reader_sleeps.exchange(0) != 0) Ring();
}

bool ShmLink::Flush() {
  while (!unsent_.empty() && !lost_) {
    const size_t count = Write(absl::string_view(unsent_).substr(unsent_from_));
    if (lost_) return false;
    if (count > 0) Publish();
    unsent_from_ += count;
    if (unsent_from_ == unsent_.size()) {
      unsent_ = std::string();
      return false;
    }
    // Nobody may look at this connection before the reader has made room, and rings.
    out_.writer_sleeps.store(1);
    if (written_ - out_.read.load() == kRingBytes) return true;
  }
  return false;
}

std::optional<std::string> ShmLink::Receive() {
  const uint64_t before = read_;
  std::optional<std::string> whole;
  if (!has_length_ && Available() >= sizeof(length_)) {
    Read(reinterpret_cast<char*>(&length_), sizeof(length_));
    if (length_ == 0 || length_ > message_bytes_max_) return Lose(), std::nullopt;
    has_length_ = true;
    got_ = 0;
  }
  while (has_length_) {
    const size_t count = std::min(Available(), length_ - got_);
    if (count == 0) break;
    // Memory is taken for what has come, and not for what was announced.
    coming_.resize(got_ + count);
    Read(coming_.data() + got_, count);
    got_ += count;
    in_.read.store(read_, std::memory_order_release);
    if (got_ < length_) continue;
    whole = std::exchange(coming_, {});
    has_length_ = false;
  }
  if (read_ == before) return whole;
  in_.read.store(read_);
  if (in_.writer_sleeps.load() != 0 && in_.writer_sleeps.exchange(0) != 0) Ring();
  return whole;
}

bool ShmLink::HasWork() const {
  // Less than a length is nothing yet: whoever wrote that much is not done.
  return in_.written.load() - read_ >= (has_length_ ? 1 : sizeof(length_)) ||
         (!unsent_.empty() && written_ - out_.read.load() < kRingBytes);
}

bool ShmLink::Arm() {
  if (lost_) return true;
  in_.reader_sleeps.store(1);
  if (!unsent_.empty()) out_.writer_sleeps.store(1);
  return !HasWork();
}

void ShmLink::Disarm() {
  in_.reader_sleeps.store(0, std::memory_order_relaxed);
  out_.writer_sleeps.store(0, std::memory_order_relaxed);
}

void ShmLink::OnReadable() {
  std::array<char, 64> bells;
  for (;;) {
    const ssize_t count = recv(socket_.get(), bells.data(), bells.size(), MSG_DONTWAIT);
    if (count > 0) continue;
    if (count < 0 && errno == EINTR) continue;
    if (count == 0 || errno != EAGAIN) Lose();
    return;
  }
}

// ---- who listens

absl::StatusOr<std::unique_ptr<ShmListener>> ShmListener::Start(const ShmOptions& options) {
  GT_CHECK(!options.secret.empty() && options.secret.size() <= kSecretMax);
  std::unique_ptr<ShmListener> listener(new ShmListener());
  listener->options_ = options;
  Rng rng = Rng::FromSystem();
  const uint64_t high = rng.Next(), low = rng.Next();
  listener->name_ = absl::StrFormat("gtrain-%016x%016x", high, low);
  listener->socket_ = UniqueFd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  listener->epoll_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  listener->spare_ = UniqueFd(OpenSpare());
  socklen_t size = 0;
  const sockaddr_un address = AddressOf(listener->name_, &size);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = listener->socket_.get();
  if (!listener->socket_.valid() || !listener->epoll_.valid() ||
      bind(listener->socket_.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      listen(listener->socket_.get(), SOMAXCONN) != 0 ||
      epoll_ctl(listener->epoll_.get(), EPOLL_CTL_ADD, listener->socket_.get(), &event) != 0)
    return absl::UnavailableError(absl::StrCat("a Unix socket: ", std::strerror(errno)));
  return listener;
}

std::vector<std::unique_ptr<ShmLink>> ShmListener::Accept() {
  std::vector<std::unique_ptr<ShmLink>> links;
  // Whoever has spoken is heard before the next one comes, so that only silent ones are ever too many.
  const auto hear = [&](UniqueFd& socket) {
    char byte = 0;
    if (recv(socket.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && (errno == EAGAIN || errno == EINTR))
      return;
    if (auto link = Greet(std::move(socket))) links.push_back(std::move(link));
  };
  for (UniqueFd& socket : greeting_) {
    const int fd = socket.get();
    hear(socket);
    if (!socket.valid()) epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);  // it lives on in a link
  }
  std::erase_if(greeting_, [](const UniqueFd& socket) { return !socket.valid(); });
  for (;;) {
    UniqueFd socket(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid() && (errno == EMFILE || errno == ENFILE) && spare_.valid()) {
      // Whoever waits would be heard of again and again. It is sent away, and comes over the network.
      spare_.reset();
      socket.reset(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      const bool sent_away = socket.valid();
      socket.reset();
      spare_.reset(OpenSpare());
      if (!sent_away) return links;
      continue;
    }
    if (!socket.valid()) return links;
    if (!OfThisUser(socket.get())) continue;
    hear(socket);
    if (!socket.valid()) continue;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = socket.get();
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket.get(), &event) != 0) continue;
    if (static_cast<int>(greeting_.size()) >= options_.greeting_max) greeting_.pop_front();
    greeting_.push_back(std::move(socket));
  }
}

std::unique_ptr<ShmLink> ShmListener::Greet(UniqueFd socket) const {
  Greeting greeting;
  GreetingMessage message(greeting);
  const ssize_t count = recvmsg(socket.get(), &message.header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  const UniqueFd memory = TakeDescriptor(count < 0 ? nullptr : CMSG_FIRSTHDR(&message.header));
  struct stat status {};
  if (count != static_cast<ssize_t>(sizeof(greeting)) || !memory.valid() || greeting.magic != kMagic ||
      greeting.version != kVersion || !SameSecret(greeting, options_.secret) ||
      (fcntl(memory.get(), F_GET_SEALS) & kSeals) != kSeals || fstat(memory.get(), &status) != 0 ||
      status.st_size != static_cast<off_t>(sizeof(ShmLink::Shared)))
    return nullptr;
  void* const mapped =
      mmap(nullptr, sizeof(ShmLink::Shared), PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
  if (mapped == MAP_FAILED) return nullptr;
  return std::unique_ptr<ShmLink>(new ShmLink(std::move(socket), mapped, true, options_.message_bytes_max));
}

}  // namespace gtrain::net
