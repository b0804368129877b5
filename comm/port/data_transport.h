// Port: point to point messages among the members of one communicator. Adapters: comm/ucx (between
// machines), comm/fake (threads of a test). An exchange costs one message per transfer, and a greeting
// between two members that never spoke. A member keeps the addresses of all n; of what it has, only its
// connections grow with n, too (comm/ucx/fabric.h).
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "comm/port/message_link.h"
#include "comm/port/watch.h"

namespace gtrain::comm {

struct Transfer {
  int peer = 0;  // index into the addresses given to Connect
  bool send = false;
  void* data = nullptr;        // only read if `send`
  size_t bytes = 0;            // > 0; the receiver knows the size, or at least the most it can be:
  size_t* received = nullptr;  // not null: a receive of up to `bytes`, and this is how many came
};

// Not thread-safe: one owner, one call at a time. Messages between two members match in the order in
// which both list them. A message of another generation or communicator is never delivered.
class DataTransport {
 public:
  virtual ~DataTransport() = default;

  // The address at which the other members reach this one; opaque, at most 64 KiB.
  virtual absl::StatusOr<std::string> Address() = 0;
  // addresses[self] is this member's own. Does not block: connections are made by the first messages.
  virtual absl::Status Connect(const std::vector<std::string>& addresses, int self) = 0;

  // Makes another transport on the same connections, for `members` (by their index here), of which this
  // member is number `self`. It is independent of this one. All of the members call it with the same `id`,
  // which no other transport of the generation has. Costs no message; does not block.
  virtual absl::StatusOr<std::unique_ptr<DataTransport>> Part(const std::vector<int>& members, int self,
                                                              uint64_t id) = 0;

  // Makes the link that carries messages among the same members; Connect comes first. `listener` outlives it.
  virtual absl::StatusOr<std::unique_ptr<MessageLink>> Messages(MessageLink::Listener* listener) = 0;

  // Starts all transfers, then calls done(i) in the order of the list, each once transfer i is complete, and
  // returns when all are. Blocks as long as `watch` allows. After an error the transport is dead: every
  // transfer has ended, buffers may be freed, and the peers were sent the text of watch.Notice as by Fail.
  virtual absl::Status Exchange(absl::Span<const Transfer> transfers, absl::FunctionRef<void(size_t)> done,
                                const Watch& watch) = 0;

  // This member gives up. The members that it is connected with receive `notice` (at most kNoticeBytesMax; ""
  // is not sent); the transport is dead. This costs one message to each of them and blocks for two seconds at
  // most. Best effort, and nothing is sent if this member itself has received a notice: its sender told the
  // others.
  virtual void Fail(absl::string_view notice) = 0;
  // This member ends well: members that it is connected with, and that wait for a message which it never
  // sent, get Unavailable with `words` (at most kNoticeBytesMax); the messages that it has sent arrive first.
  // Then the transport is dead. Best effort; blocks for two seconds at most.
  virtual void Leave(absl::string_view words) = 0;
  // After a failed exchange: the members whose part of it is not done, each once.
  virtual std::vector<int> Unfinished() const = 0;
  // Returns OK, or GaveUp with a notice that has come. Wait loops call it; a message that came before the
  // notice is received first. Never blocks.
  virtual absl::Status Heard() = 0;
};

}  // namespace gtrain::comm
