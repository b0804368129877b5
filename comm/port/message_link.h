// Port: packets among the members of a communicator that are on different machines, for messages that match
// by tag. Adapters: comm/ucx, comm/fake. A member keeps an entry of some ten bytes for each of n; nothing is
// sent before something is posted.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/clock.h"
#include "comm/port/message.h"

namespace gtrain::comm {

// A message that is being sent. `data` is read until `given` is all of it, and never after it was revoked.
// Touched with the lock of whatever carries it.
struct Sending {
  MessageHeader header;
  const char* data = nullptr;
  uint64_t given = 0;  // bytes that have been read
  int open = 0;        // pieces of it that have not left
  bool revoked = false;
  bool done() const { return given == header.total && open == 0; }
};

// What is posted arrives once and in the order of the posts, or the member has failed. Its end: nothing is
// heard or read any more; what was posted leaves all the same. Not while somebody is in Until.
class MessageLink {
 public:
  class Listener {
   public:
    virtual ~Listener() = default;
    // With the lock held. May call Post and Stream, and nothing else.
    virtual void Hear(const MessageHeader& header, absl::string_view bytes) = 0;
  };
  virtual ~MessageLink() = default;

  // All that follows needs the lock, but for Interrupt. A thread locks once.
  virtual void Lock() = 0;
  virtual void Unlock() = 0;
  // `header`: kind, number, total, tag and dtype are the caller's. At most kPieceBytes, copied. Never blocks.
  virtual void Post(int member, MessageHeader header, absl::string_view bytes) = 0;
  // `message->header` as above and data: in pieces as there is room.
  virtual void Stream(int member, std::shared_ptr<Sending> message) = 0;
  // A message of the member may come: a connection may need both to want it.
  virtual void Want(int member) = 0;
  // Something that was posted has not left yet.
  virtual bool Unsent(int member) = 0;
  // Why nothing gets to the member any more; "" where all is well.
  virtual std::string Failure(int member) = 0;
  // Why no message will come of a member that has ended well; "" while it is there.
  virtual std::string LeftWords(int member) = 0;
  // OK, or GaveUp with a notice that has come for the communicator.
  virtual absl::Status Heard() = 0;
  // Returns when done() or with what check() says, which is called without the lock now and then.
  virtual absl::Status Until(absl::FunctionRef<bool()> done, absl::FunctionRef<absl::Status()> check) = 0;
  // Whoever posted something goes back to its program.
  virtual void LetLeave() = 0;
  // While it is set packets move although nobody waits.
  virtual void KeepMoving(bool keep) = 0;

  // A wait goes on that is for these; at its end with none. Ways that do not work are reported.
  virtual void Waiting(const std::vector<int>& members, Instant now) = 0;

  // Whoever is in Until looks again. From any thread.
  virtual void Interrupt() = 0;
};

}  // namespace gtrain::comm
