#include "net/shm/server.h"

#include <sys/epoll.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace gtrain::net {
namespace {

constexpr absl::string_view kRoutePrefix = "shm/";
constexpr size_t kLinksMax = 4096;

absl::Status Watch(int epoll, int fd, void* what) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = what;
  if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("epoll_ctl: ", std::strerror(errno)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<ShmServer>> ShmServer::Start(const ShmOptions& options) {
  std::unique_ptr<ShmServer> server(new ShmServer());
  GT_ASSIGN_OR_RETURN(server->listener_, ShmListener::Start(options));
  server->epoll_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  GT_RETURN_IF_ERROR(Watch(server->epoll_.get(), server->listener_->fd(), nullptr));
  return server;
}

bool ShmServer::IsRoute(const port::Route& route) { return absl::StartsWith(route.id, kRoutePrefix); }

ShmServer::Links::iterator ShmServer::Drop(Links::iterator link) {
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, link->second->fd(), nullptr);
  return links_.erase(link);
}

absl::Status ShmServer::Send(const port::Route& route, absl::string_view message) {
  const auto link = links_.find(route.id);
  if (link == links_.end()) return absl::UnavailableError("the connection is gone");
  return link->second->Send(message);
}

std::optional<port::Received> ShmServer::Receive() {
  auto link = links_.upper_bound(served_);
  for (size_t left = links_.size(); left > 0; --left) {
    if (link == links_.end()) link = links_.begin();
    link->second->Flush();
    if (std::optional<std::string> message = link->second->Receive()) {
      served_ = link->first;
      port::Received received;
      received.route.id = link->first;
      received.address = "this machine";
      received.payload = *std::move(message);
      return received;
    }
    link = link->second->lost() ? Drop(link) : std::next(link);
  }
  return std::nullopt;
}

bool ShmServer::HasWork() const {
  for (const auto& [route, link] : links_) {
    if (link->lost() || link->HasWork()) return true;
  }
  return false;
}

bool ShmServer::Arm() {
  bool armed = true;
  for (const auto& [route, link] : links_) armed &= !link->lost() && link->Arm();
  return armed;
}

void ShmServer::Disarm() {
  for (const auto& [route, link] : links_) link->Disarm();
}

void ShmServer::OnReadable() {
  std::array<epoll_event, 64> events;
  const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < count; ++i) {
    if (void* const what = events[static_cast<size_t>(i)].data.ptr) {
      static_cast<ShmLink*>(what)->OnReadable();
      continue;
    }
    for (std::unique_ptr<ShmLink>& link : listener_->Accept()) {
      // The other end of one that is dropped sees it as lost.
      if (links_.size() >= kLinksMax || !Watch(epoll_.get(), link->fd(), link.get()).ok()) continue;
      links_.emplace(absl::StrCat(kRoutePrefix, ++last_), std::move(link));
    }
  }
}

}  // namespace gtrain::net
