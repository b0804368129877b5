// Connections between processes of one user on one machine: a ring in shared memory each way, and a Unix
// socket over which the two meet, wake each other and notice that the other one is gone.
//
// Whoever listens has a name of 128 random bits in the abstract namespace of Unix sockets (unix(7)), so there
// is no file to leave behind; processes in another network namespace do not find it. Both ends check that the
// other one is a process of the same user (SO_PEERCRED), and who connects shows the secret of the job, which
// that user may read anyway. A ring holds a stream of messages, each behind its length; a longer one than the
// ring goes through it in pieces. What the other end writes into the memory is checked and copied before it
// is read. The ring is the one of Lamport, "Specifying Concurrent Program Modules" (TOPLAS 1983), one writer
// and one reader.
//
// Sleeping: whoever has nothing to do calls Arm and waits until fd() is readable; the other end rings only
// then, so that two that are busy make no system call. A message between two busy processes takes two copies.
//
// Not thread-safe; threads may take turns under a lock. Nothing blocks. Cost: 0.5 MiB of memory, once all of
// the rings was used, and a descriptor, each end.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/unique_fd.h"

namespace gtrain::net {

struct ShmOptions {
  std::string secret;  // of the job, 1 to 128 bytes
  size_t message_bytes_max = size_t{64} << 20;
  int greeting_max = 64;  // connections that have shown no secret yet; the oldest makes room
};

// One end of a connection. It is lost when the other process is gone or breaks the rules, and does not come
// again.
class ShmLink {
 public:
  // Unavailable: nobody listens there, or not on this machine. PermissionDenied: a process of another user
  // does. ResourceExhausted: it has too many to greet; again later. The other end may still refuse it, which
  // is seen as a loss.
  static absl::StatusOr<std::unique_ptr<ShmLink>> Connect(const std::string& name, const ShmOptions& options);
  ~ShmLink();
  ShmLink(const ShmLink&) = delete;
  ShmLink& operator=(const ShmLink&) = delete;

  // Takes all of the message or nothing. ResourceExhausted: one before it has not gone through yet.
  // Unavailable: the connection is lost. InvalidArgument: it is empty, or too long.
  absl::Status Send(absl::string_view message);
  // The next message; none: there is no whole one. Also of a connection that is lost, what came before.
  std::optional<std::string> Receive();
  // Puts more of what was sent into the ring. True: something is still left.
  bool Flush();
  // There may be something for Receive or Flush to do. Two reads of memory.
  bool HasWork() const;

  // Before fd() is waited for. False: there is something to do now.
  bool Arm();
  void Disarm();  // whoever has armed looks for itself again
  // Behind Arm, readable when there may be something to do, or the other end is gone.
  int fd() const { return socket_.get(); }
  void OnReadable();
  bool lost() const { return lost_; }

 private:
  friend class ShmListener;
  struct Direction;
  struct Shared;
  ShmLink(UniqueFd socket, void* memory, bool listener, size_t message_bytes_max);
  size_t Write(absl::string_view bytes);
  size_t Available();
  void Read(char* to, size_t size);  // no more than is available
  void Publish();
  void Ring();
  void Lose() { lost_ = true; }

  const UniqueFd socket_;
  void* const memory_;
  Direction& out_;
  Direction& in_;
  const size_t message_bytes_max_;
  uint64_t written_ = 0, read_ = 0;  // of this end; what lies in the memory may be changed by the other one
  std::string unsent_;               // of a message that was taken
  size_t unsent_from_ = 0;
  std::string coming_;  // a message, of which `got_` bytes are there
  size_t got_ = 0;
  uint32_t length_ = 0;
  bool has_length_ = false;
  bool lost_ = false;
};

class ShmListener {
 public:
  static absl::StatusOr<std::unique_ptr<ShmListener>> Start(const ShmOptions& options);
  const std::string& name() const { return name_; }
  // Readable when Accept may have something to do.
  int fd() const { return epoll_.get(); }
  // Those that have shown the secret. Others are dropped.
  std::vector<std::unique_ptr<ShmLink>> Accept();

 private:
  ShmListener() = default;
  std::unique_ptr<ShmLink> Greet(UniqueFd socket) const;

  ShmOptions options_;
  std::string name_;
  UniqueFd socket_, epoll_;
  UniqueFd spare_;                 // given up for a moment when there is no other descriptor
  std::deque<UniqueFd> greeting_;  // the oldest first
};

}  // namespace gtrain::net
