#include "runtime/keeper/connections.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

#include "runtime/keeper/agent_protocol.h"
#include "runtime/keeper/rank_protocol.h"

namespace gtrain::keeper {

namespace {

constexpr size_t kConnectionsMax =
    kRanksMax + 256;  // some may be about to close, or have not said whose they are
constexpr size_t kRankOutMax = 64u << 20;
constexpr int64_t kHelloMs = 10000;

// Sends what the socket takes, and marks the connection broken if nobody is there to take it.
void WriteSome(RankConnection& connection) {
  while (!connection.broken && !connection.out.empty()) {
    RankConnection::Chunk& chunk = connection.out.front();
    iovec part = {chunk.bytes.data(), chunk.bytes.size()};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (chunk.pass_fd >= 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof(control);
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      memcpy(CMSG_DATA(header), &chunk.pass_fd, sizeof(int));
    }
    ssize_t n = sendmsg(connection.fd.get(), &message, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
      connection.broken = true;
      return;
    }
    chunk.pass_fd = -1;
    connection.out_bytes -= static_cast<size_t>(n);
    chunk.bytes.erase(0, static_cast<size_t>(n));
    if (chunk.bytes.empty()) connection.out.pop_front();
  }
}

}  // namespace

void RankConnection::Send(uint16_t kind, const std::string& body, int pass_fd, UniqueFd keep) {
  if (broken) return;
  const RankFrame frame{static_cast<uint32_t>(body.size()), kind, 0};
  Chunk chunk;
  chunk.bytes.assign(reinterpret_cast<const char*>(&frame), sizeof(frame));
  chunk.bytes += body;
  chunk.pass_fd = pass_fd;
  chunk.keep = std::move(keep);
  out_bytes += chunk.bytes.size();
  out.push_back(std::move(chunk));
  if (out_bytes > kRankOutMax) broken = true;  // it never reads
}

void Connections::Accept() {
  while (true) {
    UniqueFd fd(accept4(listen_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd.valid()) return;
    ucred peer;
    socklen_t size = sizeof(peer);
    const bool same =
        getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
    if (!same || all_.size() >= kConnectionsMax) continue;
    auto connection = std::make_unique<RankConnection>(std::move(fd), &set_);
    if (!set_.Add(connection->fd.get(), connection.get())) continue;
    connection->opened_ms = context_.now_ms;
    ReadProcess(peer.pid, &connection->peer);  // 0 where it cannot be seen
    all_.push_back(std::move(connection));
  }
}

void Connections::MarkReady() {
  set_.ForReady([](RankConnection& connection) {
    connection.ready = !connection.broken;
    if (connection.broken) connection.set->Remove(connection.fd.get());  // until the next sweep
  });
}

RankConnection* Connections::Of(uint64_t generation, int rank) const {
  const auto it = of_rank_.find({generation, rank});
  return it == of_rank_.end() || it->second->broken ? nullptr : it->second;
}

void Connections::GiveTo(uint64_t generation, int rank, RankConnection& connection) {
  connection.generation = generation;
  connection.rank = rank;
  of_rank_[{generation, rank}] = &connection;
}

void Connections::Rename(std::pair<uint64_t, int> rank, std::pair<uint64_t, int> other) {
  RankConnection* connection = Of(rank.first, rank.second);
  of_rank_.erase(rank);
  if (connection != nullptr) GiveTo(other.first, other.second, *connection);
}

void Connections::SendToAll(uint64_t generation, uint16_t kind, const std::string& body) {
  for (auto& connection : all_) {
    if (connection->proved() && connection->generation == generation) connection->Send(kind, body);
  }
}

void Connections::BreakAll(uint64_t generation) {
  for (auto& connection : all_) {
    if (connection->proved() && connection->generation == generation) connection->broken = true;
  }
}

void Connections::Write(RankConnection& connection) {
  const bool was_broken = connection.broken;
  WriteSome(connection);
  // Its peer may live, and then no event comes of it.
  if (connection.broken && !was_broken) context_.tick_wanted = true;
  const bool waits = !connection.broken && !connection.out.empty();
  if (waits == connection.waits_to_write) return;
  connection.waits_to_write = waits;
  set_.AlsoWritable(connection.fd.get(), &connection, waits);
}

void Connections::WriteAll() {
  for (auto& connection : all_) Write(*connection);
}

void Connections::Sweep(Which which, const std::function<void(const RankConnection&)>& leave) {
  std::erase_if(all_, [&](const auto& connection) {
    const bool silent = !connection->proved() && context_.now_ms - connection->opened_ms > kHelloMs;
    if (!connection->broken) return silent;
    // Its end closes what a process has open before it is seen to be dead.
    if (which == Which::kOfTheDead && LivesStill(connection->peer)) return false;
    leave(*connection);
    const auto it = of_rank_.find({connection->generation, connection->rank});
    if (it != of_rank_.end() && it->second == connection.get()) of_rank_.erase(it);
    return true;
  });
}

void Connections::AddFds(std::vector<pollfd>* fds) const {
  AddFd(fds, set_.fd());
  AddFd(fds, listen_.get());
}

bool Connections::MoreToDo() const {
  return std::any_of(all_.begin(), all_.end(),
                     [](const auto& connection) { return connection->broken || !connection->proved(); });
}

}  // namespace gtrain::keeper
