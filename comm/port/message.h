// What processes say to each other between machines: a header and, behind it in the same message, bytes. Both
// ends are of one build (the first all-gather of a communicator compares it), so it is memory as it is.
#pragma once
#include <cstddef>
#include <cstdint>

#include "comm/ucx/ucx_abi.h"

namespace gtrain::comm {

inline constexpr uint32_t kMessageMagic = 0x67746631;  // "gtf1"

enum class MessageKind : uint32_t {
  kCall = 1,  // of a process to one that it wants to speak with: behind it its address
  kAnswer,    // to that; from then on both send
  kData,      // bytes [offset, offset + what is behind it) of a message of `total`
  kReady,     // the receiver of message `number` has its memory ready: the rest of it may come
  kGaveUp,    // behind it a notice (comm/port/watch.h)
  kLeft,      // behind it why no message from `number` on will come
};

// Of all but calls and answers: of member `sender` of communicator `context` of generation `generation`.
// Nothing is cut short: a generation, a communicator and a number never come back.
struct MessageHeader {
  uint32_t magic = kMessageMagic;
  MessageKind kind = MessageKind::kData;
  uint64_t generation = 0;
  uint64_t context = 0;
  uint64_t sender = 0;
  uint64_t number = 0;  // of the message, among those from this sender to this receiver
  uint64_t total = 0;
  uint64_t offset = 0;
};
static_assert(sizeof(MessageHeader) == 56);

// Of a message what travels at once; the rest, in pieces of this size, when the receiver is ready.
inline constexpr size_t kPieceBytes = GTRAIN_UCX_MESSAGE_MAX - sizeof(MessageHeader);

}  // namespace gtrain::comm
