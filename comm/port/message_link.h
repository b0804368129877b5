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

// A message that is being sent. `data` is read until `given` is all of it, and never after it was revoked. It
// is used with the lock of the link or inbox that carries it.
struct Sending {
  MessageHeader header;
  const char* data = nullptr;
  uint64_t given = 0;  // bytes that have been read
  int open = 0;        // pieces of it that have not left
  bool revoked = false;
  bool done() const { return given == header.total && open == 0; }
};

// Every posted message arrives once and in the order of the posts, or the member has failed. After the link
// is destroyed nothing is heard or read any more, but posted messages still leave. It must not be destroyed
// while a thread is in Until.
class MessageLink {
 public:
  class Listener {
   public:
    virtual ~Listener() = default;
    // Called with the lock held. May call Post and Stream, and nothing else.
    virtual void Hear(const MessageHeader& header, absl::string_view bytes) = 0;
  };
  virtual ~MessageLink() = default;

  // All functions below but Interrupt need the lock, which is not recursive.
  virtual void Lock() = 0;
  virtual void Unlock() = 0;
  // `header`: kind, number, total, tag and dtype are the caller's. At most kPieceBytes, copied. Never blocks.
  virtual void Post(int member, MessageHeader header, absl::string_view bytes) = 0;
  // Sends `message->header`, filled in as for Post, and the data, in pieces as there is room.
  virtual void Stream(int member, std::shared_ptr<Sending> message) = 0;
  // Says that a message of the member may come: a connection may need both ends to want it.
  virtual void Want(int member) = 0;
  // True while a posted message has not left yet.
  virtual bool Unsent(int member) = 0;
  // The reason why nothing gets to the member any more; "" where all is well.
  virtual std::string Failure(int member) = 0;
  // The reason why no message will come from a member that has ended well; "" while it is there.
  virtual std::string LeftWords(int member) = 0;
  // Returns OK, or GaveUp with a notice that has come for the communicator.
  virtual absl::Status Heard() = 0;
  // Returns when done() is true, or with the error of check(), which is called without the lock now and then.
  virtual absl::Status Until(absl::FunctionRef<bool()> done, absl::FunctionRef<absl::Status()> check) = 0;
  // Called when a thread that posted messages returns to its program.
  virtual void LetLeave() = 0;
  // While `keep` is set packets move although nobody waits.
  virtual void KeepMoving(bool keep) = 0;

  // Says that a wait for these members is going on; called with no members at its end. Links to them that do
  // not work are reported.
  virtual void Waiting(const std::vector<int>& members, Instant now) = 0;

  // Makes every thread in Until check again. May be called from any thread.
  virtual void Interrupt() = 0;
};

}  // namespace gtrain::comm
