#include "comm/ucx/link_probe.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace gtrain::comm {
namespace {

constexpr size_t kProbeBytes = 64 << 10;
constexpr int kTargetBufferBytes = 1 << 20;  // a probe fits without anybody reading it
constexpr int kBacklog = 1024;
constexpr size_t kOpenMax = 64;  // connections a target keeps
constexpr absl::Duration kDoubtAfter = absl::Seconds(5);
constexpr absl::Duration kTryAgain = absl::Seconds(5);
constexpr absl::Duration kPatience = absl::Seconds(8);    // without any acknowledgement
constexpr absl::Duration kConnectFor = absl::Seconds(1);  // then with a new connection
constexpr size_t kProbesMax = 16;                         // of one wait at a time

struct Address {
  sockaddr_storage storage{};
  socklen_t bytes = 0;
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};

std::optional<Address> ParseAddress(const std::string& ip, uint16_t port) {
  Address address;
  auto* four = reinterpret_cast<sockaddr_in*>(&address.storage);
  auto* six = reinterpret_cast<sockaddr_in6*>(&address.storage);
  if (inet_pton(AF_INET, ip.c_str(), &four->sin_addr) == 1) {
    four->sin_family = AF_INET;
    four->sin_port = htons(port);
    address.bytes = sizeof(sockaddr_in);
  } else if (inet_pton(AF_INET6, ip.c_str(), &six->sin6_addr) == 1) {
    six->sin6_family = AF_INET6;
    six->sin6_port = htons(port);
    address.bytes = sizeof(sockaddr_in6);
  } else {
    return std::nullopt;
  }
  return address;
}

std::optional<Address> ParseWhere(const std::string& where) {
  const std::vector<std::string> words = absl::StrSplit(where, ' ');
  uint32_t port = 0;
  if (words.size() != 2 || !absl::SimpleAtoi(words[1], &port) || port == 0 || port > 65535)
    return std::nullopt;
  return ParseAddress(words[0], static_cast<uint16_t>(port));
}

}  // namespace

// ------------------------------------------------------------------ the target

LinkTarget::LinkTarget(const std::string& address) {
  std::optional<Address> bound = ParseAddress(address, 0);
  if (!bound) return;
  UniqueFd fd(socket(bound->storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return;
  setsockopt(fd.get(), SOL_SOCKET, SO_RCVBUF, &kTargetBufferBytes, sizeof(kTargetBufferBytes));
  if (bind(fd.get(), bound->get(), bound->bytes) != 0 || listen(fd.get(), kBacklog) != 0 ||
      getsockname(fd.get(), bound->get(), &bound->bytes) != 0) {
    return;
  }
  const uint16_t port = bound->storage.ss_family == AF_INET
                            ? reinterpret_cast<sockaddr_in*>(&bound->storage)->sin_port
                            : reinterpret_cast<sockaddr_in6*>(&bound->storage)->sin6_port;
  where_ = absl::StrCat(address, " ", ntohs(port));
  listener_ = std::move(fd);
}

void LinkTarget::Tidy() {
  if (!listener_.valid()) return;
  MutexLock lock(&mutex_);
  for (;;) {
    UniqueFd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd.valid()) break;
    open_.push_back(std::move(fd));
    if (open_.size() > kOpenMax) open_.erase(open_.begin());
  }
  std::erase_if(open_, [](const UniqueFd& fd) {
    const ssize_t got = recv(fd.get(), nullptr, kProbeBytes, MSG_TRUNC | MSG_DONTWAIT);  // and throws it away
    return got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
  });
}

// ------------------------------------------------------------------ one try

LinkProbe::LinkProbe(std::string where, Instant now) : where_(std::move(where)), deadline_(now + kPatience) {
  Begin(now);
}

void LinkProbe::Begin(Instant now) {
  begun_at_ = now;
  connected_ = false;
  sent_ = acknowledged_ = 0;
  std::optional<Address> to = ParseWhere(where_);
  if (!to) return Drop(EADDRNOTAVAIL);
  fd_ = UniqueFd(socket(to->storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd_.valid()) return Drop(errno);
  if (connect(fd_.get(), to->get(), to->bytes) != 0 && errno != EINPROGRESS) Drop(errno);
}

void LinkProbe::Drop(int error) {
  fd_ = UniqueFd();
  connected_ = false;
  refusal_ = std::strerror(error);
}

bool LinkProbe::Connected() {
  if (connected_ || !fd_.valid()) return connected_;
  int error = 0;
  socklen_t bytes = sizeof(error);
  getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &error, &bytes);
  if (error != 0) {
    Drop(error);
    return false;
  }
  Address peer;
  peer.bytes = sizeof(peer.storage);
  connected_ = getpeername(fd_.get(), peer.get(), &peer.bytes) == 0;  // not before the other has answered
  return connected_;
}

void LinkProbe::Send() {
  static const char zeros[4096] = {};
  while (sent_ < kProbeBytes) {
    const ssize_t took = send(fd_.get(), zeros, sizeof(zeros), MSG_NOSIGNAL);
    if (took < 0 && errno != EAGAIN && errno != EINTR) return Drop(errno);
    if (took <= 0) return;
    sent_ += static_cast<size_t>(took);
  }
}

std::optional<std::string> LinkProbe::Look(Instant now) {
  if (Connected()) Send();
  if (connected_) {
    int waiting = 0;
    ioctl(fd_.get(), SIOCOUTQ, &waiting);  // sent or to be sent, and not acknowledged
    const size_t acknowledged = sent_ - std::min(sent_, static_cast<size_t>(std::max(waiting, 0)));
    if (acknowledged >= kProbeBytes) return "";
    if (acknowledged > acknowledged_) deadline_ = now + kPatience;
    acknowledged_ = std::max(acknowledged_, acknowledged);
  }
  if (now < deadline_) {
    if (!connected_ && now - begun_at_ >= kConnectFor) Begin(now);
    return std::nullopt;
  }
  const std::string seconds = absl::FormatDuration(kPatience);
  if (connected_) {
    return absl::StrCat("connections are made, but of ", kProbeBytes, " bytes ", acknowledged_,
                        " arrived in ", seconds,
                        ": packets of some size are lost on the way; is the MTU the same everywhere?");
  }
  if (!refusal_.empty()) return absl::StrCat("no connection in ", seconds, " (", refusal_, ")");
  return absl::StrCat("no answer to a connection in ", seconds);
}

// ------------------------------------------------------------------ all of a wait

void LinkWatch::Waiting(const std::vector<int>& peers, Instant now, bool broken) {
  if (!try_at_) try_at_ = broken ? now : now + kDoubtAfter;
  if (probes_.empty() && now >= *try_at_) {
    for (const int peer : peers) {
      const auto it = where_.find(peer);
      if (it == where_.end() || it->second.empty() || probes_.size() >= kProbesMax) continue;
      probes_.try_emplace(peer, it->second, now);
    }
    try_at_ = now + kTryAgain;
  }
  for (auto it = probes_.begin(); it != probes_.end();) {
    const std::optional<std::string> came = it->second.Look(now);
    if (came && !came->empty()) report_(it->first, *came);
    it = came ? probes_.erase(it) : std::next(it);
  }
  if (!probes_.empty()) try_at_ = now + kTryAgain;
}

void LinkWatch::Done() {
  if (!try_at_) return;
  try_at_.reset();
  probes_.clear();
}

}  // namespace gtrain::comm
