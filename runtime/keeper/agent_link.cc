#include "runtime/keeper/agent_link.h"

#include <errno.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

#include <utility>

#include "runtime/keeper/agent_protocol.h"
#include "runtime/keeper/poll_set.h"
#include "runtime/keeper/posix.h"

namespace gtrain::keeper {

namespace {

constexpr size_t kAgentOutMax = 128u << 20;  // an agent this far behind is dropped

}  // namespace

bool AgentLink::Listen() { return ListenOn(kSocket, "agent", &listen_); }

void AgentLink::Unlisten() { unlink(kSocket); }

void AgentLink::Accept(int64_t now_ms) {
  while (true) {
    UniqueFd fd(accept4(listen_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd.valid()) return;
    if (!IsAgentOrKeeper(fd.get())) {  // fault X6
      if (!std::exchange(refused_, true))
        fprintf(stderr, "gtrain-keeper: refused a process that is no agent of this user\n");
      continue;
    }
    Drop(now_ms);  // the newest agent is the one that lives
    agent_ = std::move(fd);
  }
}

void AgentLink::Drop(int64_t now_ms) {
  if (attached_) seen_ms_ = now_ms;
  agent_.reset();
  in_.clear();
  out_.clear();
  attached_ = false;
}

void AgentLink::Read(int64_t now_ms, const std::function<void(Command)>& handle) {
  char buffer[64 << 10];
  bool ended = false;
  while (agent_.valid() && in_.size() < kAgentFrameBytesMax + sizeof(AgentFrame)) {
    ssize_t n = read(agent_.get(), buffer, sizeof(buffer));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) break;
    if (n <= 0) {
      ended = true;
      break;
    }
    in_.append(buffer, static_cast<size_t>(n));
  }
  size_t used = 0;
  while (agent_.valid()) {
    Command command;
    const Take take = TakeFrame(in_, &used, &command);
    if (take == Take::kBroken) ended = true;
    if (take != Take::kMessage) break;
    handle(std::move(command));
  }
  in_.erase(0, used);
  if (ended) Drop(now_ms);
}

void AgentLink::Write(int64_t now_ms) {
  while (agent_.valid() && !out_.empty()) {
    ssize_t n = send(agent_.get(), out_.data(), out_.size(), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) {
      if (out_.size() > kAgentOutMax) Drop(now_ms);
      return;
    }
    if (n <= 0) return Drop(now_ms);
    out_.erase(0, static_cast<size_t>(n));
  }
}

void AgentLink::Tell(Report report) {
  if (attached_) AppendFrame(std::move(report), &out_);
}

void AgentLink::AddFds(std::vector<pollfd>* fds) const {
  AddFd(fds, listen_.get());
  AddFd(fds, agent_.get(), static_cast<short>(out_.empty() ? POLLIN : POLLIN | POLLOUT));
}

}  // namespace gtrain::keeper
