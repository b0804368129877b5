// What processes say to each other: a header and, behind it in the same message, bytes. Both ends are of one
// build (the first all-gather of a communicator compares it), so it is memory as it is.
#pragma once
#include <cstddef>
#include <cstdint>

namespace gtrain::comm {

inline constexpr uint32_t kMessageMagic = 0x67746632;  // "gtf2"

enum class MessageKind : uint32_t {
  // Of the fabric: a process to one that it wants to speak with, behind it its address; the answer to that;
  // from then on both send.
  kCall = 1,
  kAnswer,
  // Of exchanges, whose messages match by number: bytes [offset, offset + what is behind it) of a message of
  // `total`; the receiver of message `number` has its memory ready, so the rest of it may come; behind it a
  // notice (comm/port/watch.h); behind it why no message from `number` on will come.
  kData,
  kReady,
  kGaveUp,
  kLeft,
  // Of point to point messages, which match by tag (comm/exec/point_to_point.h): all of a message; one of
  // `total` bytes whose pieces follow; one that waits for kTake; the pieces of both; the receiver has memory
  // for `number`; it has taken messages worth `number` bytes of the window so far; the window is full, what
  // has
  // been taken; the answer to that.
  kEager,
  kComing,
  kOffer,
  kBulk,
  kTake,
  kTaken,
  kAskTaken,
  kAnswerTaken,
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
  int32_t tag = 0;     // of kEager and kOffer, as is
  uint32_t dtype = 0;  // a DType
};
static_assert(sizeof(MessageHeader) == 64);

// Of a message what travels at once; the rest, in pieces of this size, when the receiver is ready.
inline constexpr size_t kPieceBytes = (60 << 10) - sizeof(MessageHeader);

}  // namespace gtrain::comm
