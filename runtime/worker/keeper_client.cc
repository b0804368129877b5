#include "runtime/worker/keeper_client.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/file.h"

namespace gtrain::worker {
namespace {

constexpr size_t kReadBytes = 64 << 10;
constexpr size_t kFdsMax = 8;

absl::Status Gone(const std::string& why) {
  return absl::UnavailableError(absl::StrCat("the connection to this rank's keeper is lost (", why,
                                             "): the job's generation on this machine is over"));
}

}  // namespace

absl::StatusOr<KeeperClient> KeeperClient::Connect(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return absl::FailedPreconditionError(absl::StrCat("GTRAIN_KEEPER_SOCKET is too long: ", path));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return ErrnoStatus(errno, "socket");
  if (connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot reach this rank's keeper at ", path, ": ", strerror(errno)));
  }
  return KeeperClient(std::move(fd));
}

void KeeperClient::Queue(uint16_t kind, const std::string& body) {
  const RankFrame frame{static_cast<uint32_t>(body.size()), kind, 0};
  out_.append(reinterpret_cast<const char*>(&frame), sizeof(frame));
  out_ += body;
}

absl::Status KeeperClient::Write() {
  while (!out_.empty()) {
    const ssize_t n = send(fd_.get(), out_.data(), out_.size(), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) break;
    if (n <= 0) return Gone(strerror(errno));
    out_.erase(0, static_cast<size_t>(n));
  }
  // One exchange and a few reports are the most that can wait; a keeper that reads nothing is not one.
  if (out_.size() > 4 * size_t{kRankFrameBytesMax}) return Gone("it reads nothing");
  return absl::OkStatus();
}

absl::Status KeeperClient::Read() {
  char buffer[kReadBytes];
  for (;;) {
    iovec part{buffer, sizeof(buffer)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kFdsMax)];
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t n = recvmsg(fd_.get(), &message, MSG_CMSG_CLOEXEC);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return Check();
    if (n < 0) return Gone(strerror(errno));
    for (cmsghdr* c = CMSG_FIRSTHDR(&message); n > 0 && c != nullptr; c = CMSG_NXTHDR(&message, c)) {
      if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
      for (size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
        fds_.emplace_back(fd);
      }
    }
    // Frames that came before the end are still read: they may say why.
    if (n == 0) return Gone("it closed");
    in_.append(buffer, static_cast<size_t>(n));
  }
}

absl::Status KeeperClient::Check() const {
  RankFrame frame;
  if (in_.size() < sizeof(frame)) return absl::OkStatus();
  std::memcpy(&frame, in_.data(), sizeof(frame));
  if (frame.bytes > kRankFrameBytesMax || frame.reserved != 0) return Gone("it sent a malformed frame");
  return absl::OkStatus();
}

bool KeeperClient::Next(KeeperFrame* out) {
  RankFrame frame;
  if (in_.size() < sizeof(frame)) return false;
  std::memcpy(&frame, in_.data(), sizeof(frame));
  if (frame.bytes > kRankFrameBytesMax || in_.size() - sizeof(frame) < frame.bytes) return false;
  out->kind = frame.kind;
  out->body = in_.substr(sizeof(frame), frame.bytes);
  in_.erase(0, sizeof(frame) + frame.bytes);
  out->fd.reset();
  const bool carries =
      frame.kind == kKeeperArena || frame.kind == kKeeperWriter || frame.kind == kKeeperChannel;
  if (carries && !fds_.empty()) {
    out->fd = std::move(fds_.front());
    fds_.pop_front();
  }
  return true;
}

}  // namespace gtrain::worker
