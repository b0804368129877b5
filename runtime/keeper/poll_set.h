// Descriptors to wait for, however many, at a cost of those that are ready: ranks have two streams and a
// connection each, and one of them is ready at a time. libc only. Owner thread only.
#pragma once
#include <poll.h>
#include <sys/epoll.h>

#include <vector>

#include "base/unique_fd.h"

namespace gtrain::keeper {

// Adds one of the few descriptors that poll(2) itself waits for; nothing happens where there is none.
inline void AddFd(std::vector<pollfd>* fds, int fd, short events = POLLIN) {
  if (fd >= 0) fds->push_back({fd, events, 0});
}

// The set does not own the objects (`T`) that its descriptors belong to. An object must leave the set before
// it is destroyed: a starter that was forked meanwhile holds a copy of the descriptor, so closing ours alone
// does not take it out.
template <typename T>
class PollSet {
 public:
  bool Open() {
    epoll_.reset(epoll_create1(EPOLL_CLOEXEC));
    return epoll_.valid();
  }
  int fd() const { return epoll_.get(); }  // readable when any is ready

  bool Add(int fd, T* owner) { return Control(EPOLL_CTL_ADD, fd, owner, false); }
  void AlsoWritable(int fd, T* owner, bool wanted) { Control(EPOLL_CTL_MOD, fd, owner, wanted); }
  void Remove(int fd) { Control(EPOLL_CTL_DEL, fd, nullptr, false); }

  // Calls `handle` for what is ready now, at most kAtOnce; it may remove any of the set but destroy none.
  template <typename F>
  void ForReady(F handle) {
    epoll_event events[kAtOnce];
    const int n = epoll_wait(epoll_.get(), events, kAtOnce, 0);
    for (int i = 0; i < n; ++i) handle(*static_cast<T*>(events[i].data.ptr));
  }

 private:
  static constexpr int kAtOnce = 512;

  bool Control(int operation, int fd, T* owner, bool writable) {
    epoll_event event = {};
    event.events = EPOLLIN | (writable ? EPOLLOUT : 0u);
    event.data.ptr = owner;
    return epoll_ctl(epoll_.get(), operation, fd, &event) == 0;
  }

  UniqueFd epoll_;
};

}  // namespace gtrain::keeper
