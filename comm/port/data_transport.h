// Port: point to point messages among the members of one communicator. Adapters: comm/ucx (between
// machines), comm/fake (threads of a test). An exchange is one message a transfer, beside a greeting between
// two members that never spoke; a member keeps the addresses of all n, and nothing else that grows with n but
// its connections, which comm/ucx/fabric.h counts.
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

  // What the others need to reach this member; opaque, at most 64 KiB.
  virtual absl::StatusOr<std::string> Address() = 0;
  // addresses[self] is this member's own. Does not block: connections are made by the first messages.
  virtual absl::Status Connect(const std::vector<std::string>& addresses, int self) = 0;

  // Of these members, by their index here, of which this one is number `self`: another transport on the same
  // connections, independent from then on. All of them call it with the same `id`, which is unlike all others
  // of the generation. Costs no message; does not block.
  virtual absl::StatusOr<std::unique_ptr<DataTransport>> Part(const std::vector<int>& members, int self,
                                                              uint64_t id) = 0;

  // Packets for messages among the same members; Connect comes first. `listener` outlives it.
  virtual absl::StatusOr<std::unique_ptr<MessageLink>> Messages(MessageLink::Listener* listener) = 0;

  // Starts all transfers, then calls done(i) in the order of the list, each once transfer i is complete,
  // and returns when all are. Blocks as long as `watch` allows. After an error the transport
  // is dead: every transfer has ended, buffers may be freed, and what watch.Notice says of it was told as by
  // Fail.
  virtual absl::Status Exchange(absl::Span<const Transfer> transfers, absl::FunctionRef<void(size_t)> done,
                                const Watch& watch) = 0;

  // This member gives up. The members that it is connected with hear `notice` (at most kNoticeBytesMax; ""
  // is not told); the transport is dead. One message to each of them; blocks for two seconds at most. Best
  // effort, and nothing if this member itself has heard one: its sender told the others.
  virtual void Fail(absl::string_view notice) = 0;
  // This member ends well: members that it is connected with, and that wait for a message of it which never
  // came, get Unavailable with `words` (at most kNoticeBytesMax); what it has sent arrives first. Then the
  // transport is dead. Best effort; blocks for two seconds at most.
  virtual void Leave(absl::string_view words) = 0;
  // Of the exchange that has failed: the members whose part of it is not done, each once.
  virtual std::vector<int> Unfinished() const = 0;
  // OK, or GaveUp with a notice that has come. For wait loops; a message that came before it is received
  // first. Never blocks.
  virtual absl::Status Heard() = 0;
};

}  // namespace gtrain::comm
